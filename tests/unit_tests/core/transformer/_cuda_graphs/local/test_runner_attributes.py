"""_CudaGraphRunner: what megatron-core, its tests and plug-ins read, assign and delete of a runner."""

import weakref

import pytest
import torch

from megatron.core.transformer.cuda_graphs import ArgMetadata, create_cudagraphs, delete_cuda_graphs

from .local_graph_cases import HIDDEN, Layer, batch, record, runners, stack, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


def recorded_runners(**kwargs):
    model = stack()
    record(model, **kwargs)
    return runners(model)


class TestGraphs:
    @pytest.mark.parametrize("name", ["fwd_graph", "bwd_graph"])
    @pytest.mark.parametrize("how", ["delete", "assign None"])
    def test_are_freed_when_one_is_given_up(self, name, how):
        runner, *_ = recorded_runners()
        graphs = [weakref.ref(runner.fwd_graph), weakref.ref(runner.bwd_graph)]
        if how == "delete":
            delattr(runner, name)
        else:
            setattr(runner, name, None)
        assert [graph() for graph in graphs] == [None, None]
        assert (runner.fwd_graph, runner.bwd_graph) == (None, None)

    def test_can_be_deleted_twice_and_before_they_are_captured(self):
        model = stack(count=1)
        model(batch(0))
        (runner,) = runners(model)
        for _ in range(2):
            assert hasattr(runner, "fwd_graph")
            del runner.fwd_graph, runner.bwd_graph

    def test_without_them_a_replay_is_refused(self):
        model = stack(count=1)
        record(model)
        (runner,) = runners(model)
        del runner.fwd_graph
        with pytest.raises(RuntimeError, match="has no CUDA graph to replay"):
            model(batch(1))

    def test_of_another_kind_may_be_assigned(self):
        runner, *_ = recorded_runners()
        runner.fwd_graph = other = object()
        assert runner.fwd_graph is other


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


class TestMetadata:
    def test_of_inputs_of_a_pass_with_gradients_says_that_they_are_saved(self):
        model, x = stack(), batch(0).requires_grad_()
        hidden, _ = model.layers[0](x)
        model.layers[1](hidden)
        assert x.cg_buffer_metadata.is_saved_for_backward
        assert (hidden.cg_buffer_metadata.is_cudagraph_output, hidden.cg_buffer_metadata.is_saved_for_backward) == (
            True,
            True,
        )

    def test_of_inputs_of_a_pass_without_gradients_says_that_they_are_not(self):
        model, x = stack(count=1), batch(0)
        with torch.no_grad():
            model.layers[0](x)
        assert not x.cg_buffer_metadata.is_saved_for_backward


class TestMethods:
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

    def test_connected_parameters_are_those_that_an_output_depends_on(self):
        model = stack(count=1, graphs=False)
        layer = model.layers[0]
        layer.unused = torch.nn.Linear(HIDDEN, HIDDEN)
        graphed = stack(count=1)
        record(graphed)
        (runner,) = runners(graphed)
        runner.module = layer
        assert runner.get_connected_params(layer(batch(0))) == tuple(layer.linear.parameters())

    def test_is_written_as_its_layer_and_shapes(self):
        runner, *_ = recorded_runners(scale=torch.ones(1, HIDDEN).cuda())
        assert str(runner) == "layer 1 (Layer) on (3, 8), (1, 8)"

    def test_the_context_of_quantization_is_empty_without_it(self):
        runner, *_ = recorded_runners()
        with runner.get_quantization_context() as entered:
            assert entered is None
