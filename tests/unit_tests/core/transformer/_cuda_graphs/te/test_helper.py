"""helper: the parts of the helper that need no model; integration tests train with the whole."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given

from megatron.core.transformer._cuda_graphs.engine.addresses import MovedBufferError
from megatron.core.transformer._cuda_graphs.engine.plan import ordered_plan
from megatron.core.transformer._cuda_graphs.errors import CaptureFailedError
from megatron.core.transformer._cuda_graphs.layer_graph import LayerGraph
from megatron.core.transformer._cuda_graphs.te import capture_arguments, captures_again
from megatron.core.transformer._cuda_graphs.te import helper as te_helper
from megatron.core.transformer._cuda_graphs.te.attached_graphs import CapturedLayers, slots_of_layers
from megatron.core.transformer._cuda_graphs.te.backends import choose_backend
from megatron.core.transformer._cuda_graphs.te.layers import fsdp_of
from megatron.core.transformer._cuda_graphs.te.order import PassOrder, get_overlap_moe_expert_parallel_comm_order
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.enums import AttnMaskType, CudaGraphModule
from megatron_fsdp_cuda_graphs.overlay import upstream

from ..pipeline_orders import orders
from .bare_helper import Alone, CapturingHelper, Failure, config, helper

# --------------------------------------------------------------------------------------------------- construction


# megatron-core asserts where these errors are raised: its callers may expect an AssertionError.
@pytest.mark.parametrize("error", [ValueError, AssertionError])
def test_an_unknown_fallback_is_refused_with_the_flag(error):
    with pytest.raises(error, match=r"--cuda-graph-fallback must be one of .*'eager'.*, got 'Eager'"):
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


# --------------------------------------------------------------------------------------------------------- slots


@given(orders())
def test_a_layers_slots_are_those_of_the_plan_by_microbatch(case):
    order, layers, microbatches = case
    slots = slots_of_layers(layers, microbatches)
    callable_of_slot = ordered_plan(order, layers, sum(layers)).callable_of_slot
    assert [list(of_layer) for of_layer in slots] == [
        [slot for slot, index in enumerate(callable_of_slot) if index == layer] for layer in range(sum(layers))
    ]


@pytest.mark.parametrize(
    ("steps", "microbatches", "in_flight", "expected"),
    [(3, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (0, 1, 1, 3), (5, 2, 1, 1), (20, 4, 4, 1), (0, 2, 2, 2)],
)
def test_warm_up_makes_up_for_training_steps_that_were_not_run(monkeypatch, steps, microbatches, in_flight, expected):
    monkeypatch.setattr(capture_arguments, "get_num_microbatches", lambda: microbatches)
    bare = helper(config=config(cuda_graph_warmup_steps=steps), num_microbatches=in_flight)
    assert bare._num_warmup_iterations() == expected


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
    found, layers = helper()._layers_of(SimpleNamespace(module=model))
    assert found is model
    assert layers == [("layer 0", False), ("layer 1", False), ("MTP 0", True), ("MTP 1", True)]


@pytest.mark.parametrize(("repetitions", "captured"), [(1, True), (2, False)])
def test_a_layer_that_runs_several_times_for_a_micro_batch_stays_eager(repetitions, captured):
    _, layers = helper()._layers_of(language_model(repetitions, repeated=True))
    assert any(is_mtp for _, is_mtp in layers) is captured


def test_a_chunk_without_a_decoder_has_no_layers():
    assert helper()._layers_of(SimpleNamespace(module=SimpleNamespace())) == (None, [])


# --------------------------------------------------------------------------------------------------- quantization


@pytest.mark.parametrize("tp_only", [False, True])
@pytest.mark.parametrize("with_context", [False, True])
def test_the_amax_reduction_group_is_that_of_megatron_core(with_context, tp_only):
    groups = SimpleNamespace(tp="tp", tp_cp="tp and cp", tp_dp="tp and dp", tp_dp_cp="tp, dp and cp")
    bare = helper(pg_collection=groups)
    theirs = upstream("megatron.core.transformer.cuda_graphs").TECudaGraphHelper._get_amax_reduction_group
    assert bare._get_amax_reduction_group(with_context, tp_only) == theirs(bare, with_context, tp_only)


def test_a_missing_amax_reduction_group_is_named():
    with pytest.raises(ValueError, match="the process group tp_dp_cp, which pg_collection does not have"):
        helper(pg_collection=SimpleNamespace(tp="tp"))._get_amax_reduction_group(with_context_parallel=True)


@pytest.mark.parametrize("under_fsdp", [False, True])
@pytest.mark.parametrize("fp8_param", [False, True])
def test_quantized_weights_are_cached_unless_megatron_fsdp_gathers_them_in_fp8(monkeypatch, fp8_param, under_fsdp):
    from megatron.core import fp8_utils

    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda config: "recipe")
    bare = helper(
        config=config(fp8="e4m3", fp4=None, fp8_param=fp8_param, tp_only_amax_red=False),
        model=[Fsdp() if under_fsdp else torch.nn.Linear(1, 1)],
        flattened_callables=[],
        flattened_callables_is_mtp=[],
        pg_collection=SimpleNamespace(tp_dp_cp="group"),
    )
    assert bare._quantization_arguments()["cache_quantized_params"] is not (fp8_param and under_fsdp)


# ----------------------------------------------------------------------------------------------------- static inputs


class MaskedLayer(torch.nn.Module):
    """A layer whose attention applies a mask of this type; it adds the mask."""

    def __init__(self, attn_mask_type):
        super().__init__()
        self.config = SimpleNamespace(cuda_graph_modules=[])
        self.self_attention = torch.nn.Identity()
        self.self_attention.attn_mask_type = attn_mask_type
        self.cuda_graphs = []

    def get_layer_static_inputs(self, seq_length, micro_batch_size):
        hidden_states = torch.zeros(seq_length, micro_batch_size, 4, device="cuda", requires_grad=True)
        return {"hidden_states": hidden_states, "attention_mask": torch.ones(1, device="cuda")}

    def forward(self, hidden_states, attention_mask=None):
        return hidden_states * 2 + attention_mask


def helper_of_layers(layers, order, fusion=False):
    """A helper for layers that are a chunk each, with the native engine."""
    return helper(
        config=config(
            cuda_graph_retain_backward_graph=False,
            cuda_graph_warmup_steps=0,
            sequence_parallel=False,
            fp8=None,
            fp4=None,
            fine_grained_activation_offloading=False,
            delay_wgrad_compute=False,
            cuda_graph_modules=[],
            overlap_moe_expert_parallel_comm=False,
            gradient_accumulation_fusion=fusion,
        ),
        model=[torch.nn.Module() for _ in layers],
        seq_length=2,
        micro_batch_size=1,
        num_microbatches=1,
        flattened_callables=layers,
        callables_per_chunk=[[layer] for layer in layers],
        chunks_with_decoder=[None] * len(layers),
        num_layers_per_chunk=[1] * len(layers),
        pp_group=SimpleNamespace(size=lambda: 1),
        _order=lambda: PassOrder(order, [1] * len(layers), 1),
        _num_warmup_iterations=lambda: 1,
        _engine=choose_backend(),
        _fits_shapes=False,
        _agreement=Alone(None, None),
    )


@pytest.mark.usefixtures("cpu_backend")
class TestMasks:
    def test_layers_whose_masks_differ_share_no_static_inputs(self):
        layers = [MaskedLayer(kind) for kind in (AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.causal)]
        samples = helper_of_layers(layers, None)._samples([1, -1, 2, -2, 3, -3])
        assert [kwargs["attention_mask"].item() for _, kwargs in samples] == [1, 0, 1]
        assert samples[0][0][0] is samples[2][0][0]

    def test_a_layer_that_is_given_no_mask_has_its_own_in_every_step(self):
        layers = [MaskedLayer(kind) for kind in (AttnMaskType.causal, AttnMaskType.no_mask)]
        helper_of_layers(layers, [1, -1, 2, -2])._capture_layers()
        x = torch.zeros(2, 1, 4, device="cuda", requires_grad=True)
        for _ in range(3):
            outputs = [layer.cuda_graphs[0](x, attention_mask=None)[0, 0, 0].item() for layer in layers]
            assert outputs == [1, 0]

    def test_a_mask_that_one_chunk_is_given_is_not_that_of_another_which_shares_its_memory(self):
        layers = [MaskedLayer(AttnMaskType.causal) for _ in range(2)]
        helper_of_layers(layers, [1, -1, 2, -2])._capture_layers()
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
    def samples(self, order, chunk_id_list):
        """Inputs of three layers in two chunks, of which each layer names its model's ``table``."""
        layers = [MaskedLayer(AttnMaskType.causal) for _ in range(3)]
        bare = helper_of_layers(layers, None)
        bare.callables_per_chunk, bare.num_layers_per_chunk = [layers[:1], layers[1:]], [1, 2]
        bare.chunks_with_decoder = [None, None]
        return bare._get_sample_arguments(order, chunk_id_list)

    def test_chunk_ids_say_that_the_order_is_one_of_layers(self):
        order, chunk_id_list = get_overlap_moe_expert_parallel_comm_order([1, 2, -2, -1], [1, 2], False)
        args, kwargs = self.samples(order, chunk_id_list)
        assert order == [1, 2, 3, -3, -2, -1]
        assert len(args) == len(kwargs) == 3

    def test_without_them_it_is_one_of_chunks(self):
        args, _ = self.samples([1, 2, -2, -1], None)
        assert len(args) == 3

    def test_layers_are_those_that_chunk_ids_name(self):
        made: list[MaskedLayer] = []

        class NotingLayer(MaskedLayer):
            def get_layer_static_inputs(self, seq_length, micro_batch_size):
                made.append(self)
                return super().get_layer_static_inputs(seq_length, micro_batch_size)

        layers = [NotingLayer(AttnMaskType.causal) for _ in range(2)]
        helper_of_layers(layers, None)._get_sample_arguments([1, 2, -2, -1], [[1, 0], [0, 0], None, None])
        assert [layers.index(layer) for layer in made] == [1, 0]


