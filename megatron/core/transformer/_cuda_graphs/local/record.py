"""What a first training step recorded, and the capture of its graphs in the order in which they will be replayed."""

import logging
import time
import weakref
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.core.utils import log_single_rank

from .. import state
from ..engine.memory import release_cached_memory
from ..engine.preserve import pause_gc
from ..engine.rng import make_generators_safe, preserve_rng
from ..engine.slot import WarmupRecord
from ..engine.streams import capture_stream, return_to_default_stream
from ..engine.te_engine import transformer_engine_flag
from .arguments import metas_of
from .buffers import StaticBuffers, StaticInput, reset_counts
from .tensor_reuse_pool import TensorReusePool

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class _CudagraphGlobalRecord:
    """The order of all runners' first passes, and the state that their graphs share.

    Graphs share one memory pool, so they must be captured in the order in which they will run: a graph may use what
    the graphs before it have freed. All attributes are of the class.

    Attributes:
        cudagraph_created: Whether the recorded graphs are there; from then on modules replay.
        cudagraph_record: ``(runner, "fwd", args, kwargs, outputs)``, with descriptions in the place of tensors, and
            ``(runner, "bwd")``.
        cudagraph_inference_record: ``(runner, "fwd", args, kwargs)`` of graphs that were captured at once, for
            inference; with descriptions too.
        tensor_reuse_pool: Static tensors that no graph writes.
        buffers: Who uses which static tensor while graphs are captured.
        recording: Another object in each recording, by which tensors that were noted in an earlier one are told.
        capture_failed: Whether the last capture failed: modules run eagerly until ``delete_cuda_graphs``.
        in_flight: The runners between their forward and their backward pass, a bit each.
        addresses_checked: Whether it is known of this step that all parameters are where graphs use them.
        managers: All living managers.
        inference_outputs: Addresses of what graphs for inference return.
        inference_inputs: For tensors that graphs for inference take where these read them.
    """

    cudagraph_created = False
    cudagraph_record: list[tuple] = []
    cudagraph_inference_record: list[tuple] = []
    tensor_reuse_pool = TensorReusePool()
    buffers = StaticBuffers(tensor_reuse_pool)
    recording = object()
    capture_failed = False
    in_flight = 0
    addresses_checked = False
    managers: weakref.WeakSet = weakref.WeakSet()
    inference_outputs: set[int] = set()
    inference_inputs = WeakTensorKeyDictionary()
    _runners: list[Any] = []
    _static_inputs: list[StaticInput] = []
    _capturing: str | None = None

    @classmethod
    def record_fwd_graph(cls, runner: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the first forward pass of ``runner``, with descriptions in the place of tensors."""
        cls.cudagraph_record.append((runner, "fwd", args, kwargs, out))

    @classmethod
    def record_bwd_graph(cls, runner: Any) -> None:
        """Record the first backward pass of ``runner``."""
        cls.cudagraph_record.append((runner, "bwd"))

    @classmethod
    def create_cudagraphs(cls) -> dict[str, float] | None:
        """Capture what was recorded, in its order; once there are graphs, make ready for the next step.

        Returns:
            ``time`` in seconds, ``allocated_bytes`` and ``reserved_bytes``, or None if nothing was captured.

        Raises:
            RuntimeError: something was recorded after capture, or a module cannot be captured.
        """
        if cls.cudagraph_created:
            if cls.cudagraph_record:
                raise RuntimeError(
                    f"{cls.cudagraph_record[0][0].name} ran eagerly after the CUDA graphs were captured: call "
                    "delete_cuda_graphs() to record all graphs anew"
                )
            cls._begin_step()
            return None
        if not cls.cudagraph_record:
            return None
        start = time.perf_counter()
        before = torch.cuda.memory_stats()
        state._set_capture_start()
        try:
            with pause_gc(collects=False), preserve_rng(), transformer_engine_flag(), capture_stream():
                make_generators_safe()
                cls._capture()
        except BaseException as error:
            if cls._capturing is not None:
                error.add_note(
                    f"{cls._capturing} cannot run in a CUDA graph (--cuda-graph-impl local). --cuda-graph-modules "
                    "chooses the modules that do; MoE layers can be captured up to their all-to-all only "
                    "(moe_router), and only as MoETransformerLayer."
                )
            cls.capture_failed = True
            try:
                cls.forget_graphs()
            except Exception as another:
                error.add_note(f"What the failed capture left could not be cleaned up: {another}")
            raise
        finally:
            state._set_capture_end()
            return_to_default_stream()
        after = torch.cuda.memory_stats()
        stats = {
            "time": time.perf_counter() - start,
            **{
                f"{kind}_bytes": after[f"{kind}_bytes.all.current"] - before[f"{kind}_bytes.all.current"]
                for kind in ("allocated", "reserved")
            },
        }
        log_single_rank(
            logger,
            logging.INFO,
            f"captured {len(cls.cudagraph_record)} CUDA graphs in {stats['time']:.2f} s; "
            f"memory: {stats['allocated_bytes'] / 2**20:.0f} MiB allocated, "
            f"{stats['reserved_bytes'] / 2**20:.0f} MiB reserved",
        )
        cls.cudagraph_created = True
        cls.cudagraph_record = []
        cls._begin_step()
        return stats

    @classmethod
    def _capture(cls) -> None:
        record = cls.cudagraph_record
        with_backward = {entry[0] for entry in record if entry[1] == "bwd"}
        cls._runners = [entry[0] for entry in record if entry[1] == "fwd"]
        for index, runner in enumerate(cls._runners):
            runner.number = index
            runner.grad_enabled = runner in with_backward
            runner.bit = 1 << index if runner.grad_enabled else 0
        cls._warm_up()
        cls._capturing = None
        release_cached_memory(thorough=False)
        in_flight = 0
        last_backward: dict[tuple, Any] = {}
        for runner, kind, *arguments in record:
            if kind == "fwd":
                runner.busy_at_forward = in_flight
                in_flight |= runner.bit
                cls._capturing = str(runner)
                runner.create_fwd_graph(*arguments)
            else:
                in_flight &= ~runner.bit
                runner.busy_at_backward = in_flight
                cls._capturing = f"the backward pass of {runner}"
                runner.create_bwd_graph()
                previous = last_backward.get(runner.function)
                if previous is not None:
                    previous.release_escaping_gradients()
                last_backward[runner.function] = runner
        cls._capturing = None
        users = cls._users()
        static_inputs: dict[int, StaticInput] = {}
        for runner in cls._runners:
            runner.finish(static_inputs, users)
        cls._static_inputs = list(static_inputs.values())

    @classmethod
    def _warm_up(cls) -> None:
        """Run every function once for each kind of arguments: what is set up in a first call must not be captured."""
        found: dict[tuple, WarmupRecord] = {}
        for runner, kind, *arguments in cls.cudagraph_record:
            if kind != "fwd":
                continue
            metas = metas_of(*arguments[:2])
            key = (runner.function, runner.grad_enabled, *((meta.shape, meta.dtype) for meta in metas))
            if key in found:
                runner.warmup_record = found[key]
                continue
            cls._capturing = str(runner)
            runner.warm_up([meta.zeros_like() for meta in metas])
            found[key] = runner.warmup_record

    @classmethod
    def _users(cls) -> dict[int, int]:
        """For each tensor that several graphs use the runners that hold its memory until their backward pass."""
        users: dict[int, int] = {}
        for runner, kind, *arguments in cls.cudagraph_record:
            for meta in metas_of(arguments[0], arguments[1]) + metas_of(arguments[2]) if kind == "fwd" else ():
                key = id(meta.cg_buffer_metadata)
                users[key] = users.get(key, 0) | runner.bit
        return users

    @classmethod
    def _begin_step(cls) -> None:
        """At the end of a step: whatever passes it left out will not come any more."""
        cls.in_flight = 0
        cls.addresses_checked = False
        for manager in cls.managers:
            manager.begin_step()
        for static in cls._static_inputs:
            static.forget()

    @classmethod
    def static_input(cls, given: torch.Tensor) -> torch.Tensor:
        """Where a graph for inference reads ``given``: where another graph puts it, or else in memory of its own.

        All graphs that take one tensor read it there: every replay copies its inputs before it runs. Who gives a graph
        that was captured on another's output something else later overwrites that output.
        """
        if given.data_ptr() in cls.inference_outputs:
            return given.detach()
        static = cls.inference_inputs.get(given)
        if static is None or (static.shape, static.stride()) != (given.shape, given.stride()):
            with torch.inference_mode(False):
                static = torch.empty_like(given, requires_grad=False).copy_(given)
            cls.inference_inputs[given] = static
        return static

    @classmethod
    def check_addresses(cls) -> None:
        """Refuse to replay where a parameter or a main gradient is not where the graphs use it; once a step.

        Raises:
            RuntimeError: names the parameter.
        """
        for runner in {runner.function: runner for runner in cls._runners}.values():  # one for all micro-batches
            runner.refuse_moved_parameters()
        cls.addresses_checked = True

    @classmethod
    def refuse_order(cls, runner: Any, others: int) -> NoReturn:
        """Refuse a replay of ``runner`` while ``others`` wait for their backward pass.

        Raises:
            RuntimeError: says which.
        """
        other = next(other for other in cls._runners if other.bit & others)
        raise RuntimeError(
            f"{runner.name} would overwrite memory of {other.name}, which waits for its backward pass: passes do not "
            "follow each other as in the step that was recorded. With --cuda-graph-impl local every step needs the "
            "same schedule, and under pipeline parallelism no more micro-batches than the first step "
            "(--global-batch-size, --rampup-batch-size)."
        )

    @classmethod
    def forget_graphs(cls) -> None:
        """Free all graphs and all that was recorded."""
        for manager in cls.managers:
            manager.reset()
        for entry in (*cls.cudagraph_record, *cls.cudagraph_inference_record):
            entry[0].reset()
        cls.cudagraph_created = False
        cls.cudagraph_record, cls.cudagraph_inference_record, cls._runners = [], [], []
        cls._static_inputs = []
        cls.tensor_reuse_pool = TensorReusePool()
        cls.buffers = StaticBuffers(cls.tensor_reuse_pool)
        cls.recording = object()
        cls.in_flight = 0
        cls.inference_outputs, cls.inference_inputs = set(), WeakTensorKeyDictionary()
        cls._capturing = None
        reset_counts()


def create_cudagraphs() -> dict[str, float] | None:
    """Capture the graphs that the first training step recorded. megatron-core's schedules call it after every step.

    See ``_CudagraphGlobalRecord.create_cudagraphs``. If it raises, the gradients of the step are as they were, and the
    model trains on eagerly; ``delete_cuda_graphs`` lets the next step be recorded again.
    """
    return _CudagraphGlobalRecord.create_cudagraphs()
