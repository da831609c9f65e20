"""Coordinate a capture across ranks: either all ranks capture, or all raise the same error.

A failed rank would leave the others waiting in the next collective. Ranks therefore vote before and after the capture,
and before each collective that is not recorded. Such collectives come from Megatron-FSDP's hooks and, during warm-up,
also from layers under tensor, expert or context parallelism. The first vote selects the part of the model in each
graph. Hosts vote by messages: the device may be busy with a collective, and a capturing stream accepts no other work.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, distributed_c10d

from megatron.core.host_agreement import agreement_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import log_single_rank

from .errors import CaptureFailedError, CaptureInterruptedError
from .replacements import Replacements

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

# Methods of ProcessGroup that launch collectives, in torch 2.11 to 2.15.
_LAUNCHING = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "gather_into_tensor", "gather_single"),
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
    *("barrier", "monitored_barrier", "send", "recv", "recv_anysource"),
)
LAUNCHING = [name for name in _LAUNCHING if hasattr(ProcessGroup, name)]
_BEGIN_BATCH, _END_BATCH = "_start_coalescing", "_end_coalescing"


@dataclass(frozen=True)
class Failure:
    """The reason for a failed capture.

    Attributes:
        rank: The global rank that failed.
        where: The pass or phase that failed.
        cause: The type and message of the exception.
        interrupted: Whether the exception was KeyboardInterrupt, SystemExit or another non-``Exception``.
    """

    rank: int
    where: str
    cause: str
    interrupted: bool = False

    def error(self) -> CaptureFailedError | CaptureInterruptedError:
        """Return the exception that all ranks raise, except for an interrupted rank, which raises its own."""
        if self.interrupted:
            return CaptureInterruptedError(
                f"CUDA graph capture was interrupted on rank {self.rank}, {self.where}: {self.cause}"
            )
        return CaptureFailedError(f"CUDA graph capture failed on rank {self.rank}, {self.where}: {self.cause}")


class Ballot:
    """Collects the votes of the ranks of ``group`` in one capture.

    All ranks create a ballot and call ``vote`` the same number of times. A vote has the timeout of the group's
    collectives.

    Attributes:
        failure: The failure that the ranks agreed on; None if there is none yet.
    """

    def __init__(self, group: ProcessGroup):
        self.failure: Failure | None = None
        self._agreement = agreement_of(group)
        self._reasons = PrefixStore(f"cuda_graph_capture/{group.group_name}", distributed_c10d._get_default_store())
        # Ctrl-C interrupts only the main thread, so a vote always completes.
        self._thread = ThreadPoolExecutor(1)

    def vote(self, failure: Failure | None = None, blockers: Mapping[str, str] | None = None) -> dict[str, str]:
        """Cast the vote of this rank, and wait until all ranks have voted.

        Args:
            failure: This rank's failure.
            blockers: Why this rank cannot capture, keyed by topic; empty if it can. All ranks pass the same topics.

        Returns:
            For each topic, why one of the ranks cannot capture; empty if all can.

        Raises:
            RuntimeError: Ranks have not voted within the timeout of the group, or have exited.
        """
        if self._agreement.size == 1:
            self.failure = self.failure or failure
            return dict(blockers or {})
        return self._thread.submit(self._cast, failure, blockers or {}).result()

    def _cast(self, failure: Failure | None, blockers: Mapping[str, str]) -> dict[str, str]:
        if self.failure is not None:  # from a vote whose caller was interrupted
            return {}
        reasons = {"failure": json.dumps(asdict(failure)) if failure else "", **blockers}
        # A rank that votes again has seen that all ranks have read the reasons of the vote before the last one.
        keys = {topic: f"{topic} {self._agreement.calls % 2}" for topic in reasons}
        for topic, reason in reasons.items():
            if reason:
                self._reasons.set(keys[topic], reason)
        exist = self._agreement.any([bool(reason) for reason in reasons.values()])
        agreed = {
            topic: self._reasons.get(keys[topic]).decode() if exists else ""
            for topic, exists in zip(reasons, exist, strict=True)
        }
        failed = agreed.pop("failure")
        self.failure = Failure(**json.loads(failed)) if failed else None
        return agreed


class CaptureAgreement:
    """Coordinates the ranks of one capture.

    Args:
        groups: The process groups. The ranks of a pipeline stage vote in ``tp_dp_cp``, or in ``tp`` and ``dp_cp`` if it
            is missing. With two groups, ranks may raise different errors if several ranks fail.
        with_other_stages: Whether all pipeline stages capture together.
    """

    def __init__(self, groups: ProcessGroupCollection, *, with_other_stages: bool):
        together = getattr(groups, "tp_dp_cp", None)
        self._of_stage = [Ballot(group) for group in ((groups.tp, groups.dp_cp) if together is None else (together,))]
        self._ballots = [*self._of_stage, *([Ballot(groups.pp)] if with_other_stages else [])]
        self._open = [*self._ballots]  # in which this rank has not cast its last vote
        self._where = "before the first layer"

    def begin(self, where: str, phase: str = "") -> None:
        """Set the pass to report in error messages: ``where``, with an optional ``phase`` such as ``forward``."""
        self._where = f"{where}, {phase}" if phase else where

    def naming(self, hooks: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return a layer's capture-time ``hooks``, extended so that errors report its ``name`` and the phase."""
        kinds: dict[str, Any] = {**hooks}
        for kind, phase in (("forward_pre_hooks", "forward"), ("backward_pre_hooks", "backward")):
            begin: Callable[..., None] = lambda *call, phase=phase: self.begin(name, phase)  # noqa: E731
            kinds[kind] = {"agreement": begin, **hooks[kind]}
        return kinds

    def blockers(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return, for each topic, why a rank cannot capture (this rank's reason first); empty if all ranks can.

        ``own`` maps each topic to this rank's reason, or to an empty string. All ranks pass the same topics.

        Raises:
            CaptureFailedError, CaptureInterruptedError: A rank failed.
        """
        on_rank = f" (on rank {torch.distributed.get_rank()})"
        agreed = self._vote(self._ballots, {topic: why and why + on_rank for topic, why in own.items()})
        return {topic: why or agreed[topic] for topic, why in own.items()}

    @contextmanager
    def together(self, undo: Callable[[], object]) -> Iterator[None]:
        """Context manager for a capture: on exit, all ranks have captured, or all call ``undo`` and raise an error.

        Raises:
            CaptureFailedError: The capture raised an ``Exception`` on a rank.
            CaptureInterruptedError: Another rank was interrupted before its last vote. That rank raises its own
                exception.
        """
        try:
            with _before_each_collective(lambda: self._vote(self._of_stage)):
                yield
            self._where = "after the last layer"
            while self._open:  # if this rank is interrupted, no other rank answers a vote after the last one
                self._vote([self._open.pop(0)])
        except BaseException as error:
            failed = self._failed(error)  # before ``undo``, which can fail: other ranks are waiting
            undo()
            if isinstance(error, Exception):
                raise failed from error
            raise  # Ctrl-C

    def _vote(self, ballots: Sequence[Ballot], blockers: Mapping[str, str] | None = None) -> dict[str, str]:
        agreed = dict(blockers or {})
        for ballot in ballots:  # pass one group's blockers on to the next group
            agreed = ballot.vote(blockers=agreed)
            if ballot.failure is not None:
                raise ballot.failure.error()
        return agreed

    def _failed(self, error: BaseException) -> CaptureFailedError | CaptureInterruptedError:
        """Report this rank's ``error`` to all ranks, and return the exception that every rank raises."""
        agreed = next((ballot.failure for ballot in self._ballots if ballot.failure is not None), None)
        if agreed is None or not isinstance(error, Exception):
            cause = f"{type(error).__name__}: {error}".removesuffix(": ")
            agreed = Failure(torch.distributed.get_rank(), self._where, cause, not isinstance(error, Exception))
        for ballot in self._open:
            with suppress(RuntimeError):  # no connection, so the other ranks fail as well
                ballot.vote(agreed)
                if not agreed.interrupted:
                    agreed = ballot.failure or agreed
        return agreed.error()


@contextmanager
def _before_each_collective(join: Callable[[], object]) -> Iterator[None]:
    """Context manager that calls ``join`` before each collective launched outside a stream capture.

    This replaces the methods of ``ProcessGroup`` through which Python launches collectives: a ``TorchDispatchMode``
    would miss the start of a batch of sends and receives, and disable ``torch.compile``. It does not cover functional
    collectives (unused by layers of megatron-core and TransformerEngine), userbuffers or DeepEP.
    """
    batches: set[ProcessGroup] = set()  # groups with an open batch; it launches when it closes
    thread = threading.get_ident()

    def joins(group: ProcessGroup) -> bool:
        # The capture runs in this thread and in autograd's.
        of_capture = threading.get_ident() == thread or torch._C._current_graph_task_id() != -1
        return of_capture and group.size() > 1 and not torch.cuda.is_current_stream_capturing()

    def joined(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def launch(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if name == _END_BATCH:
                batches.discard(group)
            elif group not in batches:
                if name == _BEGIN_BATCH:
                    batches.add(group)
                if joins(group):
                    join()
            return call(group, *args, **kwargs)

        return launch

    methods = Replacements()
    for name in (*LAUNCHING, _BEGIN_BATCH, _END_BATCH):
        methods.add(ProcessGroup, name, joined(name, getattr(ProcessGroup, name)))
    try:
        with methods:
            yield
    finally:  # torch would add later collectives to batches that an exception left open
        for group in batches:
            distributed_c10d._world.pg_coalesce_state.pop(group, None)


def warn_of_failure(failed: CaptureFailedError, outlook: str) -> None:
    """Log a failed capture and its consequence ``outlook`` as a warning; the failed rank adds the traceback."""
    message = f"{failed}. {outlook}."
    if isinstance(failed.__cause__, CaptureFailedError):  # from a different rank
        log_single_rank(logger, logging.WARNING, message)
    else:
        logger.warning(message, exc_info=failed.__cause__)
