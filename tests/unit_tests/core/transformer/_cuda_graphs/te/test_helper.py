"""Test ``TECudaGraphHelper``, with captures of simple layers without a model."""

import gc
import itertools
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from megatron.core.token_bounds import TokenBounds, token_bounds
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError
from megatron.core.transformer._cuda_graphs.te import capture_arguments
from megatron.core.transformer._cuda_graphs.te.capture_arguments import PassOrder, layer_samples
from megatron.core.transformer._cuda_graphs.te.capture_state import blocker
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.enums import AttnMaskType, CudaGraphModule
from tests.support.replaced import replaced

from .stages import Failure, MaskedLayer, capture, config, engine, helper_of, set_microbatches, stage_of


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cuda_graph_fallback": "Eager"}, "--cuda-graph-fallback must be error or eager, got Eager"),
        ({"cuda_graph_step_log": object}, "config.cuda_graph_step_log was removed: do not set it"),
        ({"cuda_graph_max_captures": 4}, "config.cuda_graph_max_captures was removed: do not set it"),
        ({"cuda_graph_report": None}, "config.cuda_graph_report was removed: do not set it, and read the log"),
    ],
)
def test_invalid_configuration_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        TECudaGraphHelper([], config(**options), 1, 1)


# megatron-core asserts instead of raising these errors, so its callers may expect an AssertionError.
def test_other_cuda_graph_impl_is_refused():
    with pytest.raises(AssertionError, match="needs --cuda-graph-impl transformer_engine, got 'local'"):
        TECudaGraphHelper([], config(cuda_graph_impl="local"), 8, 1)


def test_optimizer_with_its_own_graph_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "fsdp_of", lambda chunk: SimpleNamespace(ddp_config=None))
    optimizer = SimpleNamespace(config=SimpleNamespace(optimizer_cuda_graph=True))
    with pytest.raises(AssertionError, match="--optimizer-cuda-graph is not supported with --use-megatron-fsdp"):
        TECudaGraphHelper([torch.nn.Module()], config(), 8, 1, [optimizer])


def test_model_under_torch_fsdp_is_refused():
    model = torch.nn.Sequential(torch.nn.Module())
    model[0].__class__ = type("FSDPModule", (FSDPModule, torch.nn.Module), {})  # as fully_shard does
    with pytest.raises(ValueError, match=r"--use-torch-fsdp2 does not .* need: use --use-megatron-fsdp"):
        TECudaGraphHelper([model], config(), 8, 1)


def test_expandable_segments_with_registered_memory_are_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    with pytest.raises(AssertionError, match="expandable_segments:True needs NCCL_GRAPH_REGISTER=0"):
        TECudaGraphHelper([], config(), 8, 1)


