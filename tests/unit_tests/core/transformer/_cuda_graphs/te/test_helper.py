"""helper and its collaborators without a model: captures of plain layers; integration tests train with the whole."""

import itertools
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.plan import ordered_plan
from megatron.core.transformer._cuda_graphs.errors import CaptureFailedError, ChangedSinceCaptureError
from megatron.core.transformer._cuda_graphs.flags.options import Options
from megatron.core.transformer._cuda_graphs.hooks import runs_outside_graphs
from megatron.core.transformer._cuda_graphs.snapshot import Snapshot
from megatron.core.transformer._cuda_graphs.te import capture_arguments, capture_state
from megatron.core.transformer._cuda_graphs.te.attached_graphs import attach_graphs
from megatron.core.transformer._cuda_graphs.te.capture_arguments import CaptureArguments
from megatron.core.transformer._cuda_graphs.te.capture_state import CaptureState, Holds, blocker
from megatron.core.transformer._cuda_graphs.te.changed_shapes import ChangedShapes
from megatron.core.transformer._cuda_graphs.te.layers import fsdp_of, language_model_of, single_run_layers
from megatron.core.transformer._cuda_graphs.te.order import get_overlap_moe_expert_parallel_comm_order
from megatron.core.transformer._cuda_graphs.te.training_calls import TrainingCalls
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.enums import AttnMaskType, CudaGraphModule
from tests.support.replaced import replaced

from .stages import Failure, MaskedLayer, capture, config, engine, helper_of, set_microbatches, stage_of

# --------------------------------------------------------------------------------------------------- construction


# megatron-core asserts where these errors are raised: its callers may expect an AssertionError.
@pytest.mark.parametrize("error", [ValueError, AssertionError])
def test_an_unknown_fallback_is_refused_with_the_flag(error):
    with pytest.raises(error, match=r"--cuda-graph-fallback must be error or eager, got Eager"):
        TECudaGraphHelper([], config(cuda_graph_fallback="Eager"), 1, 1)


@pytest.mark.parametrize("error", [ValueError, AssertionError])
@pytest.mark.parametrize("impl", ["none", "local", "full_iteration"])
def test_another_kind_of_graphs_is_refused_with_the_flag(impl, error):
    with pytest.raises(error, match=f"needs --cuda-graph-impl transformer_engine, got '{impl}'"):
        TECudaGraphHelper([], config(cuda_graph_impl=impl), 8, 1)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_with_registered_nccl_memory_are_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    with pytest.raises(AssertionError, match=f"{variable}=expandable_segments:True needs NCCL_GRAPH_REGISTER=0"):
        TECudaGraphHelper([], config(), 8, 1)