def test_a_plug_in_that_overrides_a_step_of_capture_is_called(cpu_backend):
    calls = []

    class PlugIn(CapturingHelper):
        def _start_capturing(self):
            calls.append("start")
            return super()._start_capturing()

        def _finish_capturing(self, start_time):
            calls.append("finish")
            return super()._finish_capturing(start_time)

    PlugIn(lambda: calls.append("capture")).create_cudagraphs()
    assert calls == ["start", "capture", "finish"]


def test_a_plug_in_gives_its_own_sample_arguments(monkeypatch):
    order = PassOrder([1, -1], [1], 1)
    bare = helper(
        config=config(cuda_graph_retain_backward_graph=False, fp8=None, fp4=None, fine_grained_activation_offloading=0),
        model=[torch.nn.Module()],
        _engine=choose_backend(),
        _order=lambda: order,
        _num_warmup_iterations=lambda: 1,
        _get_sample_arguments=lambda order, chunk_id_list=None: ("args", "kwargs"),
    )
    sample_args, arguments = bare._get_cuda_graph_input_data()
    assert (sample_args, arguments["sample_kwargs"], arguments["_order"]) == ("args", "kwargs", [1, -1])
    assert (bare.num_layers_per_chunk, bare.num_model_chunks, bare.num_microbatches) == ([1], 1, 1)


