"""Record the passes of this process, and capture their graphs."""

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.core.utils import log_single_rank

from ..engine.graph import capture_environment, preserve_tensors, return_to_default_stream
from ..engine.memory import release_cached_memory, reuse_across_streams
from ..engine.quantization import transformer_engine_flag
from ..engine.rng import GraphStates, make_generators_safe
from ..hooks import recorded_hooks, refuse_pre_hooks
from ..replacements import between
from ..snapshot import Snapshot, memory_aspects, module_aspects, named, refuse_changed_attributes
from .arguments import metadata_of, tensors_of, with_tensors
from .memory import StaticBuffers

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


_ADVICE = "undo this, or call delete_cuda_graphs() to capture again (--cuda-graph-impl local)"


class Recording:
    """State shared by the runners whose graphs are captured together.

    Attributes:
        token: Identifies the recording in tensor metadata, which may outlive it.
        buffers: Static tensors of the graphs.
        capturing: The pass that is being warmed up or captured, for error messages.
    """

    def __init__(self) -> None:
        self.token = object()
        self.buffers = StaticBuffers()
        self.capturing: str | None = None
        self.rng_states: GraphStates | None = None

    def capture(self, record: Sequence[tuple]) -> None:
        """Warm up all functions, then capture the entries of ``record``, with grad.

        Entries are ``(runner, "fwd", args, kwargs, outputs)`` and ``(runner, "bwd")``.

        Raises:
            RuntimeError: A pass cannot be captured; ``capturing`` names it.
            UnsupportedError: A captured module has a forward-pre hook of a third party.
        """
        runners = [entry[0] for entry in record if entry[1] == "fwd"]
        unchanged = refuse_changed_attributes(runner.module for runner in runners)
        with torch.inference_mode(False), unchanged, reuse_across_streams():  # also enables grad inside torch.no_grad
            self._warm_up(record)
            release_cached_memory()
            self._capture_passes(record)
            self.capturing = None
        users: defaultdict[int, list[Any]] = defaultdict(list)
        for runner in runners:
            for known in {id(metadata_of(meta)) for meta in (*runner.inputs, *runner.outputs)}:
                users[known].append(runner)
        snapshots: dict[Hashable, Snapshot] = {}
        captured = {runner.function: (runner, _captured_modules(runner)) for runner in runners}
        for function, (runner, modules) in captured.items():
            refuse_pre_hooks(modules)
            snapshots[function] = Snapshot(
                _ADVICE,
                *module_aspects(modules, contexts=runner.contexts),
                *memory_aspects(modules, main_grads=True),
            )
        if warning := recorded_hooks((None, modules) for _, modules in captured.values()):
            log_single_rank(logger, logging.WARNING, f"{warning} (--cuda-graph-impl local)")
        for runner in runners:
            runner.finish(snapshots[runner.function], users)
        self.rng_states = GraphStates()

    def _warm_up(self, record: Sequence[tuple]) -> None:
        """Warm up every function with each kind of arguments, so that graphs do not capture first-call setup."""
        alike: defaultdict[Hashable, list[Any]] = defaultdict(list)
        for runner, kind, *_ in record:
            if kind == "fwd":
                kinds = ((meta.shape, meta.dtype) for meta in runner.metas)
                alike[runner.function, runner.bwd_graph_recorded, *kinds].append(runner)
        users: defaultdict[tuple[int, torch.Tensor], list[Any]] = defaultdict(list)
        for runners in alike.values():
            for runner in runners:
                runner.begin_capture(self)
            first = runners[0]
            self.capturing = str(first)
            trained = first.warm_up([meta.zeros_like() for meta in first.metas])
            for runner in runners:
                for param in trained if runner.bwd_graph_recorded else ():
                    users[runner.backward_pass, param].append(runner)
        # A layer that is called twice in a pass has two runners, and layers may share weights.
        for (_, param), together in users.items():
            for runner in together if len(together) > 1 else ():
                runner.shared_params += (param,)
        self.capturing = None

    def _capture_passes(self, record: Sequence[tuple]) -> None:
        last_backward: dict[Hashable, Any] = {}
        for runner, kind, *arguments in record:
            if kind == "fwd":
                self.capturing = str(runner)
                runner.create_fwd_graph(*arguments)
            else:
                self.capturing = f"the backward pass of {runner}"
                runner.create_bwd_graph()
                if (previous := last_backward.get(runner.function)) is not None:
                    previous.release_escaping_gradients()
                last_backward[runner.function] = runner


