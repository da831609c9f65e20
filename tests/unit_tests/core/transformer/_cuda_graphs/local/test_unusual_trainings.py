"""Test local graphs of layers that differ from megatron-core's."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs

from .local_graph_cases import HIDDEN, Layer, Stack, batch, eager_calls, runners, stack, train, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestUnusualTrainings:
    def compare(self, run):
        eager = run(graphs=False)
        delete_cuda_graphs()
        assert run(graphs=True) == eager

    @pytest.mark.parametrize("parameter", [True, False])
    def test_data_changes_without_version_are_read(self, parameter):
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

    def test_gradient_of_two_inputs_is_shared_once(self):
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

    @pytest.mark.parametrize(("hidden", "microbatches", "pipeline"), [("all", 2, 2), ("some", 1, 1)])
    def test_recomputed_parameters_get_gradients(self, hidden, microbatches, pipeline):
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
    def test_outputs_of_last_layer_may_be_kept(self, pipeline):
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
    def test_frozen_layers_are_replayed_in_grad_mode(self, pipeline):
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
        assert calls == [2 + 2 + pipeline] * 3  # the recorded step, two warm-up passes, and the captures

    def test_autocast_applies_in_graphs(self):
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
    def test_strided_outputs_equal_eager(self, how):
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

    def test_other_output_type_in_capture_is_refused(self):
        class Changing(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                out, _ = super().forward(hidden_states, *args, **kwargs)
                return (out.double() if cuda_graphs.is_graph_capturing() else out), None

        use_graphable_rng()
        layer = Changing().cuda()
        layer(batch(0))[0].sum().backward()
        with pytest.raises(RuntimeError, match="return the same shapes and dtypes in both"):
            create_cudagraphs()

    def test_output_freed_before_backward_is_refused(self):
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
    """A layer that discards an activation in the forward pass and recomputes it in the backward pass."""

    def forward(self, hidden_states, *args, **kwargs):
        self.calls.count += 1
        checkpoint = tensor_parallel_random.CheckpointWithoutOutput(fp8=None)
        activation = checkpoint.checkpoint(torch.nn.functional.gelu, hidden_states)
        output = self.linear(activation)
        checkpoint.discard_output_and_register_recompute(output)
        return hidden_states + output, None


@pytest.fixture(autouse=True)
def _share_storage_without_a_compiler(monkeypatch):
    """Copy recomputed activations instead of sharing their storage, which needs a C++ compiler."""

    def share(output, recomputed):
        output.untyped_storage().resize_(recomputed.untyped_storage().nbytes())
        output.data.copy_(recomputed)

    monkeypatch.setattr(tensor_parallel_random, "_get_share_storage", lambda: share)


def test_recomputed_activations_equal_eager():
    def trained(graphs):
        torch.manual_seed(5)
        torch.cuda.manual_seed(5)
        use_graphable_rng()
        model = Stack([Recomputing(number, graphs) for number in (1, 2, 3)]).cuda()
        return train(model, microbatches=2), model

    (eager, _), (graphed, model) = trained(graphs=False), trained(graphs=True)
    assert len(runners(model)) == 3
    assert graphed == eager