# ------------------------------------------------------------------------------------------------- moved parameters


class WeightedLayer(MaskedLayer):
    """A layer with a parameter that has a main gradient."""

    def __init__(self):
        super().__init__(AttnMaskType.causal)
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
        helper_of_layers([layer], [1, -1], fusion)._capture_layers()
        self.replay(layer, is_first_microbatch=True)
        return layer

    def test_a_parameter_that_moved_is_an_error_that_names_it(self):
        layer = self.captured(fusion=False)
        layer.inner.weight.data = layer.inner.weight.data.clone()
        with pytest.raises(MovedBufferError, match=r"inner\.weight of layer 1 .*create_cudagraphs"):
            self.replay(layer, is_first_microbatch=True)

    def test_a_main_gradient_that_moved_is_an_error_if_graphs_write_it(self):
        layer = self.captured(fusion=True)
        layer.inner.weight.main_grad = torch.zeros(4, device="cuda")
        with pytest.raises(MovedBufferError, match=r"the main gradient of inner\.weight of layer 1"):
            self.replay(layer, is_first_microbatch=True)

    def test_a_main_gradient_that_no_graph_writes_may_move(self):
        layer = self.captured(fusion=False)
        layer.inner.weight.main_grad = torch.zeros(4, device="cuda")
        self.replay(layer, is_first_microbatch=True)

    @pytest.mark.parametrize("under_fsdp", [False, True])
    @pytest.mark.parametrize("what", ["parameter", "main gradient", "buffer", "new buffer", "static input"])
    def test_megatron_fsdp_guards_parameters_itself_and_nothing_else(self, what, under_fsdp):
        layer, static = WeightedLayer(), torch.zeros(2, device="cuda")
        layer.inner.register_buffer("count", torch.zeros(2, device="cuda"))
        layer.inner.register_buffer("cache", None)
        chunk = Fsdp() if under_fsdp else torch.nn.Module()
        captured = CapturedLayers([chunk], [[layer]], [[0]], [lambda: None], [((static,), {})])
        (guard,) = captured.guards(fused=True)
        assert guard is not None
        guard.check()
        names = {
            "parameter": "inner.weight",
            "main gradient": "the main gradient of inner.weight",
            "buffer": "the buffer inner.count",
            "new buffer": None,
            "static input": "the static input hidden_states",
        }
        if what == "parameter":
            layer.inner.weight.data = layer.inner.weight.data.clone()
        elif what == "main gradient":
            layer.inner.weight.main_grad = torch.zeros(4, device="cuda")
        elif what == "buffer":
            layer.inner.count = layer.inner.count.clone()
        elif what == "new buffer":
            layer.inner.cache = torch.zeros(2, device="cuda")
        else:
            static.data = static.data.clone()
        allowed = names[what] is None or (under_fsdp and what in ("parameter", "main gradient"))
        with nullcontext() if allowed else pytest.raises(MovedBufferError, match=f"use {names[what]} of layer 1 "):
            guard.check()

    @pytest.mark.parametrize("moved", ["buffer", "static input"])
    def test_what_replays_use_is_checked_in_a_step(self, moved):
        layer = WeightedLayer()
        layer.inner.register_buffer("count", torch.zeros(2, device="cuda"))
        helper_of_layers([layer], [1, -1])._capture_layers()
        self.replay(layer, is_first_microbatch=True)
        if moved == "buffer":
            layer.inner.count = layer.inner.count.clone()
        else:
            static = layer.cuda_graphs[0].graphed.inputs[0]
            static.data = static.data.clone()
        with pytest.raises(MovedBufferError, match=f"use the {moved} .* of layer 1"):
            self.replay(layer, is_first_microbatch=True)