@pytest.mark.parametrize(
    ("steps", "microbatches", "in_flight", "expected"),
    [(3, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (0, 1, 1, 3), (5, 2, 1, 1), (20, 4, 4, 1), (0, 2, 2, 2)],
)
def test_warm_up_makes_up_for_training_steps_that_were_not_run(monkeypatch, steps, microbatches, in_flight, expected):
    monkeypatch.setattr(capture_arguments, "get_num_microbatches", lambda: microbatches)
    options = config(cuda_graph_warmup_steps=steps)
    assert capture_arguments.num_warmup_iterations(options, in_flight) == expected


# --------------------------------------------------------------------------------------------------------- layers


def language_model(mtp_num_layers=0, repeated=False):
    mtp = SimpleNamespace(layers=[SimpleNamespace(mtp_model_layer=f"MTP {i}") for i in range(mtp_num_layers)])
    return SimpleNamespace(
        decoder=SimpleNamespace(layers=["layer 0", "layer 1"]),
        config=SimpleNamespace(mtp_use_repeated_layer=repeated, mtp_num_layers=mtp_num_layers),
        **({"mtp": mtp} if mtp_num_layers else {}),
    )


def test_layers_are_those_of_the_decoder_then_those_of_mtp():
    model = language_model(mtp_num_layers=2)
    assert language_model_of(cast(Any, SimpleNamespace(module=model))) is model
    assert single_run_layers(model) == ["layer 0", "layer 1", "MTP 0", "MTP 1"]


@pytest.mark.parametrize(("repetitions", "captured"), [(1, True), (2, False)])
def test_a_layer_that_runs_several_times_for_a_micro_batch_stays_eager(repetitions, captured):
    layers = single_run_layers(language_model(repetitions, repeated=True))
    assert ("MTP 0" in layers) is captured


def test_a_chunk_without_a_decoder_has_no_layers():
    model = language_model_of(cast(Any, SimpleNamespace(module=SimpleNamespace())))
    assert (model, single_run_layers(model)) == (None, [])


DISCOVERED = (
    "chunks_with_decoder",
    "callables_per_chunk",
    "callables_per_chunk_is_mtp",
    "num_layers_per_chunk",
    "flattened_callables",
    "flattened_callables_is_mtp",
)


@pytest.mark.parametrize("graphable", [True, False])
def test_discovered_layers_are_those_of_megatron_core(one_stage, monkeypatch, graphable):
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
    """Find layers as a plug-in does that was written for megatron-core's helper."""
    replaced("megatron.core.transformer.cuda_graphs").TECudaGraphHelper._discover_layers(helper)
    for layers in (helper.callables_per_chunk[0], helper.flattened_callables, helper.callables_per_chunk_is_mtp[0]):
        del layers[0]
    helper.flattened_callables_is_mtp, helper.num_layers_per_chunk = [False], [1]


@pytest.mark.parametrize("assigned", [True, False], ids=["assigned", "overridden"])
def test_layers_that_are_captured_are_those_discovered(one_stage, monkeypatch, assigned):
    if assigned:
        monkeypatch.setattr(TECudaGraphHelper, "_discover_layers", last_layer_only)
        helper = helper_of(layers=2)
    else:
        helper = helper_of(layers=2, kind=type("PlugIn", (TECudaGraphHelper,), {"_discover_layers": last_layer_only}))
    helper.create_cudagraphs()
    layers = helper.chunks_with_decoder[0].decoder.layers
    assert [len(getattr(layer, "cuda_graphs", ())) for layer in layers] == [0, 1]


def test_layers_left_out_rule_out_the_whole_model():
    layers = [MaskedLayer(), MaskedLayer()]
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList(layers)
    fsdp = Fsdp()
    fsdp.module = model
    stage = stage_of(layers, layers[:1], modules=[fsdp, fsdp], cpu_offloading=True)
    with mock.patch.object(capture_state, "known_class", return_value=True):
        reasons = [blocker(replace(stage, chunks=[replace(chunk, model=model)]), Holds.MODEL) for chunk in stage.chunks]
    assert reasons == ["activations are offloaded", "not all of its layers can be captured"]


# --------------------------------------------------------------------------------------------------- quantization


@pytest.mark.parametrize("tp_only", [False, True])
@pytest.mark.parametrize("with_context", [False, True])
def test_the_amax_reduction_group_is_that_of_megatron_core(with_context, tp_only):
    groups = SimpleNamespace(tp="tp", tp_cp="tp and cp", tp_dp="tp and dp", tp_dp_cp="tp, dp and cp")
    having_groups: Any = SimpleNamespace(pg_collection=groups)
    theirs, ours = (
        helper._get_amax_reduction_group(having_groups, with_context, tp_only)
        for helper in (replaced("megatron.core.transformer.cuda_graphs").TECudaGraphHelper, TECudaGraphHelper)
    )
    assert ours == theirs


def test_a_missing_amax_reduction_group_is_named():
    with pytest.raises(ValueError, match="the process group tp_dp_cp, which pg_collection does not have"):
        capture_arguments.amax_reduction_group(SimpleNamespace(tp="tp"), True, False)


@pytest.mark.parametrize("under_fsdp", [False, True])
@pytest.mark.parametrize("fp8_param", [False, True])
def test_quantized_weights_are_cached_unless_megatron_fsdp_gathers_them_in_fp8(monkeypatch, fp8_param, under_fsdp):
    from megatron.core import fp8_utils

    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda config: "recipe")
    modules = [Fsdp() if under_fsdp else torch.nn.Linear(1, 1)]
    stage = stage_of([], modules=modules, fp8="e4m3", fp8_param=fp8_param, tp_only_amax_red=False)
    stage.groups.tp_dp_cp = "group"
    arguments = capture_arguments.quantization_arguments(stage, ())
    assert arguments["cache_quantized_params"] is not (fp8_param and under_fsdp)


