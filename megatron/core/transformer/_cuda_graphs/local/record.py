"""The recorded passes of the process; captures and frees their graphs."""

import logging
import time
import weakref
from typing import Any

import torch

from megatron.core.utils import log_single_rank

from ..engine.streams import return_to_default_stream
from ..errors import CallOrderError
from .capture import capture_mode
from .inference import InferenceGraphs
from .memory import reset_counts
from .session import CaptureSession

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class _CudagraphGlobalRecord:
    """The order of all runners' first passes.

    Graphs share one memory pool, so they must be captured in the order in which they will run: a graph may use memory
    that earlier graphs have freed. All attributes belong to the class; the first three may be assigned.

    Attributes:
        cudagraph_created: Whether the recorded graphs were captured; modules then replay.
        cudagraph_record: ``(runner, "fwd", args, kwargs, outputs)``, with metadata in place of tensors, and
            ``(runner, "bwd")``.
        cudagraph_inference_record: ``(runner, "fwd", args, kwargs)`` of graphs for inference, which were captured at
            their first call; with metadata in place of tensors.
        session: The session of the runners of ``cudagraph_record``, or of those that were captured last.
        tensor_reuse_pool: The static tensors of ``session``.
    """

    cudagraph_created = False
    cudagraph_record: list[tuple] = []
    cudagraph_inference_record: list[tuple] = []
    session = CaptureSession()
    tensor_reuse_pool = session.buffers.pool
    inference = InferenceGraphs()
    managers: weakref.WeakSet = weakref.WeakSet()

    @classmethod
    def recording_session(cls) -> CaptureSession:
        """Return the session of the step that is being recorded; a new one at its first pass."""
        if not cls.cudagraph_record:
            cls._open_session()
        return cls.session

    @classmethod
    def _open_session(cls) -> None:
        cls.session = CaptureSession()
        cls.tensor_reuse_pool = cls.session.buffers.pool
        reset_counts()

    @classmethod
    def record_fwd_graph(cls, runner: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the first forward pass of ``runner``; see ``cudagraph_record``."""
        cls.cudagraph_record.append((runner, "fwd", args, kwargs, out))

    @classmethod
    def record_bwd_graph(cls, runner: Any) -> None:
        """Record the first backward pass of ``runner``."""
        cls.cudagraph_record.append((runner, "bwd"))

    @classmethod
    def create_cudagraphs(cls) -> dict[str, float] | None:
        """Capture the recorded passes, in their order; if they were captured already, only begin the next step.

        Returns:
            ``time`` in seconds, ``allocated_bytes`` and ``reserved_bytes``, or None if nothing was captured.

        Raises:
            CallOrderError: something was recorded after capture.
            RuntimeError: a module cannot be captured.
        """
        if cls.cudagraph_created:
            if cls.cudagraph_record:
                raise CallOrderError(
                    f"{cls.cudagraph_record[0][0].name} ran eagerly after the CUDA graphs were captured: call "
                    "delete_cuda_graphs() to record all graphs anew"
                )
            cls._begin_step()
            return None
        cls._forget_forward_only_record()
        if not cls.cudagraph_record:
            return None
        start = time.perf_counter()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        try:
            with capture_mode():
                cls.session.capture(cls.cudagraph_record)
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
            f"captured {len(cls.cudagraph_record)} CUDA graphs in {stats['time']:.2f} s; "
            f"memory: {stats['allocated_bytes'] / 2**20:.0f} MiB allocated, "
            f"{stats['reserved_bytes'] / 2**20:.0f} MiB reserved",
        )
        cls.cudagraph_created = True
        cls.cudagraph_record = []
        cls._begin_step()
        return stats

    @classmethod
    def _forget_forward_only_record(cls) -> None:
        """Forget a record of passes without grad only: log-probabilities before the first training step, say.

        Their graphs would have no backward pass, and no training step could be recorded any more.
        """
        runners = {entry[0] for entry in cls.cudagraph_record}
        if all(runner.is_forward_only for runner in runners):
            cls.cudagraph_record = []
            for manager in cls.managers:
                manager.forget_recorded(runners)

    @classmethod
    def _abandon(cls, error: BaseException) -> None:
        """After a failed capture, run the recorded modules eagerly, with a warning."""
        if cls.session.capturing is not None:
            error.add_note(
                f"{cls.session.capturing} cannot run in a CUDA graph (--cuda-graph-impl local). --cuda-graph-modules "
                "chooses the modules that do; MoE layers can be captured up to their all-to-all only "
                "(moe_router), and only as MoETransformerLayer."
            )
        recorded = {entry[0] for entry in cls.cudagraph_record}
        failed = [
            manager
            for manager in cls.managers
            if manager.capture_failed or not recorded.isdisjoint(manager.cudagraph_runners)
        ]
        log_single_rank(
            logger,
            logging.WARNING,
            "the capture of CUDA graphs failed (--cuda-graph-impl local): the modules that were recorded run eagerly "
            "until delete_cuda_graphs() is called",
        )
        try:
            cls.forget_graphs()
        except Exception as another:
            error.add_note(f"What the failed capture left could not be cleaned up: {another}")
        for manager in failed:
            manager.capture_failed = True

    @classmethod
    def _begin_step(cls) -> None:
        """Begin the next step: passes that have not run will not run any more."""
        cls.session.begin_step()
        for manager in cls.managers:
            manager.begin_step()

    @classmethod
    def forget_graphs(cls) -> None:
        """Free all graphs and clear the record."""
        cls.inference = InferenceGraphs()
        cls._open_session()
        for manager in cls.managers:
            manager.reset()
        for entry in (*cls.cudagraph_record, *cls.cudagraph_inference_record):
            entry[0].reset()
        cls.cudagraph_created = False
        cls.cudagraph_record, cls.cudagraph_inference_record = [], []


def create_cudagraphs() -> dict[str, float] | None:
    """Capture the graphs that the first training step recorded; see ``_CudagraphGlobalRecord.create_cudagraphs``.

    megatron-core's schedules call it after every step. If it raises, the gradients of the step are unchanged, and the
    model trains on eagerly; after ``delete_cuda_graphs`` the next step is recorded again.
    """
    return _CudagraphGlobalRecord.create_cudagraphs()