def test_addresses_are_compared_once_a_step():
    guard = mock.Mock()
    graph = LayerGraph("layer", lambda *args, **kwargs: None, (), {}, has_attention=True, guard=guard)
    for first in (True, False, False):
        graph(is_first_microbatch=first)
    assert guard.check.call_count == 1


class CountingLayer(MaskedLayer):
    """A layer that counts its calls in a buffer."""

    def __init__(self):
        super().__init__(AttnMaskType.causal)
        self.register_buffer("calls", torch.zeros(1, device="cuda"))


class DisturbingEngine:
    """An engine whose warm-up draws random numbers, changes buffers, and which may fail then."""

    def __init__(self, fails):
        self.fails = fails
        self.takes_hooks = False
        self.parameters = frozenset(("sample_kwargs",))

    def capture(self, layers, sample_args, **arguments):
        torch.rand(3)
        torch.rand(3, device="cuda")
        for layer in layers:
            layer.calls += 1
        if self.fails:
            raise Failure
        return [lambda *args, **kwargs: None for _ in sample_args]


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
class TestWhatWarmUpChanges:
    def capture(self, fails):
        layer = CountingLayer()
        capturing = helper_of_layers([layer], [1, -1])
        capturing._engine = DisturbingEngine(fails)
        with pytest.raises(Failure) if fails else nullcontext():
            capturing._capture_layers()
        return layer

    def test_generators_are_where_they_were(self, fails):
        states = torch.get_rng_state(), torch.cuda.get_rng_state()
        self.capture(fails)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert torch.equal(torch.cuda.get_rng_state(), states[1])

    def test_buffers_are_what_they_were(self, fails):
        assert self.capture(fails).calls.item() == 0