def test_each_layer_is_quantized_as_eagerly_whichever_are_captured(monkeypatch):
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


# ----------------------------------------------------------------------------------------------------- static inputs


@pytest.mark.usefixtures("cpu_backend")
class TestMasks:
    def test_layers_whose_masks_differ_share_no_static_inputs(self):
        layers = [MaskedLayer(kind) for kind in (AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.causal)]
        arguments = CaptureArguments(stage_of(*([layer] for layer in layers)), [[layer] for layer in layers], 2, 1)
        samples = arguments.samples([1, -1, 2, -2, 3, -3])
        assert [kwargs["attention_mask"].item() for _, kwargs in samples] == [1, 0, 1]
        assert samples[0][0][0] is samples[2][0][0]

    def test_a_layer_that_is_given_no_mask_has_its_own_in_every_step(self):
        layers = [MaskedLayer(kind) for kind in (AttnMaskType.causal, AttnMaskType.no_mask)]
        capture(stage_of(*([layer] for layer in layers)), [1, -1, 2, -2])
        x = torch.zeros(2, 1, 4, device="cuda", requires_grad=True)
        for _ in range(3):
            outputs = [layer.cuda_graphs[0](x, attention_mask=None)[0, 0, 0].item() for layer in layers]
            assert outputs == [1, 0]

    def test_a_mask_that_one_chunk_is_given_is_not_that_of_another_which_shares_its_memory(self):
        layers = [MaskedLayer(AttnMaskType.causal) for _ in range(2)]
        capture(stage_of(*([layer] for layer in layers)), [1, -1, 2, -2])
        x = torch.zeros(2, 1, 4, device="cuda", requires_grad=True)
        masks = torch.full((1,), 5.0, device="cuda"), None
        for _ in range(2):
            outputs = [
                layer.cuda_graphs[0](x, attention_mask=mask)[0, 0, 0].item()
                for layer, mask in zip(layers, masks, strict=True)
            ]
            assert outputs == [5, 1]


# --------------------------------------------------------------------------------------------------- order of passes


@pytest.mark.usefixtures("cpu_backend")
class TestSampleArguments:
    def samples(self, order, chunk_id_list, layers=None):
        """Inputs of three layers in two chunks, or of ``layers`` in a chunk each."""
        layers = layers or [MaskedLayer() for _ in range(3)]
        chunks = [layers[:1], layers[1:]]
        return CaptureArguments(stage_of(*chunks), chunks, 2, 1).samples(order, chunk_id_list)

    def test_chunk_ids_say_that_the_order_is_one_of_layers(self):
        order, chunk_id_list = get_overlap_moe_expert_parallel_comm_order([1, 2, -2, -1], [1, 2], False)
        samples = self.samples(order, chunk_id_list)
        assert order == [1, 2, 3, -3, -2, -1]
        assert len(samples) == 3

    def test_without_them_it_is_one_of_chunks(self):
        assert len(self.samples([1, 2, -2, -1], None)) == 3

    def test_layers_are_those_that_chunk_ids_name(self):
        made: list[MaskedLayer] = []

        class NotingLayer(MaskedLayer):
            def get_layer_static_inputs(self, seq_length, micro_batch_size):
                made.append(self)
                return super().get_layer_static_inputs(seq_length, micro_batch_size)

        layers = [NotingLayer() for _ in range(2)]
        self.samples([1, 2, -2, -1], [[1, 0], [0, 0], None, None], layers)
        assert [layers.index(layer) for layer in made] == [1, 0]