def _captured_modules(runner: Any) -> dict[torch.nn.Module, str]:
    """Return the modules that ran in the graphs of ``runner``, with their names."""
    # A fused MLP runs TransformerEngine's operations on parameters of modules that it does not call.
    fused = (module for part in runner.parts if hasattr(part, "_fused_impl") for module in part.modules())
    ran = {runner.module, *runner.parts, *fused}
    return {module: name for module, name in named(runner.module, runner.name).items() if module in ran}


class InferenceRecording(Recording):
    """State of inference graphs, which are captured at their first call and replayed in any order.

    Attributes:
        output_addresses: Addresses of the graphs' outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.output_addresses: set[int] = set()
        self._inputs = WeakTensorKeyDictionary()

    def capture_call(self, runner: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Capture the forward graph of ``runner`` for a call with the given arguments."""
        runner.begin_capture(self)
        given = tensors_of(args, {name: kwargs[name] for name in runner.kwargs})
        try:
            with capture_mode():
                with preserve_tensors(_states_of(kwargs.get("inference_context"), runner.base_module)):
                    runner.warm_up([tensor.detach().clone() for tensor in given])
                values, named = with_tensors((args, kwargs), map(self._input_for, given))
                runner.create_fwd_graph(values, named, clone_inputs=False)
        except BaseException:
            runner.reset()
            raise
        addresses = memory_aspects(_captured_modules(runner), main_grads=False)
        runner.finish(Snapshot(_ADVICE, *addresses), {})
        self.output_addresses |= {output.data_ptr() for output in tensors_of(runner.graphs.outputs) if output.numel()}

    def _input_for(self, given: torch.Tensor) -> torch.Tensor:
        """Return the static input for ``given``: an alias if a previous graph returned it, or else a separate tensor.

        Graphs captured with the same tensor can share its static tensor: every replay copies its inputs first. If
        the static input aliases the output of a previous graph, a replay on another tensor overwrites that output.
        """
        if given.data_ptr() in self.output_addresses:
            return given.detach()
        static = self._inputs.get(given)
        if static is None or (static.shape, static.stride()) != (given.shape, given.stride()):
            with torch.inference_mode(False):
                static = torch.empty_like(given, requires_grad=False).copy_(given)
            self._inputs[given] = static
        return static


def _states_of(context: Any, module: Any) -> tuple[torch.Tensor, ...]:
    """Return the Mamba states of ``module`` in a static-batching context, or of all layers if it has none."""
    states = getattr(context, "key_value_memory_dict", {})
    number = getattr(module, "layer_number", None)
    return tensors_of((states[number],) if number in states else tuple(states.values()))


@contextmanager
def capture_mode() -> Iterator[None]:
    """Context manager that sets the stream and flags for capture, and restores generators and garbage collection.

    Garbage is not collected first, because inference captures many graphs and a collection takes longer than a capture.
    """
    from megatron.core.transformer.cuda_graphs import _set_capture_end, _set_capture_start  # imports this module

    with (
        between(_set_capture_start, _set_capture_end),
        capture_environment(transformer_engine_flag()),
    ):
        make_generators_safe()
        yield


