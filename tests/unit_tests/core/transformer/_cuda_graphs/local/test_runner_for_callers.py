"""_CudaGraphRunner: what megatron-core, its tests and plug-ins read of a runner."""

import pytest
import torch

from megatron.core.transformer.cuda_graphs import ArgMetadata, create_cudagraphs, delete_cuda_graphs

from .local_graph_cases import HIDDEN, Layer, batch, recorded_runners, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestSurfaces:
    def test_the_input_surface_is_static_inputs_and_then_parameters(self):
        for runner in recorded_runners(scale=torch.ones(1, HIDDEN).cuda()):
            assert runner.num_dgrads == 2
            inputs = runner.fwd_graph_input_surface[: runner.num_dgrads]
            assert [each.data_ptr() for each in inputs] == [each.data_ptr() for each in runner._slot.inputs]
            assert runner.fwd_graph_input_surface[runner.num_dgrads :] == runner.params_to_backprop

    def test_an_input_is_copied_for_the_first_of_the_graphs_that_take_it(self):
        skips = [
            [tensor.can_skip_replay_copy for tensor in runner.fwd_graph_input_surface[: runner.num_dgrads]]
            for runner in recorded_runners(scale=torch.ones(1, HIDDEN).cuda())
        ]
        # the hidden states of later layers are where the layers before put them
        assert skips == [[False, False], [True, True], [True, True]]

    def test_a_tensor_that_one_call_takes_twice_is_copied_once(self):
        use_graphable_rng()
        layer, x = Layer().cuda(), batch(0)
        layer(x, scale=x)[0].sum().backward()
        create_cudagraphs()
        (runner,) = layer.cudagraph_manager.cudagraph_runners
        first, second = runner.fwd_graph_input_surface[:2]
        assert (first.can_skip_replay_copy, second.can_skip_replay_copy) == (False, True)
        assert first.data_ptr() == second.data_ptr()

    def test_outputs_are_the_static_ones_in_the_structure_of_the_call(self):
        runner, following, _ = recorded_runners()
        hidden, nothing = runner.fwd_graph_outputs
        assert nothing is None
        assert hidden.data_ptr() == runner.fwd_graph_output_surface[0].data_ptr()
        assert hidden.data_ptr() == following.fwd_graph_input_surface[0].data_ptr()

    def test_static_gradients_of_inputs_are_those_of_the_outputs_before(self):
        runner, following, _ = recorded_runners()
        (grad,) = runner.static_grad_outputs
        assert grad.data_ptr() == following.static_grad_inputs[0].data_ptr()

    def test_are_empty_after_the_graphs_are_deleted(self):
        runner, *_ = recorded_runners()
        delete_cuda_graphs()
        assert (runner.fwd_graph_outputs, runner.num_dgrads) == (None, 0)
        for name in ("input_surface", "output_surface"):
            assert getattr(runner, f"fwd_graph_{name}") == ()
        assert (runner.static_grad_outputs, runner.static_grad_inputs) == ((), ())


class TestArguments:
    def test_tensors_of_arguments_are_found_in_containers(self):
        runner, *_ = recorded_runners()
        one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
        assert runner.get_tensors(({"a": [one]}, None), {"b": (two, 7)}) == (one, two)
        assert runner.get_tensors(three) == (three,)

    def test_a_type_that_no_graph_takes_is_refused_where_types_are_checked(self):
        runner, *_ = recorded_runners()
        with pytest.raises(TypeError, match="an argument of type object"):
            runner.get_tensors((object(),))
        assert runner.get_tensors((object(),), check_types=False) == ()

    def test_descriptions_among_arguments_are_found(self):
        runner, *_ = recorded_runners()
        one, two = ArgMetadata(torch.ones(1)), ArgMetadata(torch.ones(2))
        assert runner.get_arg_metas(((one, 5),), {"b": two}) == [one, two]

    def test_a_tensor_becomes_a_list(self):
        runner, *_ = recorded_runners()
        one = torch.ones(1)
        assert (runner.to_list(one), runner.to_list((one, 2))) == ([one], [one, 2])