def test_a_plug_in_that_overrides_a_step_of_capture_is_called(one_stage):
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


def test_a_plug_in_gives_its_own_sample_arguments(two_stages):
    seen = []

    class PlugIn(TECudaGraphHelper):
        def _get_sample_arguments(self, order, chunk_id_list=None):
            seen.append((order, self.num_layers_per_chunk, self.num_model_chunks, self.num_microbatches))
            return super()._get_sample_arguments(order, chunk_id_list)

    helper_of(kind=PlugIn).create_cudagraphs()
    assert seen == [([1, 1, -1, 1, -1, -1], [1], 1, 3)]


def test_to_ask_for_the_inputs_of_a_capture_changes_nothing(two_stages):
    asked = helper_of()
    before = dict(vars(asked))
    asked._get_cuda_graph_input_data()
    assert vars(asked) == before


# ------------------------------------------------------------------------------------------------- moved parameters


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
        return layer.cuda_graphs[0](x, attention_mask=None, **options)

    def captured(self, fusion):
        layer = WeightedLayer()
        capture(stage_of([layer], gradient_accumulation_fusion=fusion), [1, -1])
        self.replay(layer, is_first_microbatch=True)
        return layer

    def test_a_parameter_that_moved_is_an_error_that_names_it(self):
        layer = self.captured(fusion=False)
        layer.inner.weight.data = layer.inner.weight.data.clone()
        with pytest.raises(ChangedSinceCaptureError, match=r"address of weight of layer 1 .*inner .*create_cudag"):
            self.replay(layer, is_first_microbatch=True)

    def test_a_main_gradient_that_moved_is_an_error_if_graphs_write_it(self):
        layer = self.captured(fusion=True)
        layer.inner.weight.main_grad = torch.zeros(4, device="cuda")
        with pytest.raises(ChangedSinceCaptureError, match=r"main gradient of weight of layer 1 .*inner"):
            self.replay(layer, is_first_microbatch=True)

    def test_a_main_gradient_that_no_graph_writes_may_move(self):
        layer = self.captured(fusion=False)
        layer.inner.weight.main_grad = torch.zeros(4, device="cuda")
        self.replay(layer, is_first_microbatch=True)

    @pytest.mark.parametrize("under_fsdp", [False, True])
    def test_megatron_fsdp_guards_parameters_itself(self, under_fsdp):
        layer, static = WeightedLayer(), torch.zeros(2, device="cuda")
        chunk = Fsdp() if under_fsdp else torch.nn.Module()
        stage = stage_of([layer], modules=[chunk], gradient_accumulation_fusion=True)
        plan = ordered_plan([1, -1], [1], 1)
        attach_graphs(stage, [[layer]], plan, [mock.Mock()], [((static,), {})], [Snapshot("")], None)
        layer.inner.weight.data = layer.inner.weight.data.clone()
        layer.inner.weight.main_grad = torch.zeros(4, device="cuda")
        with nullcontext() if under_fsdp else pytest.raises(ChangedSinceCaptureError, match="weight of layer 1"):
            layer.cuda_graphs[0](static, is_first_microbatch=True)

    def test_a_buffer_that_moved_is_noticed(self, caplog):
        layer = WeightedLayer()
        layer.inner.register_buffer("count", torch.zeros(2, device="cuda"))
        capture(stage_of([layer]), [1, -1])
        x = torch.zeros(2, 1, 4, device="cuda", requires_grad=True)
        assert layer.cuda_graphs[0].fits(x)
        layer.inner.count = layer.inner.count.clone()
        assert not layer.cuda_graphs[0].fits(x)
        assert "the address of count of layer 1" in caplog.text