class RecordingEngine(DisturbingEngine):
    """An engine that keeps the arguments of its capture."""

    def __init__(self, takes_hooks):
        super().__init__(fails=False)
        self.takes_hooks = takes_hooks

    def capture(self, layers, sample_args, **arguments):
        self.arguments = arguments
        return super().capture(layers, sample_args, **arguments)


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("takes_hooks", [False, True])
def test_hooks_are_given_to_an_engine_that_takes_them(takes_hooks):
    layer, seen = CountingLayer(), []
    layer.register_forward_pre_hook(lambda module, args: seen.append(module))
    capturing = helper_of_layers([layer], [1, -1])
    capturing._engine = engine = RecordingEngine(takes_hooks)
    capturing._capture_layers()
    hooks = engine.arguments.get("capture_time_hooks", [])
    # the first waits for other ranks
    assert [[*each["forward_pre_hooks"]][:1] for each in hooks] == [["agreement"]] * takes_hooks
    assert [len(each["forward_pre_hooks"]) for each in hooks] == [2] * takes_hooks


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize(("stages", "expected"), [(1, None), (2, 1)])
def test_graphs_are_for_any_number_of_micro_batches_unless_there_are_pipeline_stages(stages, expected):
    layer = CountingLayer()
    capturing = helper_of_layers([layer], [1, -1])
    capturing.pp_group = SimpleNamespace(size=lambda: stages)
    capturing._engine = DisturbingEngine(fails=False)
    capturing._capture_layers()
    assert [graph.num_microbatches for graph in layer.cuda_graphs] == [expected]


# -------------------------------------------------------------------------------------------------------- wrappers


class Fsdp(torch.nn.Module):
    """What the helper looks for."""

    def capture_graphs(self, layers, keep_buckets):
        raise NotImplementedError

    def forget_graphs(self, layers):
        self.forgotten = layers


def test_megatron_fsdp_forgets_graphs_that_are_deleted(monkeypatch):
    monkeypatch.setattr(TECudaGraphHelper, "_log", lambda *arguments: None)
    fsdp, layer = Fsdp(), SimpleNamespace(cuda_graphs=[])
    helper(model=[fsdp], callables_per_chunk=[[layer]], _graphs_created=True).delete_cuda_graphs()
    assert fsdp.forgotten == [layer]


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

    chunks = [Capturing(), torch.nn.Linear(1, 1), Capturing()]
    capturing = helper(
        model=chunks,
        callables_per_chunk=[["first"], ["second"], ["third"]],
        _agreement=Alone(None, None),
        config=config(overlap_moe_expert_parallel_comm=in_parts),
    )
    with capturing._fsdp_capture():
        assert (chunks[0].capturing, chunks[2].capturing) == (["first"], ["third"])
    assert (chunks[0].capturing, chunks[2].capturing) == (None, None)


def test_layers_hold_no_graphs_once_these_are_deleted(monkeypatch):
    messages = []
    monkeypatch.setattr(TECudaGraphHelper, "_log", lambda self, level, message: messages.append(message))
    graphs = [mock.Mock(graphed=None), mock.Mock(graphed=None)]
    layer = SimpleNamespace(cuda_graphs=graphs, cuda_graph_manual_hooks=["hook"])
    deleting = helper(
        model=[torch.nn.Linear(1, 1)], callables_per_chunk=[[layer]], _graphs_created=True, _capture_finished=True
    )
    deleting.delete_cuda_graphs()
    assert [graph.reset.call_count for graph in graphs] == [1, 1]
    assert (layer.cuda_graphs, layer.cuda_graph_manual_hooks) == ([], [])
    assert not deleting.graphs_created()
    assert not deleting.capture_finished()
    assert messages == ["deleted all CUDA graphs"]


