"""Local graphs of what megatron-core's own layers do not do, or seldom."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import (
    create_cudagraphs,
    delete_cuda_graphs,
)

from .local_graph_cases import (
    HIDDEN,
    Layer,
    Stack,
    batch,
    eager_calls,
    runners,
    stack,
    train,
    use_graphable_rng,
)

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestUnusualTrainings:
    """What megatron-core's own layers do not do, or seldom."""

    def compare(self, run):
        eager = run(graphs=False)
        delete_cuda_graphs()
        assert run(graphs=True) == eager

    @pytest.mark.parametrize("parameter", [True, False])
    def test_sees_what_optimizers_change_unnoticed_by_autograd(self, parameter):
        def run(graphs):
            model, scale, found = stack(graphs=graphs), torch.ones(1, HIDDEN).cuda(), []
            scale = torch.nn.Parameter(scale) if parameter else scale
            for step in range(4):
                loss = model(batch(step), scale=scale).square().mean()
                loss.backward()
                create_cudagraphs()
                scale.data.add_(1)
                found.append((loss.item(), scale.grad.tolist() if parameter else None))
            return found

        self.compare(run)

    def test_one_gradient_of_two_inputs_is_read_by_one_graph_where_it_is(self):
        class Sum(Layer):
            def forward(self, hidden_states, scale=None, *args, **kwargs):
                return (hidden_states + scale) * 2, None

        def run(graphs):
            torch.manual_seed(5)
            use_graphable_rng()
            first, second, last = (kind(graphs=graphs).cuda() for kind in (Layer, Layer, Sum))
            found = []
            for step in range(4):
                (a, _), (b, _) = first(batch(step)), second(batch(step, 1))
                loss = (last(a, b)[0] + b.square()).square().mean()
                loss.backward()
                create_cudagraphs()
                params = [*first.parameters(), *second.parameters()]
                found.append([param.grad.tolist() for param in params if param.grad is not None])
                for param in params:
                    param.grad = None
            return found

        self.compare(run)

    def test_a_tensor_that_is_returned_twice_has_a_gradient_for_each(self):
        class Twice(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                out, _ = super().forward(hidden_states, *args, **kwargs)
                return out, out

        def run(graphs):
            torch.manual_seed(5)
            use_graphable_rng()
            layer, following, found = Twice(graphs=graphs).cuda(), Layer(2, graphs).cuda(), []
            for step in range(4):
                one, _ = layer(batch(step))  # the other is used nowhere
                following(one)[0].sum().backward()
                create_cudagraphs()
                found.append([param.grad.tolist() for param in layer.parameters()])
                layer.zero_grad()
            return found

        self.compare(run)

    @pytest.mark.parametrize("pipeline", [1, 2])
    @pytest.mark.parametrize(("hidden", "microbatches"), [("all", 2), ("some", 1)])
    def test_parameters_that_recomputation_hides_from_autograd_get_gradients(self, hidden, microbatches, pipeline):
        class Recomputed(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                out = checkpoint(self.linear, hidden_states, use_reentrant=True, preserve_rng_state=False)
                return hidden_states + (out if hidden == "all" else out * self.linear.bias), None

        def run(graphs):
            torch.manual_seed(5)
            use_graphable_rng()
            return train(
                Stack([Recomputed(number, graphs, pipeline) for number in (1, 2)]).cuda(), microbatches=microbatches
            )

        self.compare(run)

    @pytest.mark.parametrize("pipeline", [1, 2])
    def test_what_leaves_the_last_layer_may_be_kept_over_micro_batches_and_steps(self, pipeline):
        class Loss(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                out, _ = super().forward(hidden_states, *args, **kwargs)
                return out.square().mean(), out.detach()

        def run(graphs):
            torch.manual_seed(5)
            use_graphable_rng()
            first, last = Layer(1, graphs, pipeline).cuda(), Loss(2, graphs, pipeline).cuda()
            first.is_last_layer = False
            losses, hidden = [], []
            for step in range(4):
                for microbatch in range(3):
                    loss, out = last(first(batch(step, microbatch))[0])
                    losses.append(loss.detach())
                    hidden.append(out)
                    loss.backward()
                create_cudagraphs()
            gradients = [param.grad.tolist() for param in (*first.parameters(), *last.parameters())]
            return [loss.item() for loss in losses], [out.tolist() for out in hidden], gradients

        self.compare(run)

    @pytest.mark.parametrize("pipeline", [1, 2])
    def test_layers_that_are_not_trained_are_replayed_with_grad_on(self, pipeline):
        def run(graphs):
            model, found = stack(graphs=graphs, pipeline=pipeline), []
            model.before.requires_grad_(False)
            model.layers.requires_grad_(False)
            for step in range(3):
                for microbatch in range(2):
                    model(batch(step, microbatch)).square().mean().backward()
                create_cudagraphs()
                found.append(model.after.weight.grad.tolist())
            return found, eager_calls(model)

        (eager, all_calls), (graphed, calls) = run(graphs=False), run(graphs=True)
        assert graphed == eager
        assert all_calls == [6] * 3
        assert calls == [2 + 2 + pipeline] * 3  # the recorded step, two to warm up, and the captures

    def test_gradients_of_leaves_are_added_up_over_micro_batches(self):
        def run(graphs):
            model, found = stack(count=1, graphs=graphs), []
            scale = torch.nn.Parameter(torch.ones(3, HIDDEN).cuda())
            for step in range(3):
                for microbatch in range(2):
                    model(batch(step, microbatch), scale=scale).square().mean().backward()
                create_cudagraphs()
                found.append(scale.grad.tolist())
                scale.grad = None
            return found

        self.compare(run)

    def test_autocast_is_in_force_in_the_graphs_too(self):
        def run(graphs):
            model, found = stack(graphs=graphs), []
            kind = batch(0).device.type
            for step in range(3):
                with torch.autocast(kind, dtype=torch.bfloat16):
                    loss = model(batch(step)).float().square().mean()
                loss.backward()
                create_cudagraphs()
                found.append(loss.item())
            return found

        self.compare(run)

    @pytest.mark.parametrize("how", ["transposed", "expanded", "sliced"])
    def test_an_output_with_other_strides_than_a_contiguous_tensor(self, how):
        class Strided(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                out, _ = super().forward(hidden_states, *args, **kwargs)
                if how == "transposed":
                    return out.t().contiguous().t(), None
                return (out[:1].expand(3, -1) if how == "expanded" else torch.cat([out, out], 1)[:, ::2]), None

        def run(graphs):
            torch.manual_seed(5)
            use_graphable_rng()
            return train(Stack([Strided(i + 1, graphs) for i in range(3)]).cuda(), steps=3, microbatches=2)

        self.compare(run)

    def test_an_output_of_another_type_in_capture_is_refused(self):
        class Changing(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                out, _ = super().forward(hidden_states, *args, **kwargs)
                return (out.double() if cuda_graphs.is_graph_capturing() else out), None

        use_graphable_rng()
        layer = Changing().cuda()
        layer(batch(0))[0].sum().backward()
        with pytest.raises(RuntimeError, match="what it returns must not depend on whether graphs are captured"):
            create_cudagraphs()

    def test_memory_that_a_backward_pass_takes_from_an_output_is_refused(self):
        class Taking(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                out, kept = hidden_states * 2, self.linear(hidden_states)
                storage = kept.untyped_storage()
                if torch.is_grad_enabled():
                    out.register_hook(lambda grad: (storage.resize_(0), None)[1])
                return out, kept

        use_graphable_rng()
        layer = Taking(cuda_graph_warmup_steps=0).cuda()
        out, kept = layer(batch(0).requires_grad_())
        (out.sum() + kept.sum() * 0).backward()
        with pytest.raises(ValueError, match="Leave layernorm out of --recompute-modules"):
            create_cudagraphs()


class Recomputing(Layer):
    """Lets go of an activation in forward, and computes it again in backward."""

    def forward(self, hidden_states, *args, **kwargs):
        self.calls.count += 1
        checkpoint = tensor_parallel_random.CheckpointWithoutOutput(fp8=None)
        activation = checkpoint.checkpoint(torch.nn.functional.gelu, hidden_states)
        output = self.linear(activation)
        checkpoint.discard_output_and_register_recompute(output)
        return hidden_states + output, None


@pytest.fixture(autouse=True)
def _share_storage_without_a_compiler(monkeypatch):
    """megatron-core compiles a function that gives one storage the memory of another; a copy has the same values."""

    def share(output, recomputed):
        output.untyped_storage().resize_(recomputed.untyped_storage().nbytes())
        output.data.copy_(recomputed)

    monkeypatch.setattr(tensor_parallel_random, "_get_share_storage", lambda: share)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_training_is_bit_equal_to_eager(microbatches):
    def trained(graphs):
        torch.manual_seed(5)
        torch.cuda.manual_seed(5)
        use_graphable_rng()
        model = Stack([Recomputing(number, graphs) for number in (1, 2, 3)]).cuda()
        return train(model, microbatches=microbatches), model

    (eager, _), (graphed, model) = trained(graphs=False), trained(graphs=True)
    assert len(runners(model)) == 3
    assert graphed == eager