class CountingLayer(MaskedLayer):
    """A layer that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, device="cuda"))


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
class TestWhatWarmUpChanges:
    def capture(self, fails):
        layer = CountingLayer()

        def disturb():
            torch.rand(3)
            torch.rand(3, device="cuda")
            layer.calls += 1
            if fails:
                raise Failure

        with pytest.raises(Failure) if fails else nullcontext():
            capture(stage_of([layer]), [1, -1], engine(disturb))
        return layer

    def test_generators_are_where_they_were(self, fails):
        states = torch.get_rng_state(), torch.cuda.get_rng_state()
        self.capture(fails)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert torch.equal(torch.cuda.get_rng_state(), states[1])

    def test_buffers_are_what_they_were(self, fails):
        assert self.capture(fails).calls.item() == 0


@pytest.mark.usefixtures("cpu_backend")
def test_hooks_of_layers_run_at_capture_time():
    layer, given = MaskedLayer(), {}
    layer.register_forward_pre_hook(runs_outside_graphs(lambda module, args: None))

    def run(layers, sample_args, **arguments):
        given.update(arguments)
        return [mock.Mock(spec=["__call__", "reset", "name_inputs"]) for _ in sample_args]

    capture(stage_of([layer]), [1, -1], run)
    (hooks,) = given["capture_time_hooks"]
    assert next(iter(hooks["forward_pre_hooks"])) == "agreement"  # waits for other ranks
    assert len(hooks["forward_pre_hooks"]) == 2


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize(("stages", "expected"), [(1, None), (2, 1)])
def test_graphs_are_for_any_number_of_micro_batches_unless_there_are_pipeline_stages(stages, expected):
    layer = MaskedLayer()
    capture(stage_of([layer], stages=stages), [1, -1], engine())
    assert [graph.num_microbatches for graph in layer.cuda_graphs] == [expected]


# -------------------------------------------------------------------------------------------------------- wrappers


class Fsdp(torch.nn.Module):
    """What the helper looks for."""

    @property
    def graphs(self):
        return self

    fsdp_hooks = graphs
    layers = defaultdict(lambda: None)

    def capture_graphs(self, layers, keep_buckets):
        raise NotImplementedError

    def forget_graphs(self, layers):
        self.forgotten = layers


def test_megatron_fsdp_forgets_graphs_that_are_deleted():
    fsdp, layer = Fsdp(), MaskedLayer()
    CaptureState(stage_of([layer], modules=[fsdp]), TrainingCalls((), ())).delete()
    assert fsdp.forgotten == [layer]


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("in_parts", [False, True])
def test_megatron_fsdp_is_in_capture_mode_with_the_layers_of_its_chunk(in_parts):
    class Capturing(Fsdp):
        capturing = None

        @contextmanager
        def capture_graphs(self, layers, keep_buckets):
            assert keep_buckets is in_parts
            self.capturing = layers
            yield
            self.capturing = None

        def zero_grad_buffer(self):
            assert self.capturing is None

        def gradient_sinks(self, layers, whole):
            return [None] * len(layers)

        def around_part(self, layer, runner):
            return None

    chunks = [Capturing(), torch.nn.Linear(1, 1), Capturing()]
    layers = [[MaskedLayer()] for _ in chunks]
    during = []

    def note():
        during.extend([chunks[0].capturing, chunks[2].capturing])

    stage = stage_of(*layers, modules=chunks, overlap_moe_expert_parallel_comm=in_parts)
    capture(stage, [1, -1, 2, -2, 3, -3], engine(note))
    assert during == [layers[0], layers[2]]
    assert (chunks[0].capturing, chunks[2].capturing) == (None, None)


def test_layers_hold_no_graphs_once_these_are_deleted(one_stage, caplog):
    deleting = helper_of()
    deleting.create_cudagraphs()
    (layer,) = deleting.flattened_callables
    (graph,), layer.cuda_graph_manual_hooks = layer.cuda_graphs, ["hook"]
    with caplog.at_level("INFO"):
        deleting.delete_cuda_graphs()
    assert graph.graphed.reset.call_count == 1
    assert (layer.cuda_graphs, layer.cuda_graph_manual_hooks) == ([], [])
    assert not deleting.graphs_created()
    assert not deleting.capture_finished()
    assert "deleted all CUDA graphs" in caplog.text


def test_layers_gather_by_themselves_only_without_megatron_fsdp():
    data_parallel, under_fsdp, under_ddp = mock.Mock(spec=["_make_forward_pre_hook"]), mock.Mock(), mock.Mock()
    stage = stage_of([under_fsdp], [under_ddp], modules=[Fsdp(), data_parallel])
    TECudaGraphHelper.cuda_graph_set_manual_hooks(SimpleNamespace(stage=stage))  # type: ignore[arg-type]
    assert not under_fsdp.setup_manual_hooks.called
    under_ddp.setup_manual_hooks.assert_called_once_with(data_parallel._make_forward_pre_hook)


def wrapped(module, levels):
    for _ in range(levels):
        wrapper = torch.nn.Module()
        wrapper.module = module
        module = wrapper
    return module


@pytest.mark.parametrize("levels", [0, 1, 3])
def test_megatron_fsdp_is_found_below_other_wrappers(levels):
    fsdp = Fsdp()
    assert fsdp_of(wrapped(fsdp, levels)) is fsdp


def test_a_model_without_megatron_fsdp_has_none():
    assert fsdp_of(wrapped(torch.nn.Linear(1, 1), 2)) is None


def test_a_language_model_within_a_larger_one_is_not_captured_whole():
    fsdp = Fsdp()
    fsdp.module = torch.nn.ModuleDict({"language_model": torch.nn.Linear(1, 1), "head": torch.nn.Linear(1, 1)})
    stage = stage_of([], modules=[fsdp])
    chunks = [replace(stage.chunks[0], model=fsdp.module["language_model"])]
    assert blocker(replace(stage, chunks=chunks), Holds.MODEL) == "there are parameters outside of Linear"


@pytest.mark.parametrize(
    ("quantized", "allowed"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, True),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, True),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, False),
        ({"fp4": "e2m1", "fp8_recipe": "delayed"}, False),
    ],
    ids=str,
)
def test_only_recipes_that_were_tried_are_captured_together(quantized, allowed):
    assert Options(stage_of([], **quantized).config).quantizes_otherwise is not allowed


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
def test_passes_of_another_shape_run_eagerly_unless_replays_need_what_they_would_have_left(changes, stages, allowed):
    assert stage_of(stages=stages, **changes).may_change_shape is allowed


# --------------------------------------------------------------------------------------------------- changed steps


@pytest.mark.parametrize("layers", [0, 1])
def test_a_stage_captures_for_each_number_of_micro_batches_with_the_others_even_without_layers(two_stages, layers):
    capturing = helper_of(layers=layers, cuda_graph_max_captures=2)
    set_microbatches(2)
    capturing.create_cudagraphs()
    seen = []
    for microbatches in (2, 4, 4, 8, 8):
        set_microbatches(microbatches)
        assert capturing.before_step()
        seen.append((capturing.model[0].resets, capturing.graphs_created()))
    has = layers > 0
    assert seen == [(1, has), (2, has), (2, has), (2, False), (2, False)]
    assert capturing.eager_reason() == "captures-used-up"


@pytest.mark.parametrize(("layers", "reason"), [(0, "no-layers"), (1, "")])
def test_a_stage_without_layers_runs_eagerly_for_that_reason(one_stage, layers, reason):
    capturing = helper_of(layers=layers)
    assert capturing.eager_reason() == "before-capture"
    capturing.create_cudagraphs()
    assert capturing.eager_reason() == reason


def fail():
    raise Failure


def test_after_a_failed_capture_there_is_no_other(two_stages):
    capturing = helper_of(fail, cuda_graph_fallback="eager")
    capturing.create_cudagraphs()
    set_microbatches(4)
    assert capturing.before_step()
    assert (capturing.graphs_created(), capturing.eager_reason()) == (False, "capture-failed")


def failing_at(*failures):
    """An engine's capture that fails at these calls, counted from 1."""
    calls = itertools.count(1)

    def capture():
        if next(calls) in failures:
            raise Failure

    return capture


