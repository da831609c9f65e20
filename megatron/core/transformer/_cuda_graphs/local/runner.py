"""Run one module or function: recorded eagerly in the first training step, then replayed as CUDA graphs."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from itertools import compress
from typing import Any

import torch

from ..engine.captured import GraphedCallable, GraphOwner, Phase, ReplayNode
from ..engine.graph import Capture, WarmUp, connected_leaves, moe_metrics, preserve_buffers, preserve_tensors
from ..engine.memory import weak_reference
from ..engine.quantization import Quantization, current_quantization
from ..engine.rng import current_rng_state, use_rng_state
from ..errors import ArgumentError, NoGraphError, UnsupportedError
from ..replacements import between, replaced_attribute
from ..snapshot import Snapshot, contexts_in_force
from .arguments import (
    ArgMetadata,
    CudagraphBufferMetadata,
    _check_supported_type,
    described,
    metadata_of,
    metas_of,
    mismatches,
    tensors_of,
    with_tensors,
)
from .memory import StaticInput, hold_pool
from .record import Recording, _CudagraphGlobalRecord
from .sharded_weights import ShardedWeights

# Configuration fields that need Python code in each pass, with an attribute of the modules that run it.
_NEED_PYTHON = {
    "moe_enable_routing_replay": "router_replay",
    "qk_clip": "current_max_attn_logits",
    "log_max_attention_logit": "current_max_attn_logits",
    "experimental_attention_variant": "indexer",
}


class _GraphStatus(Enum):
    """State of a runner, named after the pass that it runs next."""

    FWD_READY = 0
    BWD_READY = 1


class _CudagraphRecordNode(torch.autograd.Function):
    """Returns the outputs of a recorded call unchanged; its backward records the call's backward pass."""

    @staticmethod
    def forward(ctx: Any, runner: Any, *inputs: torch.Tensor) -> Any:
        """Return ``inputs``, the differentiable outputs of the call, unchanged."""
        ctx.runner = runner
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Record the runner's first backward pass, and return ``grads`` unchanged."""
        ctx.runner.record_backward()
        return None, *grads


class _CudagraphReplayNode(ReplayNode):
    """megatron-core's name for the autograd node of a replay."""


