"""One recorded call of a module: what it was given, and its warm-up, capture and graphs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from .. import state
from ..engine.capture import Capture, capturing, not_recording
from ..engine.connected_leaves import connected_leaves
from ..engine.preserve import moe_metrics, preserve_buffers, preserve_tensors
from ..engine.quantization import Quantization
from ..engine.rng import current_rng_state, make_generators_safe, use_rng_state
from ..engine.slot import SlotCapture, WarmupRecord
from ..engine.te_engine import transformer_engine_flag
from ..replacements import between
from ..replay_conditions import autocast_in_force
from .arguments import ArgMetadata, _check_supported_type, described, metas_of, tensors_of, with_tensors
from .main_grads import accumulate_into_main_grads, scratch_main_grads, track_fused_accumulation
from .memory import StaticBuffers, hold_pool
from .sharded_weights import ShardedWeights


class RecordedCall:
    """A call of a function of a module, the modes and generator state around it, and its graphs.

    A ``CaptureSession`` warms up all calls, then captures their passes in the order of the record.

    Args:
        base_module: The module, or another object, whose parameters ``func`` uses.
        func: The function; None for the module's own call.
        pool: The memory pool of the graphs.
        retain_graph: Whether backward keeps autograd's graph.

    Attributes:
        module: ``base_module``; the modules among its attributes if it is no module itself.
        function: What is called, for comparison with other calls.
        args, kwargs: The arguments, with descriptions in the place of tensors.
        returned: What the function returned last in warm-up or capture, described likewise.
        quantization: That of the recorded pass, set by its runner; None without, and for calls that are not recorded.
        autocast: What ``autocast_in_force`` returned at construction.
        sharded: The weights of the module that are sharded over ranks.
        begun: Whether ``begin`` was called, and ``reset`` not since.
        inputs, outputs: Descriptions of the tensors that the forward graph takes, and of those that it returns.
        slot: The graphs with their static tensors; None before the capture and after ``reset``.
        shared_params: Parameters whose gradients are left to autograd, as other calls give them one in the same
            backward pass.
        parts: The modules that ran in the forward pass when it was captured.
        changes_state: Whether the forward graph writes buffers of the module, or metrics of MoE layers.
        writes_inputs: Whether the forward graph writes its inputs.

    Raises:
        ArgumentTypeError: an argument is of a type that no graph takes.
    """

    def __init__(
        self,
        base_module: Any,
        func: Callable | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        pool: tuple,
        retain_graph: bool,
    ):
        for value in (*args, *kwargs.values()):
            _check_supported_type(ArgMetadata(value))
        number, own = getattr(base_module, "layer_number", None), getattr(func, "__name__", None)
        layer, suffix = "" if number is None else f"layer {number} ", "" if own is None else f".{own}"
        self.name = f"{layer}({type(base_module).__name__}){suffix}"
        self.module = _module_of(base_module)
        self.function = (base_module, func)
        self.func: Callable = func or partial(torch.nn.Module.__call__, base_module)
        self.args, self.kwargs = described(list(args)), described(dict(kwargs))
        self.metas = metas_of(self.args, self.kwargs)
        self.returned: Any = None
        self.quantization: Quantization | None = None
        self.autocast = autocast_in_force()
        self.sharded = ShardedWeights(self.module)
        self._rng_state = current_rng_state()
        kind = self.metas[0].device.type if self.metas else "cuda"
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._as_autocast = partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=False)
        self._pool, self._retain_graph = pool, retain_graph

        self.begun = False
        self.inputs: list[ArgMetadata] = []
        self.outputs: list[ArgMetadata] = []
        self.slot: SlotCapture | None = None
        self.shared_params: tuple[torch.Tensor, ...] = ()
        self.parts: tuple[torch.nn.Module, ...] = ()
        self.changes_state = self.writes_inputs = False
        self._buffers, self._warmup, self._differentiates = StaticBuffers(), WarmupRecord(), False
        self._output_addresses: list[int] = []
        self._escaping: set[int] = set()  # gradients that no graph reads

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(meta.shape)) for meta in self.metas)
        return f"{self.name} on {shapes or 'no tensors'}"

    def quantized_context(self) -> AbstractContextManager:
        """The context of FP8 or FP4 of the recorded pass; none without quantization."""
        return nullcontext() if self.quantization is None else self.quantization.autocast()

    def _repeat(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the function with ``inputs`` in the place of the call's tensors; return the tensors that it returns."""
        args, kwargs = with_tensors((self.args, self.kwargs), iter(inputs))
        output = self.func(*args, **kwargs)
        self.returned = described(output)
        return tensors_of(output)

    def begin(self, buffers: StaticBuffers, warmup: WarmupRecord, differentiates: bool) -> None:
        """Begin a capture.

        Args:
            buffers: The static tensors of all calls that are captured together.
            warmup: What passes of the same function have shown, or will show; shared with its other calls.
            differentiates: Whether there is a backward pass.
        """
        self.begun = True
        self._buffers, self._warmup, self._differentiates = buffers, warmup, differentiates

    def warm_up(self, inputs: Sequence[torch.Tensor], steps: int) -> tuple[torch.Tensor, ...]:
        """Run forward and backward ``steps`` times on ``inputs``; nothing that they compute is kept.

        Returns:
            The parameters that got a gradient; all of them where nothing ran.
        """
        slot = self._new_slot(inputs)
        trained = slot.params
        with (
            self._passes(),
            preserve_buffers([self.module] if self._differentiates else []),
            preserve_tensors(moe_metrics()),
            scratch_main_grads((*slot.params, *self.sharded.with_neighbors())),
            between(state._set_warmup_start, state._set_warmup_end),
        ):
            # The second step finds sharded weights gathered by the first.
            for _ in range(max(steps, 2) if self.sharded else steps):
                with self._surroundings():
                    slot.forward(self.sharded.completing(not_recording, reductions=False))
                if self._differentiates:
                    backward = self.sharded.completing(not_recording, reductions=True, finalizes=False)
                    slot.backward(backward, lambda outputs: tuple(map(torch.zeros_like, outputs)))
                    trained = slot.trained_params
                slot.drop_results()
            self.sharded.settle()
        return trained

    def forward(self, args: Any, kwargs: Any, outputs: Any, clone_inputs: bool) -> torch.cuda.CUDAGraph | None:
        """Capture the forward graph, and return it.

        Args:
            args, kwargs: The arguments, tensors or their descriptions.
            outputs: Descriptions of what the recorded call returned; None where nothing was recorded.
            clone_inputs: Whether the graph gets static inputs of its own, or reads the tensors among the arguments.

        Raises:
            ValueError: modules delay their weight gradients.
            RuntimeError: the function returns other tensors than when it was recorded.
        """
        hold_pool(self._pool)
        self.inputs = metas_of(described(args), described(kwargs))
        static = self._buffers.inputs(self.inputs) if clone_inputs else [t.detach() for t in tensors_of(args, kwargs)]
        versions, state_before = _versions(static), _written_state(self.module)
        self.slot = slot = self._new_slot(static)
        with self._passes(), self._surroundings(), torch.profiler.record_function(f"{self.name} forward for capture"):
            capture = Capture(self._pool)  # its graphs know the generator state that is in use now
            slot.forward(self.sharded.completing(capture.recording, reductions=False), capture.new_graph())
        if slot.delays_weight_gradients:
            raise ValueError(f"{self.name}: --delay-wgrad-compute does not work with --cuda-graph-impl local")
        self.parts = self._warmup.ran or ()
        self.changes_state = state_before != _written_state(self.module)
        self.writes_inputs = versions != _versions(static)
        captured = list(map(ArgMetadata, slot.outputs))
        self.outputs = captured if outputs is None else metas_of(outputs)
        kinds, recorded = ([(tuple(m.shape), m.dtype) for m in metas] for metas in (captured, self.outputs))
        if kinds != recorded:
            raise RuntimeError(
                f"{self.name} returned {kinds} in capture and {recorded} when it was recorded: what it returns must "
                "not depend on whether graphs are captured"
            )
        self._output_addresses = [output.data_ptr() for output in tensors_of(slot.outputs)]
        self._buffers.lend_outputs(self.outputs, tensors_of(slot.outputs))
        if not self._differentiates:  # outputs stay held: they may alias inputs and have no known last reader
            self._buffers.inputs_read(self.inputs)
        return slot.forward_graph

    def backward(self) -> torch.cuda.CUDAGraph | None:
        """Capture the backward graph, after the forward graph, and return it.

        Raises:
            ValueError: the backward pass moves what the forward pass returned.
        """
        slot, buffers = self.slot, self._buffers
        assert slot is not None
        outputs = tensors_of(slot.outputs)
        metas = [meta for meta, output in zip(self.outputs, outputs, strict=True) if output.requires_grad]
        grads = buffers.grads_of_outputs(metas)
        capture = Capture(self._pool)
        if self.sharded:  # autograd's graph does not show parameters of what is computed again in backward
            own = (param for part in self.parts for param in part.parameters(recurse=False))
            self.sharded.note_backward((*connected_params(self.module, outputs), *own))
        with (
            self._passes(),
            track_fused_accumulation((*slot.params, *self.sharded.with_neighbors())),
            torch.profiler.record_function(f"{self.name} backward for capture"),
        ):
            recording = self.sharded.completing(capture.recording, reductions=True)
            slot.backward(recording, lambda outputs: tuple(grads), capture.new_graph())
        if self._output_addresses != [output.data_ptr() for output in outputs]:
            raise ValueError(
                f"{self.name} returns memory that is taken away before its backward pass and computed again "
                "elsewhere, where replays would look for it. Leave layernorm out of --recompute-modules."
            )
        self._escaping = buffers.lend_grads(self.inputs, slot.grad_inputs)
        buffers.grads_of_outputs_read(metas, grads)  # last: a gradient may be passed on as it is
        buffers.inputs_read(self.inputs)
        for output in outputs:
            buffers.pool.let_go(output)
        slot.release_outputs()
        slot.release_inputs()
        slot.release_grad_outputs()
        slot.release_gradients(keep=self._escaping)
        return slot.backward_graph

    def release_escaping_gradients(self) -> None:
        """Let later captures use the memory of the gradients that no graph reads.

        They have been read when a later backward pass of the same module runs.
        """
        if self.slot is not None and self._escaping:
            for index in self._escaping:
                self._buffers.pool.let_go(self.slot.grad_inputs[index])
            self.slot.release_gradients()
            self._escaping = set()

    def reset(self) -> None:
        """Free the graphs and their static tensors."""
        if self.slot is not None:
            self.slot.reset()
        self.slot = None
        self.inputs, self.outputs, self.shared_params, self._escaping = [], [], (), set()
        self._buffers, self._warmup, self.begun = StaticBuffers(), WarmupRecord(), False

    def _new_slot(self, inputs: Sequence[torch.Tensor]) -> SlotCapture:
        quantization = self.quantization
        return SlotCapture(
            self.name,
            self._repeat,
            tuple(inputs),
            {},
            allow_unused_input=True,
            retain_graph=self._retain_graph,
            autocast=self.quantized_context,
            quantized=None if quantization is None else quantization.new_replay(),
            module=self.module,
            keep_param_grads=partial(accumulate_into_main_grads, shared=self.shared_params),
            warmup_record=self._warmup,
        )

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Restore the generator state and autocast that were in force around the call."""
        with use_rng_state(self._rng_state), self._as_autocast():
            yield

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Surround passes of warm-up or capture: grad mode, and statistics of quantization preserved."""
        quantization = self.quantization
        kept = nullcontext() if quantization is None else quantization.preserve_statistics([self.module])
        with nullcontext() if self._differentiates else torch.no_grad(), kept:
            yield