@pytest.fixture
def longer(one_stage, monkeypatch):
    """Ranks have agreed on a shape of 64 tokens and two sequences; captures begin with 32 and one."""
    monkeypatch.setattr(ChangedShapes, "before_step", lambda *_: (64, 2))


def test_attributes_have_the_new_shape_after_a_recapture(longer):
    capturing = helper_of()
    capturing.create_cudagraphs()
    assert capturing.before_step()
    assert (capturing.graphs_created(), capturing.seq_length, capturing.micro_batch_size) == (True, 64, 2)


def test_a_failed_recapture_is_an_error_by_default(longer):
    capturing = helper_of(failing_at(2))
    capturing.create_cudagraphs()
    with pytest.raises(CaptureFailedError, match="Failure"):
        capturing.before_step()
    assert (capturing.graphs_created(), capturing.seq_length, capturing.micro_batch_size) == (False, 32, 1)


@pytest.mark.parametrize(("failures", "reason"), [((2,), ""), ((2, 3), "capture-failed")])
def test_after_a_failed_recapture_the_former_shape_is_captured(longer, caplog, failures, reason):
    capturing = helper_of(failing_at(*failures), cuda_graph_fallback="eager")
    capturing.create_cudagraphs()
    assert capturing.before_step()
    assert [message.endswith("(--cuda-graph-fallback eager).") for message in caplog.messages] == [True] * len(failures)
    assert (capturing.graphs_created(), capturing.eager_reason()) == (not reason, reason)
    assert (capturing.seq_length, capturing.micro_batch_size) == (32, 1)