@pytest.mark.parametrize(
    ("steps", "microbatches", "in_flight", "expected"),
    [(3, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (0, 2, 2, 2)],
)
def test_warm_up_iterations_depend_on_training_steps(monkeypatch, steps, microbatches, in_flight, expected):
    monkeypatch.setattr(capture_arguments, "get_num_microbatches", lambda: microbatches)
    options = config(cuda_graph_warmup_steps=steps)
    assert capture_arguments.num_warmup_iterations(options, in_flight) == expected


DISCOVERED = (
    "chunks_with_decoder",
    "callables_per_chunk",
    "callables_per_chunk_is_mtp",
    "num_layers_per_chunk",
    "flattened_callables",
    "flattened_callables_is_mtp",
)


@pytest.mark.parametrize("graphable", [True, False])
def test_discovered_layers_equal_megatron_core(one_stage, monkeypatch, graphable):
    helper = helper_of(layers=2)
    if not graphable:
        monkeypatch.setattr(helper.config, "cuda_graph_modules", [CudaGraphModule.mamba])
    found = []
    for kind in (TECudaGraphHelper, replaced("megatron.core.transformer.cuda_graphs").TECudaGraphHelper):
        kind._discover_layers(helper)
        found.append({name: getattr(helper, name) for name in DISCOVERED})
    assert found[0] == found[1]
    assert len(found[0]["flattened_callables"]) == 2 * graphable


def last_layer_only(helper):
    """Select only the last layer, as a plug-in for megatron-core's helper would."""
    replaced("megatron.core.transformer.cuda_graphs").TECudaGraphHelper._discover_layers(helper)
    for layers in (helper.callables_per_chunk[0], helper.flattened_callables, helper.callables_per_chunk_is_mtp[0]):
        del layers[0]
    helper.flattened_callables_is_mtp, helper.num_layers_per_chunk = [False], [1]


@pytest.mark.parametrize("assigned", [True, False], ids=["assigned", "overridden"])
def test_discovered_layers_are_captured(one_stage, monkeypatch, assigned):
    if assigned:
        monkeypatch.setattr(TECudaGraphHelper, "_discover_layers", last_layer_only)
        helper = helper_of(layers=2)
    else:
        helper = helper_of(layers=2, kind=type("PlugIn", (TECudaGraphHelper,), {"_discover_layers": last_layer_only}))
    helper.create_cudagraphs()
    layers = helper.chunks_with_decoder[0].decoder.layers
    assert [len(getattr(layer, "cuda_graphs", ())) for layer in layers] == [0, 1]


@pytest.mark.parametrize("under_fsdp", [False, True])
@pytest.mark.parametrize("fp8_param", [False, True])
def test_gathered_fp8_weights_are_not_cached(monkeypatch, fp8_param, under_fsdp):
    from megatron.core import fp8_utils

    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda config: "recipe")
    modules = [Fsdp() if under_fsdp else torch.nn.Linear(1, 1)]
    stage = stage_of([], modules=modules, fp8="e4m3", fp8_param=fp8_param, tp_only_amax_red=False)
    stage.groups.tp_dp_cp = "group"
    arguments = capture_arguments.quantization_arguments(stage, ())
    assert arguments["cache_quantized_params"] is not (fp8_param and under_fsdp)
    assert arguments["amax_reduction_group"] == "group"


def test_first_and_last_layers_stay_in_bf16(monkeypatch):
    from megatron.core import fp8_utils

    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda config: "recipe")
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    stage = stage_of([MaskedLayer() for _ in range(4)], fp8="e4m3", fp8_param=False, tp_only_amax_red=False, **ends)
    stage.config.num_layers = 3
    stage.groups.tp_dp_cp = "group"
    for number, layer in zip((1, 2, 3, 1), stage.layers, strict=True):
        layer.layer_number = number
    mtp = SimpleNamespace(layers=[SimpleNamespace(mtp_model_layer=stage.layers[3])])
    stage = replace(stage, chunks=[replace(stage.chunks[0], model=SimpleNamespace(mtp=mtp))])
    assert capture_arguments.quantization_arguments(stage, stage.layers)["enabled"] == (False, True, False, True)
    assert capture_arguments.quantization_arguments(stage, stage.layers[2:])["enabled"] == (False, True)


@pytest.mark.usefixtures("cpu_backend")
class TestMasks:
    def test_layers_with_different_masks_share_no_inputs(self):
        layers = [MaskedLayer(kind) for kind in (AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.causal)]
        plan = PassOrder([1, -1, 2, -2, 3, -3], [1, 1, 1]).plan
        samples = layer_samples(stage_of(*([layer] for layer in layers)), plan, 2, 1)
        assert [kwargs["attention_mask"].item() for _, kwargs in samples] == [1, 0, 1]
        assert samples[0][0][0] is samples[2][0][0]

    def test_each_layer_keeps_its_default_mask(self):
        layers = [MaskedLayer(kind) for kind in (AttnMaskType.causal, AttnMaskType.no_mask)]
        capture(stage_of(*([layer] for layer in layers)), [1, -1, 2, -2])
        x = torch.zeros(2, 1, 4, device="cuda", requires_grad=True)
        for _ in range(3):
            outputs = [layer.cuda_graphs[0].replay((x,), {})[0, 0, 0].item() for layer in layers]
            assert outputs == [1, 0]