def _module_of(base: Any) -> torch.nn.Module:
    """The module that functions of ``base`` use: ``base`` itself, or the modules among its attributes."""
    if isinstance(base, torch.nn.Module):
        return base
    return torch.nn.ModuleList(value for value in vars(base).values() if isinstance(value, torch.nn.Module))


def connected_params(module: torch.nn.Module, outputs: Any) -> tuple[torch.nn.Parameter, ...]:
    """The parameters of ``module`` from which ``outputs`` were computed, by autograd's graph, in their order."""
    leaves = {id(leaf) for leaf in connected_leaves(tensors_of(outputs))}
    return tuple(param for param in module.parameters() if id(param) in leaves)


def _written_state(module: torch.nn.Module) -> list[tuple[int, int]]:
    """The addresses and versions of what a pass of ``module`` may write: its buffers, and the metrics of MoE layers."""
    tensors = (*module.buffers(), *moe_metrics())
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors if not tensor.is_inference()]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


@contextmanager
def capture_mode() -> Iterator[None]:
    """Say that graphs are being captured, on their own stream; generators and garbage collection are restored.

    No garbage is collected before: inference captures many graphs one by one, and it takes longer than that.
    """
    with between(state._set_capture_start, state._set_capture_end), capturing(transformer_engine_flag()):
        make_generators_safe()
        yield
