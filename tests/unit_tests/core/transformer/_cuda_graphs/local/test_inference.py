"""Test local graphs for inference, which are captured at their first call."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.transformer.cuda_graphs import (
    CudaGraphManager,
    _CudagraphGlobalRecord,
    create_cudagraphs,
    is_graph_capturing,
)

from .local_graph_cases import HIDDEN, Layer, batch, config, groups, record, stack, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class Context(StaticInferenceContext):
    """An inference context for static or dynamic batching."""

    dynamic = False
    padded_batch_dimensions: Any = None

    def is_static_batching(self):
        return not self.dynamic


class TestInference:
    def inline(self, **options):
        use_graphable_rng()
        layer = Layer(graphs=False).cuda().eval()
        layer.manager = CudaGraphManager(
            layer.config, layer, "forward", need_backward=False, inline_capture=True, pg_collection=groups(), **options
        )
        return layer

    @pytest.mark.parametrize("mode", [torch.inference_mode, nullcontext])
    def test_first_call_is_captured(self, mode):
        layer = self.inline()
        with mode():
            for step in range(3):
                out, _ = layer(batch(step), cache_key="one")
                assert torch.equal(out, layer.forward(batch(step), eager=True)[0])
        assert layer.calls.count == 2 + 1 + 3  # warm-up, capture and comparison

    def test_replaced_weight_is_refused(self):
        layer = self.inline()
        layer(batch(0), cache_key="one")
        layer.linear.weight = torch.nn.Parameter(layer.linear.weight.detach().clone())
        with pytest.raises(RuntimeError, match=r"changed since capture: the address of weight of layer 1 .*\.linear "):
            layer(batch(0), cache_key="one")

    def test_each_key_has_a_graph(self):
        layer = self.inline(num_warmup_steps=1)
        for size in (2, 3, 2, 3):
            out, _ = layer(batch(0, size=size), cache_key=size)
            assert torch.equal(out, layer.forward(batch(0, size=size), eager=True)[0])
        assert set(layer.manager.custom_cudagraphs_lookup_table) == {2, 3}
        assert [entry[1] for entry in _CudagraphGlobalRecord.cudagraph_inference_record] == ["fwd", "fwd"]

    def test_calls_without_key_are_matched_by_arguments(self):
        layer = self.inline()
        for size in (2, 3, 2):
            layer(batch(0, size=size))
        assert len(layer.manager.cudagraph_runners) == 2

    def test_layers_share_a_static_input(self):
        layers, references = [self.inline() for _ in range(2)], stack(count=2, graphs=False).layers.eval()
        for layer, reference in zip(layers, references, strict=True):
            layer.load_state_dict(reference.state_dict(), strict=False)
        for step in range(3):
            scale, others = torch.full((1, HIDDEN), 1.0 + step).cuda(), torch.full((1, HIDDEN), 7.0).cuda()
            for layer, reference, given in zip(
                layers, references, (scale, others if step == 1 else scale), strict=True
            ):
                assert torch.equal(layer(batch(step), scale=given, cache_key=0)[0], reference(batch(step), given)[0])
        (one,), (two,) = (layer.manager.custom_cudagraphs_lookup_table.values() for layer in layers)
        one, two = (runner.graphs.inputs for runner in (one, two))
        assert one[1].data_ptr() == two[1].data_ptr()
        assert one[0].data_ptr() != two[0].data_ptr()

    def test_generators_set_in_inference_mode_work(self):
        layer = self.inline()
        with torch.inference_mode():
            use_graphable_rng()
            torch.cuda.manual_seed(1)
            layer(batch(0), cache_key=0)
        model = stack(dropout=0.5)
        record(model)
        model(batch(1)).sum().backward()

    @pytest.mark.parametrize("batching", ["static", "dynamic"])
    def test_each_batch_shape_of_context_has_a_graph(self, batching):
        context = Context(1, 8)
        context.dynamic = batching == "dynamic"
        layer, reference = stack(count=1).layers[0].eval(), stack(count=1, graphs=False).layers[0].eval()
        with torch.inference_mode():
            for size in (2, 3, 2):
                context.padded_batch_dimensions = ("tokens", size)
                hidden = batch(size, size=size)
                out = layer(hidden_states=hidden, inference_context=context)
                assert torch.equal(out[0], reference(hidden)[0])
        keys = set(layer.cudagraph_manager.custom_cudagraphs_lookup_table)
        assert keys == ({("tokens", 2), ("tokens", 3)} if context.dynamic else {((2, 8), False), ((3, 8), False)})

    def test_captured_arguments_are_not_kept_alive(self):
        layer = self.inline()
        given = batch(0)
        gone = weakref.ref(given)
        layer(given, cache_key=0)
        del given
        assert gone() is None

    def test_warmup_keeps_state_of_context(self):
        class Recurrent(Layer):
            def forward(self, hidden_states, *args, inference_context=None, **kwargs):
                state = inference_context.key_value_memory_dict[self.layer_number]
                state.mul_(0.5).add_(hidden_states.mean(0, keepdim=True))
                return self.linear(hidden_states + state), None

        def run(graphs):
            torch.manual_seed(5)
            use_graphable_rng()
            layer, context = Recurrent(graphs=graphs).cuda().eval(), StaticInferenceContext(3, 8)
            context.key_value_memory_dict[1] = torch.zeros(1, HIDDEN).cuda()
            with torch.inference_mode():
                return [layer(hidden_states=batch(i), inference_context=context)[0].tolist() for i in range(3)]

        assert run(graphs=True) == run(graphs=False)

    def test_function_of_other_object_is_graphed(self):
        class Plain:
            def __init__(self):
                self.config, self.linear = config(), torch.nn.Linear(HIDDEN, HIDDEN).cuda()

            def double(self, x):
                return self.linear(x.mul_(2))

        use_graphable_rng()
        plain = Plain()
        CudaGraphManager(
            plain.config, plain, "double", need_backward=False, inline_capture=True, pg_collection=groups()
        )
        for step in range(2):
            assert torch.equal(plain.double(batch(step)), plain.linear(batch(step) * 2))

    @pytest.mark.parametrize("pipeline", [1, 2])
    def test_training_does_not_replay_inference_graphs(self, pipeline):
        layer = stack(count=1, pipeline=pipeline).layers[0]
        with torch.inference_mode():
            layer(batch(0), inference_context=Context(1, 8))
        (inference,) = layer.cudagraph_manager.cudagraph_runners
        layer(batch(0), inference_context=None)[0].sum().backward()
        create_cudagraphs()
        with torch.no_grad():
            layer(batch(1), inference_context=None)
        training = [each for each in layer.cudagraph_manager.cudagraph_runners if each is not inference]
        assert len(training) == 1
        assert training[0].bwd_graph is not None

    def test_failed_capture_leaves_no_graph(self):
        layer = self.inline()
        hook = layer.linear.register_forward_hook(lambda module, args, output: output.sum().item() and None)
        with pytest.raises(RuntimeError):
            layer(batch(0), cache_key=0)
        assert not is_graph_capturing()
        hook.remove()
        assert torch.equal(layer(batch(1), cache_key=0)[0], layer.forward(batch(1), eager=True)[0])