def test_layers_gather_by_themselves_only_without_megatron_fsdp():
    data_parallel, under_fsdp, under_ddp = mock.Mock(spec=["_make_forward_pre_hook"]), mock.Mock(), mock.Mock()
    chunks = [Fsdp(), data_parallel]
    helper(model=chunks, callables_per_chunk=[[under_fsdp], [under_ddp]]).cuda_graph_set_manual_hooks()
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
    part_of_a_model = helper(
        model=[fsdp],
        config=config(overlap_moe_expert_parallel_comm=False),
        pp_group=SimpleNamespace(size=lambda: 1),
        chunks_with_decoder=[fsdp.module["language_model"]],
        _engine=SimpleNamespace(name="native", parameters={"gradient_sinks"}),
    )
    assert part_of_a_model._whole_model_blocker() == "there are parameters outside of Linear"


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
    plain = {"fp8": None, "fp4": None, "delay_wgrad_compute": False, "fine_grained_activation_offloading": False}
    options = config(**{**plain, "overlap_moe_expert_parallel_comm": False, "cuda_graph_modules": [], **changes})
    assert helper(config=options, pp_group=SimpleNamespace(size=lambda: stages))._may_change_shape() is allowed


# --------------------------------------------------------------------------------------------------- changed steps


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("layers", [0, 1])
def test_a_stage_captures_for_each_number_of_micro_batches_with_the_others_even_without_layers(monkeypatch, layers):
    coming = SimpleNamespace(microbatches=2)
    for module in (te_helper, captures_again):
        monkeypatch.setattr(module, "get_num_microbatches", lambda: coming.microbatches)
    capturing = CapturingHelper(lambda: None, layers=layers)
    capturing._one_graph_serves_all = lambda: False
    capturing._log = lambda level, message: None  # type: ignore[method-assign]
    capturing.config.cuda_graph_max_captures = 2
    capturing.model, capturing.callables_per_chunk = [], []
    capturing.create_cudagraphs()
    seen = []
    for coming.microbatches in (2, 4, 4, 8, 8):
        assert capturing.capture_finished()
        seen.append((capturing.resets, capturing.graphs_created()))
    has = layers > 0
    assert seen == [(1, has), (2, has), (2, has), (2, False), (2, False)]
    assert capturing.eager_reason() == "captures-used-up"


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize(("layers", "reason"), [(0, "no-layers"), (1, "")])
def test_a_stage_without_layers_runs_eagerly_for_that_reason(layers, reason):
    capturing = CapturingHelper(lambda: None, layers=layers)
    assert capturing.eager_reason() == "before-capture"
    capturing.create_cudagraphs()
    assert capturing.eager_reason() == reason


@pytest.mark.usefixtures("cpu_backend")
def test_after_a_failed_capture_shapes_are_not_compared():
    def fail():
        capturing._changed_shapes = mock.Mock()  # as layers that are given graphs do
        capturing._captured_microbatches = 2  # of an earlier capture, in a stage without layers
        raise Failure

    capturing = CapturingHelper(fail)
    capturing.config.cuda_graph_fallback = "eager"
    capturing.create_cudagraphs()
    assert capturing._changed_shapes is capturing._captured_microbatches is None
    assert capturing.capture_finished()


@pytest.mark.usefixtures("cpu_backend")
def test_a_failed_capture_for_another_shape_leaves_training_eager_as_it_was(caplog, monkeypatch):
    monkeypatch.setattr(captures_again, "get_num_microbatches", lambda: 1)

    def fail():
        raise Failure

    capturing = CapturingHelper(fail)
    capturing._capture_finished, capturing.model = True, []
    capturing.seq_length = capturing._captured_tokens = 32
    capturing._changed_shapes = mock.Mock(before_step=lambda _: (64, 1))
    assert capturing.capture_finished()
    assert any("Training goes on without CUDA graphs (as it did)" in message for message in caplog.messages)
    assert not capturing.graphs_created()
    capturing._capture_finished = False
    with pytest.raises(CaptureFailedError):  # one that is asked for is an error
        capturing.create_cudagraphs()


@pytest.mark.parametrize("asks", [TECudaGraphHelper.capture_finished, TECudaGraphHelper.graphs_created])
def test_before_there_are_graphs_there_is_nothing_to_capture_again(asks):
    assert not asks(helper(_capture_finished=False, _graphs_created=False))