class LocalGraphs(GraphedCallable):
    """A ``GraphedCallable`` that may share its static inputs with other callables.

    Attributes:
        static_inputs: Each static input, with a function that returns whether its current value is in use.
    """

    static_inputs: Sequence[tuple[StaticInput, Callable[[], bool]]] = ()

    def place(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs`` to the static inputs of the forward graph.

        Raises:
            NoGraphError: The copy would overwrite a value that a different graph's backward pass still reads.
        """
        for (static, in_use), given in zip(self.static_inputs, inputs):  # noqa: B905
            if not static.put(given, in_use):
                raise NoGraphError(
                    f"{self.name}: an input of shape {tuple(given.shape)} is not the tensor of the recorded step, and "
                    "copying it would overwrite a value that another graph reads. With --cuda-graph-impl local, pass "
                    "tensors from layer to layer as in the recorded step."
                )

    def reset(self) -> None:
        super().reset()
        self.static_inputs = ()


class _CudaGraphRunner(torch.nn.Module, GraphOwner):
    """Runs ``func`` of ``base_module`` eagerly while a step is recorded, and as CUDA graphs afterwards.

    A runner serves one micro-batch at a time: it is busy from a forward pass until its backward pass. A
    ``CudaGraphManager`` creates as many runners as are busy at the same time.

    Args:
        base_module: The module, or an object that has modules as attributes.
        mempool: Memory pool of the graphs, a handle from ``torch.cuda.graph_pool_handle``.
        fwd_graph_input_args, fwd_graph_input_kwargs: Arguments of the recorded call.
        func: The function to run; None to call the module.
        need_backward: Whether gradients may be computed. If not, the graph is captured under ``torch.no_grad``.
        cache_key: The manager's lookup key for the runner; None to compare arguments instead.

    Attributes:
        args, kwargs: The arguments of the recorded call, with each tensor as ``ArgMetadata``.
        returned: The function's output in the last warm-up or capture, with each tensor as ``ArgMetadata``.
        grad_enabled: Whether there is, or will be, a backward graph.
        is_forward_only: Whether the call was recorded without grad.
        is_frozen: Whether the call was recorded with grad enabled but no output required grad.
        backward_pass: Autograd's graph task ID of the recorded backward pass.
        shared_params: Parameters that other runners use in the same backward pass; autograd sums their gradients.
        inputs, outputs: ``ArgMetadata`` of the graph's input and output tensors.
        graphs: The graphs with their static tensors; None before the capture.
        status: The next pass.

    Raises:
        ArgumentTypeError: An argument has a type that graphs do not support.
        UnsupportedError: Replays in training would skip Python code that ``config`` enables.
    """

    __setattr__ = object.__setattr__  # torch.nn.Module's looks for parameters, which takes time in every replay

    def __init__(
        self,
        base_module: Any,
        mempool: tuple,
        fwd_graph_input_args: Sequence[Any],
        fwd_graph_input_kwargs: Mapping[str, Any],
        func: Callable | None,
        need_backward: bool,
        cache_key: Hashable | None = None,
    ):
        super().__init__()
        for value in (*fwd_graph_input_args, *fwd_graph_input_kwargs.values()):
            _check_supported_type(ArgMetadata(value))
        self.base_module, self.mempool, self.cache_key = base_module, mempool, cache_key
        self.function = base_module, func
        self.func: Callable = func or partial(torch.nn.Module.__call__, base_module)
        self.module = base_module
        if not isinstance(base_module, torch.nn.Module):
            parts = (value for value in vars(base_module).values() if isinstance(value, torch.nn.Module))
            self.module = torch.nn.ModuleList(parts)
        number, own = getattr(base_module, "layer_number", None), getattr(func, "__name__", None)
        layer, suffix = "" if number is None else f"layer {number} ", "" if own is None else f".{own}"
        self.name = f"{layer}({type(base_module).__name__}){suffix}"
        self.args, self.kwargs = described(tuple(fwd_graph_input_args)), described(dict(fwd_graph_input_kwargs))
        self.metas = metas_of(self.args, self.kwargs)
        self.is_last_layer = getattr(base_module, "is_last_layer", True)  # set by annotate_first_last_layer
        config = getattr(base_module, "config", None)
        self.num_warmup_steps = getattr(config, "cuda_graph_warmup_steps", 0)
        self.retain_graph = getattr(config, "cuda_graph_retain_backward_graph", False)
        self.sharded = ShardedWeights(self.module)
        self.gtp_remat = bool(self.sharded)  # --tensor-parallel-num-weight-shards

        # Modes and state during the call.
        self.quantization: Quantization | None = None
        self.contexts = contexts_in_force()
        kind = self.metas[0].device.type if self.metas else "cuda"
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._as_autocast = partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=False)
        self._rng_state = current_rng_state()
        self.grad_enabled = need_backward and torch.is_grad_enabled()
        self.is_forward_only = need_backward and not torch.is_grad_enabled()
        for field, attribute in _NEED_PYTHON.items() if self.grad_enabled else ():
            if func is not None and attribute != "router_replay":  # megatron-core's methods of layers skip attention
                continue
            if getattr(config, field, None) and any(hasattr(part, attribute) for part in self.module.modules()):
                raise UnsupportedError(
                    f"{self.name}: {field} needs Python code in each training pass, which replays do not run: disable "
                    "it, or train with --cuda-graph-impl none"
                )
        self._return_to_recording()

    def _return_to_recording(self) -> None:
        self.fwd_graph_recorded = self.bwd_graph_recorded = self.is_frozen = False
        self.backward_pass = -1
        self.returned: Any = None
        self.graphs: LocalGraphs | None = None
        self._recording: Recording = _CudagraphGlobalRecord.recording
        self._snapshot: Snapshot | None = None
        self.inputs: list[ArgMetadata] = []
        self.outputs: list[ArgMetadata] = []
        self.shared_params: tuple[torch.Tensor, ...] = ()
        self.params_to_backprop: tuple[torch.Tensor, ...] = ()  # parameters that receive a gradient
        self._output_addresses: list[int] = []
        self._escaping: set[int] = set()  # indices of input gradients that graphs do not read
        self._unread_outputs: set[int] = set()  # indices of outputs that graphs do not read
        self.status = _GraphStatus.FWD_READY
        self.bwd_graph_replay_complete_event = torch.cuda.Event()

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(meta.shape)) for meta in self.metas)
        return f"{self.name} on {shapes or 'no tensors'}"

    def reset(self) -> None:
        """Free the graphs and their static tensors, and return to the state before recording."""
        for param in self.params_to_backprop:
            if getattr(param, "_cudagraph_wgrad_ready_event", None) is self.bwd_graph_replay_complete_event:
                del param._cudagraph_wgrad_ready_event
        if self.graphs is not None:
            self.graphs.reset()
        self.sharded.forget()
        self._return_to_recording()

    def record_graph_capture(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run eagerly, record the first call, and return the output of ``func``."""
        output = self.func(*args, **kwargs)
        differentiable = [tensor for tensor in tensors_of(output) if tensor.requires_grad] if self.grad_enabled else []
        if differentiable and torch.is_grad_enabled():
            noted = iter(_CudagraphRecordNode.apply(self, *differentiable))
            output = with_tensors(
                output, iter([next(noted) if tensor.requires_grad else tensor for tensor in tensors_of(output)])
            )
            self.status = _GraphStatus.BWD_READY
        if not self.fwd_graph_recorded:
            self.is_frozen = torch.is_grad_enabled() and not differentiable
            self.apply_cudagraph_record_metadata(args, kwargs, output)
            self.quantization = current_quantization()
            _CudagraphGlobalRecord.record_fwd_graph(self, described(args), described(kwargs), described(output))
            self.fwd_graph_recorded = True
        return output

    def record_backward(self) -> None:
        """Mark the runner as free after a backward pass of the recorded step, and record the first such pass."""
        self.status = _GraphStatus.FWD_READY
        if not self.bwd_graph_recorded:
            self.backward_pass = torch._C._current_graph_task_id()
            _CudagraphGlobalRecord.record_bwd_graph(self)
            self.bwd_graph_recorded = True

    def apply_cudagraph_record_metadata(self, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """Attach ``cg_buffer_metadata`` to the input and output tensors of a recorded call."""
        recording = _CudagraphGlobalRecord.open_recording().token
        for tensor in tensors_of(args, kwargs):
            known = getattr(tensor, "cg_buffer_metadata", None)
            if known is None or known.recording is not recording:
                known = tensor.cg_buffer_metadata = CudagraphBufferMetadata(recording=recording)
            known.is_cudagraph_input = True
            known.input_use_count += 1
            known.cudagraph_reuse_ref_count += known.is_cudagraph_output
        for tensor in tensors_of(outputs):
            tensor.cg_buffer_metadata = CudagraphBufferMetadata(is_cudagraph_output=True, recording=recording)

    @property
    def fwd_graph(self) -> torch.cuda.CUDAGraph | None:
        """Return the forward graph; None before the capture."""
        return None if self.graphs is None else self.graphs.forward_graph

    @property
    def bwd_graph(self) -> torch.cuda.CUDAGraph | None:
        """Return the backward graph; None before the capture or without grad."""
        return None if self.graphs is None else self.graphs.backward_graph

    def begin_capture(self, recording: Recording) -> None:
        """Join ``recording``; passes are captured with grad if a backward pass was recorded."""
        self._recording = recording
        self.grad_enabled = self.bwd_graph_recorded

    def warm_up(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run forward and backward passes on ``inputs`` ``num_warmup_steps`` times, and discard the results.

        Returns:
            The parameters that received a gradient; all parameters if there is no backward pass.
        """
        from megatron.core.transformer.cuda_graphs import _set_warmup_end, _set_warmup_start  # imports this module

        graphs = self._new_graphs(inputs)
        trained = graphs.params
        with (
            self._passes(),
            preserve_buffers([self.module] if self.grad_enabled else []),
            preserve_tensors(moe_metrics()),
            replaced_attribute(self._tensors_with("main_grad", graphs.params), "main_grad", torch.zeros_like),
            between(_set_warmup_start, _set_warmup_end),
        ):
            # The second step uses the sharded weights that the first one gathered.
            for _ in range(max(self.num_warmup_steps, 2) if self.sharded else self.num_warmup_steps):
                with self._surroundings():
                    graphs.forward(WarmUp())
                if self.grad_enabled:
                    graphs.backward(WarmUp(), lambda outputs: tuple(map(torch.zeros_like, outputs)))
                    trained = graphs.trained_params
                graphs.drop_results()
            self.sharded.settle()
        return trained

    def create_fwd_graph(self, args: Any, kwargs: Any, outputs: Any = None, clone_inputs: bool = True) -> None:
        """Capture the forward graph.

        Args:
            args, kwargs: The arguments; tensors may be ``ArgMetadata``.
            outputs: The recorded call's output, with each tensor as ``ArgMetadata``; None without a recorded call.
            clone_inputs: Whether to use static inputs from the pool instead of the tensors in the arguments.

        Raises:
            ValueError: Modules delay their weight gradients.
            RuntimeError: The function returns different tensors than when it was recorded.
        """
        hold_pool(self.mempool)
        buffers = self._recording.buffers
        self.inputs = metas_of(described(args), described(kwargs))
        static = buffers.inputs(self.inputs) if clone_inputs else [t.detach() for t in tensors_of(args, kwargs)]
        self.graphs = graphs = self._new_graphs(static)
        with self._passes(), self._surroundings(), torch.profiler.record_function(f"{self.name} forward for capture"):
            capture = Capture(self.mempool)  # takes the current generator state
            graphs.forward(capture)
        if graphs.delays_weight_gradients:
            raise ValueError(
                f"{self.name}: --delay-wgrad-compute does not work with --cuda-graph-impl local: leave it out"
            )
        captured = list(map(ArgMetadata, graphs.outputs))
        self.outputs = captured if outputs is None else metas_of(outputs)
        kinds, recorded = ([(tuple(m.shape), m.dtype) for m in metas] for metas in (captured, self.outputs))
        if kinds != recorded:
            raise RuntimeError(
                f"{self.name} returned {kinds} in the capture, but {recorded} in the recorded step: return the same "
                "shapes and dtypes in both"
            )
        outputs = tensors_of(graphs.outputs)
        self._output_addresses = [output.data_ptr() for output in outputs]
        buffers.lend_outputs(self.outputs, outputs)
        if not self.grad_enabled:  # outputs are not released: they may alias inputs, or be read outside graphs
            buffers.inputs_read(self.inputs)

    def create_bwd_graph(self) -> None:
        """Capture the backward graph. The forward graph must have been captured.

        Raises:
            ValueError: The backward pass moves a forward output to a new address.
        """
        graphs, buffers = self.graphs, self._recording.buffers
        assert graphs is not None
        outputs = tensors_of(graphs.outputs)
        metas = list(compress(self.outputs, graphs.differentiable))
        grads = buffers.grads_of_outputs(metas)
        if self.sharded:  # autograd's graph does not contain parameters of recomputed modules
            own = (param for part in self.parts for param in part.parameters(recurse=False))
            self.sharded.note_backward((*self.get_connected_params(graphs.roots), *own))
        with (
            self._passes(),
            replaced_attribute(self._tensors_with(_ADDED, graphs.params), _ADDED, lambda flag: False),
            torch.profiler.record_function(f"{self.name} backward for capture"),
        ):
            graphs.backward(Capture(self.mempool), lambda outputs: tuple(grads))
        if self._output_addresses != [output.data_ptr() for output in outputs]:
            raise ValueError(
                f"{self.name}: recomputation frees its output and allocates it at another address, but replays read "
                "the captured one. Leave layernorm out of --recompute-modules."
            )
        self._escaping = buffers.lend_grads(self.inputs, graphs.grad_inputs)
        buffers.grads_of_outputs_read(metas, grads)  # last, because a gradient may be returned unchanged
        buffers.inputs_read(self.inputs)
        for output in outputs:
            buffers.pool.release(output)
        graphs.release_outputs()
        graphs.args = graphs.inputs = tuple(map(weak_reference, graphs.inputs))
        graphs.grad_outputs = tuple(grad if grad is None else weak_reference(grad) for grad in graphs.grad_outputs)
        graphs.release_gradients(keep=self._escaping)

    def running(self, phase: Phase) -> AbstractContextManager[None]:
        from megatron.core.transformer.cuda_graphs import is_graph_warmup  # imports this module

        return self.sharded.completing(reductions=phase == "backward", finalizes=not is_graph_warmup())

    def consume_gradients(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Add ``grads`` to the main gradients of ``params``, as the hook of ``DistributedDataParallel`` does eagerly.

        A gradient is skipped if the layer has already added it: with ``--gradient-accumulation-fusion`` the layer sets
        ``param.grad_added_to_main_grad``; sharded weights (``--tensor-parallel-num-weight-shards``) always add it.

        Returns:
            The gradients of ``shared_params``, which autograd sums before that hook, and of parameters without a main
            gradient; None for all other parameters.
        """
        left: list[torch.Tensor | None] = []
        for param, grad in zip(params, grads, strict=True):
            main_grad = getattr(param, "main_grad", None)
            if main_grad is not None and grad is not None:
                if getattr(param, _ADDED, False) or getattr(param, "is_gtp_weight_remat", False):
                    grad = None
                elif not any(param is each for each in self.shared_params):
                    with torch.no_grad():
                        main_grad.add_(grad)
                    grad = None
            left.append(grad)
        return left

    @property
    def parts(self) -> tuple[torch.nn.Module, ...]:
        """Return the modules that ran in the captured pass."""
        return () if self.graphs is None else self.graphs.ran or ()

    def release_escaping_gradients(self) -> None:
        """Let later captures reuse input gradients that no graph reads. Call this once the gradients are consumed."""
        if self.graphs is not None and self._escaping:
            for index in self._escaping:
                self._recording.buffers.pool.release(self.graphs.grad_inputs[index])
            self.graphs.release_gradients()
            self._escaping = set()

    def finish(self, snapshot: Snapshot, users: Mapping[int, Sequence["_CudaGraphRunner"]]) -> None:
        """Make the graphs ready to replay. Call this after all graphs of the recording are captured.

        Args:
            snapshot: The state that the graphs depend on.
            users: The runners whose graphs take or return a tensor, keyed by the ``id`` of its buffer metadata.
                Empty for inference.

        Raises:
            UnsupportedError: A parameter has a hook that would not receive a gradient.
        """
        graphs, buffers = self.graphs, self._recording.buffers
        assert graphs is not None
        graphs.static_inputs = [
            (
                buffers.input_of(tensor),
                partial(_any_in_flight, tuple(users.get(id(metadata_of(meta)), ()))),
            )
            for meta, tensor in zip(self.inputs, graphs.inputs, strict=True)
        ]
        graphs.finish()
        self._snapshot = snapshot
        if users:
            outputs = enumerate(map(metadata_of, self.outputs))
            self._unread_outputs = {i for i, known in outputs if not known.is_cudagraph_input}
        self.params_to_backprop = graphs.params if graphs.backward_graph is not None else ()
        for param, grad in zip(self.params_to_backprop, graphs.grad_params, strict=True):
            if grad is None and param._backward_hooks:
                raise UnsupportedError(
                    f"{self.name}: a parameter of shape {tuple(param.shape)} has a hook (register_hook), but a CUDA "
                    "graph would pass it no gradient (--cuda-graph-impl local): remove the hook, or use "
                    "--cuda-graph-impl none"
                )
        self.fwd_graph_recorded = True

    def _new_graphs(self, inputs: Sequence[torch.Tensor]) -> LocalGraphs:
        return LocalGraphs(
            self.name,
            self._repeat,
            tuple(inputs),
            {},
            module=self.module,
            owner=self,
            quantization=self.quantization,
            may_write_inputs=self._recording is _CudagraphGlobalRecord.inference,
            allow_unused_input=True,
            retain_graph=self.retain_graph,
        )

    def _repeat(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the function with ``inputs`` instead of the recorded tensors, and return its output tensors."""
        args, kwargs = with_tensors((self.args, self.kwargs), iter(inputs))
        output = self.func(*args, **kwargs)
        self.returned = described(output)
        return tensors_of(output)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Context manager that sets the generator state and autocast of the recorded call."""
        with use_rng_state(self._rng_state), self._as_autocast():
            yield

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Context manager for warm-up and capture: sets the grad mode, and restores quantization statistics on exit."""
        quantization = self.quantization
        kept = nullcontext() if quantization is None else quantization.preserve_statistics([self.module])
        with nullcontext() if self.grad_enabled else torch.no_grad(), kept:
            yield

    def _tensors_with(self, attribute: str, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors that have ``attribute``, from ``params`` and the sharded weights that a pass may change."""
        changed = (*params, *self.sharded.with_neighbors())
        return [param for param in changed if getattr(param, attribute, None) is not None]

    def get_connected_params(self, outputs: Any) -> tuple[torch.nn.Parameter, ...]:
        """Return the module's parameters that ``outputs`` depend on in autograd's graph."""
        leaves = {id(leaf) for leaf in connected_leaves(tensors_of(outputs))}
        return tuple(param for param in self.module.parameters() if id(param) in leaves)

    def get_quantization_context(self) -> AbstractContextManager:
        """Return the FP8 or FP4 context of the recorded call; a null context without quantization."""
        return nullcontext() if self.quantization is None else self.quantization.context()

    def get_mismatch_errors(self, args: tuple, kwargs: dict[str, Any]) -> list[str]:
        """Return one line per argument that differs from the captured one; an empty list if all arguments match."""
        return mismatches(args, kwargs, (self.args, self.kwargs), self.grad_enabled and torch.is_grad_enabled())

    def fits_grad_mode(self, wants_grad: bool, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return whether the graphs compute exactly the gradients needed for a call with the given arguments."""
        if wants_grad == self.grad_enabled:
            return True
        trained = (*tensors_of(args, kwargs), *self.module.parameters())
        return self.is_frozen and not any(tensor.requires_grad for tensor in trained)

    def replay_graph_capture(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Check the arguments, replay the forward graph with autograd, and return the output as a tuple.

        Raises:
            ArgumentError: Arguments differ from the captured ones.
            RuntimeError: See ``replay``.
        """
        problems = self.get_mismatch_errors(args, kwargs)
        if problems:
            raise ArgumentError(f"{self.name} cannot replay its CUDA graph:\n" + "\n".join(problems))
        output = self.replay(is_first_microbatch, args, kwargs)
        return output if isinstance(output, tuple) else (output,)

    def replay(self, is_first_microbatch: bool, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replay with arguments that were already checked, and return the output of ``func``.

        Raises:
            RuntimeError: The module changed since capture, or the replay would overwrite memory still in use.
        """
        assert self.graphs is not None
        inputs = tensors_of(args, {name: kwargs[name] for name in self.kwargs})
        outputs = self.graphs.replay(inputs, is_first_microbatch)
        # Clone outputs that are read outside the graphs, because later replays overwrite them. With grad this happens
        # after the backward pass, but the last layer's outputs may be kept longer, for example for logs.
        if self.is_last_layer or not self.grad_enabled:
            outputs = [each.clone() if i in self._unread_outputs else each for i, each in enumerate(outputs)]
        if any(output.requires_grad for output in outputs):
            self.status = _GraphStatus.BWD_READY
        return with_tensors(self.returned, iter(outputs))

    def before_forward(self) -> None:
        if self._snapshot is not None:
            self._snapshot.check()
        if self._recording.rng_states is not None:
            self._recording.rng_states.adopt()

    def after_backward(self) -> None:
        """Record an event for the completed weight gradients, and mark the runner as free."""
        event = self.bwd_graph_replay_complete_event
        event.record()
        for param in self.params_to_backprop:
            param._cudagraph_wgrad_ready_event = event
        self.status = _GraphStatus.FWD_READY
        self.sharded.end_backward_replay()

    def get_arg_metas(self, args: Any, kwargs: dict[str, Any] | None = None) -> list[ArgMetadata]:
        """Return the metadata of the tensors in ``args`` and ``kwargs``."""
        return metas_of(args, kwargs)

    def get_tensors(
        self, args: Any, kwargs: dict[str, Any] | None = None, check_types: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors among the arguments, including those in dataclasses and containers.

        Raises:
            ArgumentTypeError: With ``check_types``, an argument has a type that graphs do not support.
        """
        if check_types:
            _check_supported_type(ArgMetadata((args, kwargs)))
        return tensors_of(args, kwargs)

    def to_list(self, x: Any) -> list[Any]:
        """Wrap a tensor in a list, or convert any other iterable to a list."""
        return [x] if isinstance(x, torch.Tensor) else list(x)


# Set on a parameter once its layer has added its gradient to the main gradient.
_ADDED = "grad_added_to_main_grad"


def _any_in_flight(runners: Sequence[_CudaGraphRunner]) -> bool:
    return any(runner.status is _GraphStatus.BWD_READY for runner in runners)