def test_overridden_steps_of_capture_are_called(one_stage):
    calls = []

    class PlugIn(TECudaGraphHelper):
        def _start_capturing(self):
            calls.append("start")
            return super()._start_capturing()

        def _get_cuda_graph_input_data(self):
            calls.append("inputs")
            return super()._get_cuda_graph_input_data()

        def _reset_after_capture(self):
            calls.append("reset")

        def _finish_capturing(self, start_time):
            calls.append("finish")
            return super()._finish_capturing(start_time)

    helper_of(lambda: calls.append("capture"), kind=PlugIn).create_cudagraphs()
    assert calls == ["start", "inputs", "capture", "reset", "finish"]


def test_overridden_sample_arguments_are_called(two_stages):
    seen = []

    class PlugIn(TECudaGraphHelper):
        def _get_sample_arguments(self, order, chunk_id_list=None):
            seen.append((order, self.num_layers_per_chunk, self.num_model_chunks, self.num_microbatches))
            return super()._get_sample_arguments(order, chunk_id_list)

    helper_of(kind=PlugIn).create_cudagraphs()
    assert seen == [([1, 1, -1, 1, -1, -1], [1], 1, 3)]


class WeightedLayer(MaskedLayer):
    """A layer with a parameter that has a main gradient."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
        self.inner.weight.main_grad = torch.zeros(4, device="cuda")

    def forward(self, hidden_states, attention_mask=None):
        return hidden_states * self.inner.weight


@pytest.mark.usefixtures("cpu_backend")
class TestMovedParameters:
    def replay(self, layer, **options):
        x = torch.zeros(2, 1, 4, device="cuda", requires_grad=True)
        return layer.cuda_graphs[0].replay((x,), options)

    def captured(self, fusion):
        layer = WeightedLayer()
        capture(stage_of([layer], gradient_accumulation_fusion=fusion), [1, -1])
        self.replay(layer, is_first_microbatch=True)
        return layer

    def test_moved_parameter_is_an_error(self):
        layer = self.captured(fusion=False)
        layer.inner.weight.data = layer.inner.weight.data.clone()
        with pytest.raises(ChangedSinceCaptureError, match=r"address of weight of layer 1 .*inner .*create_cudag"):
            self.replay(layer, is_first_microbatch=True)

    def test_moved_main_gradient_is_an_error(self):
        layer = self.captured(fusion=True)
        layer.inner.weight.main_grad = torch.zeros(4, device="cuda")
        with pytest.raises(ChangedSinceCaptureError, match=r"main gradient of weight of layer 1 .*inner"):
            self.replay(layer, is_first_microbatch=True)

    def test_moved_buffer_runs_eagerly(self, caplog):
        layer = WeightedLayer()
        layer.inner.register_buffer("count", torch.zeros(2, device="cuda"))
        capture(stage_of([layer]), [1, -1])
        x = torch.zeros(2, 1, 4, device="cuda", requires_grad=True)
        assert layer.cuda_graphs[0].fits(x)
        layer.inner.count = layer.inner.count.clone()
        assert not layer.cuda_graphs[0].fits(x)
        assert "the address of count of layer 1" in caplog.text


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize(("stages", "expected"), [(1, None), (2, 1)])
def test_pipeline_stages_fix_the_number_of_micro_batches(stages, expected):
    layer = MaskedLayer()
    capture(stage_of([layer], stages=stages), [1, -1], engine())
    assert [graph.num_microbatches for graph in layer.cuda_graphs] == [expected]


class Fsdp(torch.nn.Module):
    """A wrapper with the Megatron-FSDP attributes that the helper reads."""

    @property
    def graphs(self):
        return self

    fsdp_hooks = graphs


def test_model_with_parameters_outside_is_not_captured_whole():
    fsdp = Fsdp()
    fsdp.module = torch.nn.ModuleDict({"language_model": torch.nn.Linear(1, 1), "head": torch.nn.Linear(1, 1)})
    stage = stage_of([], modules=[fsdp])
    chunks = [replace(stage.chunks[0], model=fsdp.module["language_model"])]
    assert blocker(replace(stage, chunks=chunks)) == "there are parameters outside of Linear"


@pytest.mark.parametrize(
    ("changes", "stages", "allowed"),
    [
        ({}, 1, True),
        ({"cuda_graph_modules": [CudaGraphModule.attn]}, 1, True),
        ({"cuda_graph_modules": [CudaGraphModule.attn, CudaGraphModule.moe_router]}, 1, False),
        ({"fp8": "hybrid"}, 1, False),
        ({"delay_wgrad_compute": True}, 1, False),
        ({}, 2, False),
    ],
    ids=str,
)
def test_stateful_replays_allow_no_other_shape(changes, stages, allowed):
    assert stage_of(stages=stages, **changes).may_change_shape is allowed


@pytest.mark.parametrize("layers", [0, 1])
def test_stage_recaptures_for_each_micro_batch_count(two_stages, monkeypatch, layers):
    monkeypatch.setattr(cuda_graphs, "MAX_RECAPTURES", 1)
    capturing = helper_of(layers=layers)
    set_microbatches(2)
    capturing.create_cudagraphs()
    seen = []
    for microbatches in (2, 4, 4, 8, 8):
        set_microbatches(microbatches)
        assert capturing.before_step()
        seen.append((capturing.model[0].resets, capturing.graphs_created()))
    has = layers > 0
    assert seen == [(1, has), (2, has), (2, has), (2, False), (2, False)]


def fail():
    raise Failure


def test_no_recapture_after_a_failed_capture(two_stages):
    capturing = helper_of(fail, cuda_graph_fallback="eager")
    capturing.create_cudagraphs()
    set_microbatches(4)
    assert capturing.before_step()
    assert not capturing.graphs_created()


def test_deferred_capture_can_be_tried_again(one_stage, monkeypatch):
    answers = iter([True, True, False])
    monkeypatch.setattr(TokenBounds, "defers_capture", lambda _: next(answers))
    capturing = helper_of()
    seen = []
    for _ in range(3):
        capturing.create_cudagraphs()
        seen.append((capturing.graphs_created(), capturing.model[0].resets))
    assert seen == [(False, 1), (False, 2), (True, 3)]


def test_released_helper_makes_no_deferred_capture(one_stage, monkeypatch):
    answers = iter([True, False])
    monkeypatch.setattr(TokenBounds, "defers_capture", lambda _: next(answers))
    capturing = helper_of()
    capturing.create_cudagraphs()
    capturing.release()
    assert (capturing.before_step(), capturing.graphs_created()) == (True, False)
    capturing.restore()
    assert capturing.graphs_created()


def test_limited_graphs_replay_only_in_steps_without_helper(one_stage):
    router = mock.Mock()
    token_bounds.add(router)
    capturing = helper_of()
    capturing.create_cudagraphs()
    model = capturing.model
    (layer,) = model[0].decoder.layers
    snapshot = layer.cuda_graphs[0].snapshot
    kept = weakref.ref(capturing)
    del capturing
    gc.collect()
    assert kept() is None
    token_bounds.begin()
    assert not snapshot.changed()
    token_bounds.end()
    assert snapshot.changed()
    assert "--moe-alltoall-capacity-factor" in snapshot.reason()
    token_bounds.clear()


def test_recapture_after_a_failed_recapture(two_stages):
    calls = itertools.count(1)
    capturing = helper_of(lambda: fail() if next(calls) == 2 else None, cuda_graph_fallback="eager")
    set_microbatches(2)
    capturing.create_cudagraphs()
    seen = []
    for microbatches in (4, 4, 2):
        set_microbatches(microbatches)
        assert capturing.before_step()
        seen.append(capturing.graphs_created())
    assert seen == [False, False, True]