class _CudagraphGlobalRecord:
    """The first passes of all runners, in execution order.

    Graphs share one memory pool, so they must be captured in the order in which they will run: a graph may use memory
    that earlier graphs have freed. Code outside this class may assign ``cudagraph_created`` and both records.

    Attributes:
        cudagraph_created: Whether the recorded graphs were captured; if so, modules replay.
        capture_failed: Whether a capture failed since ``forget_graphs``; if so, modules run eagerly in training.
        cudagraph_record: ``(runner, "fwd", args, kwargs, outputs)`` and ``(runner, "bwd")``, tensors as ArgMetadata.
        cudagraph_inference_record: ``(runner, "fwd", args, kwargs)`` of inference graphs.
        recording: State shared by the recorded runners; after capture, by the captured runners.
        tensor_reuse_pool: Static tensors of ``recording``.
        inference: State shared by the inference runners.
        managers: All existing managers.
    """

    cudagraph_created = capture_failed = False
    cudagraph_record: list[tuple] = []
    cudagraph_inference_record: list[tuple] = []
    recording = Recording()
    tensor_reuse_pool = recording.buffers.pool
    inference = InferenceRecording()
    managers: weakref.WeakSet = weakref.WeakSet()

    @classmethod
    def open_recording(cls) -> Recording:
        """Return the recording of the current step; start a new one at the first pass of a step."""
        if not cls.cudagraph_record:
            cls._start_recording()
        return cls.recording

    @classmethod
    def _start_recording(cls) -> None:
        cls.recording = Recording()
        cls.tensor_reuse_pool = cls.recording.buffers.pool

    @classmethod
    def record_fwd_graph(cls, runner: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the first forward pass of ``runner``, with ``ArgMetadata`` in place of tensors."""
        cls.cudagraph_record.append((runner, "fwd", args, kwargs, out))

    @classmethod
    def record_bwd_graph(cls, runner: Any) -> None:
        """Record the first backward pass of ``runner``."""
        cls.cudagraph_record.append((runner, "bwd"))

    @classmethod
    def create_cudagraphs(cls) -> dict[str, float] | None:
        """Capture the recorded passes in order. If graphs already exist, only start the next step.

        Returns:
            ``time`` in seconds, ``allocated_bytes`` and ``reserved_bytes``; None if nothing was captured.

        Raises:
            RuntimeError: A module cannot be captured.
        """
        if cls.cudagraph_created:
            cls._begin_step()
            return None
        cls._forget_record_without_grad()
        if not cls.cudagraph_record:
            return None
        start = time.perf_counter()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        try:
            with capture_mode():
                cls.recording.capture(cls.cudagraph_record)
        except BaseException as error:
            cls._abandon(error)
            raise
        finally:
            return_to_default_stream()
        stats = {
            "time": time.perf_counter() - start,
            "allocated_bytes": torch.cuda.memory_allocated() - allocated,
            "reserved_bytes": torch.cuda.memory_reserved() - reserved,
        }
        log_single_rank(
            logger,
            logging.INFO,
            f"Captured {len(cls.cudagraph_record)} CUDA graphs in {stats['time']:.2f} s; "
            f"memory: {stats['allocated_bytes'] / 2**20:.0f} MiB allocated, "
            f"{stats['reserved_bytes'] / 2**20:.0f} MiB reserved",
        )
        cls.cudagraph_created = True
        cls.cudagraph_record = []
        cls._begin_step()
        return stats

    @classmethod
    def _forget_record_without_grad(cls) -> None:
        """Clear the record if all its passes ran without grad: capturing it would prevent recording a training step."""
        runners = {entry[0] for entry in cls.cudagraph_record}
        if all(runner.is_forward_only for runner in runners):
            cls.cudagraph_record = []
            for manager in cls.managers:
                manager.forget_recorded(runners)

    @classmethod
    def _abandon(cls, error: BaseException) -> None:
        """Clean up after a failed capture: warn, and make all modules run eagerly in training."""
        if cls.recording.capturing is not None:
            error.add_note(
                f"{cls.recording.capturing} cannot run in a CUDA graph (--cuda-graph-impl local): select other modules "
                "with --cuda-graph-modules. MoE layers can be captured only up to their all-to-all (moe_router), and "
                "only as MoETransformerLayer."
            )
        log_single_rank(
            logger,
            logging.WARNING,
            "the capture of CUDA graphs failed (--cuda-graph-impl local): modules run eagerly in training until "
            "delete_cuda_graphs() is called",
        )
        try:
            cls.forget_graphs()
        except Exception as another:
            error.add_note(f"Cleanup after the failed capture also failed: {another}")
        cls.capture_failed = True

    @classmethod
    def _begin_step(cls) -> None:
        cls.recording.buffers.forget_values()
        for manager in cls.managers:
            manager.begin_step()

    @classmethod
    def forget_graphs(cls) -> None:
        """Free all graphs and clear the record."""
        cls.inference = InferenceRecording()
        cls._start_recording()
        for manager in cls.managers:
            manager.reset()
        for entry in (*cls.cudagraph_record, *cls.cudagraph_inference_record):
            entry[0].reset()
        cls.cudagraph_created = cls.capture_failed = False
        cls.cudagraph_record, cls.cudagraph_inference_record = [], []


def create_cudagraphs() -> dict[str, float] | None:
    """Capture the graphs of the recorded training step; see ``_CudagraphGlobalRecord.create_cudagraphs``.

    megatron-core's schedules call this after every step. If it raises, the gradients of the step are unchanged, and
    the model can continue training eagerly; after ``delete_cuda_graphs``, the next step is recorded again.
    """
    return _CudagraphGlobalRecord.create_cudagraphs()