def test_a_failed_recapture_for_a_shape_is_the_last(longer):
    capturing = helper_of(failing_at(2), cuda_graph_fallback="eager")
    capturing.create_cudagraphs()
    assert capturing._recaptures.are_left()
    capturing.before_step()
    assert not capturing._recaptures.are_left()
    assert capturing._recaptures.why_none() == ", as a capture for another shape has failed"


def test_an_earlier_number_of_micro_batches_is_captured_again(two_stages):
    capturing = helper_of(failing_at(2), cuda_graph_fallback="eager")
    set_microbatches(2)
    capturing.create_cudagraphs()
    seen = []
    for microbatches in (4, 4, 2):
        set_microbatches(microbatches)
        assert capturing.before_step()
        seen.append((capturing.graphs_created(), capturing.eager_reason(), capturing.num_microbatches))
    assert seen == [(False, "capture-failed", 2)] * 2 + [(True, "", 2)]


def test_a_failed_recapture_for_micro_batches_is_an_error(two_stages):
    capturing = helper_of(failing_at(2))
    set_microbatches(2)
    capturing.create_cudagraphs()
    set_microbatches(4)
    with pytest.raises(CaptureFailedError, match="Failure"):
        capturing.before_step()
    assert (capturing.graphs_created(), capturing.num_microbatches) == (False, 2)


def test_before_there_are_graphs_there_is_nothing_to_capture_again(one_stage):
    capturing = helper_of()
    assert not (capturing.before_step() or capturing.capture_finished() or capturing.graphs_created())


def test_capture_finished_prepares_a_step(one_stage, monkeypatch):
    monkeypatch.setattr(TECudaGraphHelper, "before_step", lambda self: (self, "prepared"))
    capturing = helper_of()
    assert capturing.capture_finished() == (capturing, "prepared")
