"""Ranks that agree before each collective of a capture, so that one that fails leaves no other waiting in it.

If ranks launch none before all are about to, those that launched one are joined in it by all others.

They agree on the host, over the store that the process groups were set up with: a device may be busy with a collective,
and nothing may be enqueued on a stream that is captured.
"""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, distributed_c10d

from megatron.core.utils import log_single_rank

from ..errors import CaptureFailedError, CaptureInterruptedError
from ..hooks import HookDicts
from ..report import CaptureRecorder

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

_AGREED = "agreed"


@dataclass(frozen=True)
class Failure:
    """Why a capture failed.

    Attributes:
        rank: The rank that it failed on, of all ranks.
        cause: The type of the exception and its text.
        interrupted: Whether the exception is not an ``Exception``: KeyboardInterrupt or SystemExit.
    """

    rank: int
    where: str
    cause: str
    interrupted: bool = False

    def error(self) -> CaptureFailedError | CaptureInterruptedError:
        """Return the exception that all ranks raise; an interrupted one raises its own instead."""
        if self.interrupted:
            return CaptureInterruptedError(
                f"CUDA graph capture was interrupted on rank {self.rank}, {self.where}: {self.cause}"
            )
        return CaptureFailedError(f"CUDA graph capture failed on rank {self.rank}, {self.where}: {self.cause}")


@dataclass(frozen=True)
class Objection:
    """What a rank has against what was asked for; the capture goes on with something else.

    Attributes:
        rank: The rank that objects, of all ranks.
    """

    rank: int
    reason: str


type Against = Failure | Objection


class Ballot:
    """Votes of the ranks of ``group`` in one capture; all must make it, and call ``vote`` equally often.

    A rank waits for the others as long as for a collective of the group (``--distributed-timeout-minutes``). A ballot
    of one rank, or of ranks that cannot communicate (torch's ``fake`` backend), communicates nothing.
    """

    def __init__(self, group: torch.distributed.ProcessGroup):
        self._size = 1 if torch.distributed.get_backend(group) == "fake" else group.size()
        self._votes = self._last_agreed = 0
        self._store: Store | None = None
        if self._size > 1:
            store = PrefixStore(f"cuda_graph_capture/{group.group_name}", distributed_c10d._get_default_store())
            # Each rank counts for itself: one that fails early may begin its next capture before others begin this one.
            self._capture = store.add(f"captures of rank {group.rank()}", 1)
            self._places, self._store = store, PrefixStore(str(self._capture), store)
            backend: Any = group._get_backend(torch.device(distributed_c10d._get_object_coll_device(group)))
            self._timeout = backend.options._timeout
            self._own_rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_process_group_ranks(group)

    def vote(self, against: Against | None = None) -> Against | None:
        """Return None once all ranks have voted for None; otherwise, at once, what a rank voted first against it.

        A rank that failed votes until a failure is decided. An interrupted rank returns its own interruption, so that
        it never continues.

        Raises:
            RuntimeError: ranks have not voted for the time limit of the group, or the store is gone.
        """
        if self._store is None:
            return against
        try:
            decided = self._cast(against)
            # Another rank objected, or Ctrl-C came in the vote before, which had counted.
            while isinstance(against, Failure) and not isinstance(decided, Failure):
                decided = self._cast(against)
            if isinstance(against, Failure) and against.interrupted:
                return against
        except torch.distributed.DistNetworkError as error:
            raise RuntimeError(
                f"the store over which ranks agree on a CUDA graph capture is gone ({error}): the process that has it, "
                "rank 0 or torchrun's on its host, has ended"
            ) from error
        return decided

    def _cast(self, against: Against | None) -> Against | None:
        """Vote, and return what all have decided.

        An interrupted vote does not count: what this rank votes next belongs to the same.
        """
        assert self._store is not None
        verdict = str(self._votes)
        self._places.set(f"place of rank {self._own_rank}", self._place())
        if against is not None:
            self._store.compare_set(verdict, "", json.dumps(asdict(against)))
        elif self._store.add(f"{verdict} voters", 1) == self._size:
            for done in range(self._last_agreed, self._votes):  # all ranks have read these verdicts
                self._store.delete_key(str(done))
                self._store.delete_key(f"{done} voters")
            self._store.delete_key(f"{verdict} voters")
            self._store.compare_set(verdict, "", _AGREED)
        try:
            self._store.wait([verdict], self._timeout)
        except torch.distributed.DistStoreError as error:
            late = [rank for rank in self._ranks if not self._is_here(rank)]
            raise RuntimeError(
                f"rank {' and '.join(map(str, late))} did not come to where rank {self._own_rank} waited for it in a "
                f"CUDA graph capture, for {self._timeout}: it died, waits for another rank, or launches fewer "
                "collectives. If it was only late, raise --distributed-timeout-minutes."
            ) from error
        text = self._store.get(verdict).decode()
        vote, self._votes = self._votes, self._votes + 1
        if text == _AGREED:
            self._last_agreed = vote
            return None
        fields = json.loads(text)
        return Objection(**fields) if "reason" in fields else Failure(**fields)

    def _place(self) -> str:
        return f"vote {self._votes} of capture {self._capture}"

    def _is_here(self, rank: int) -> bool:
        """Whether ``rank`` has cast the vote that this rank waits in."""
        key = f"place of rank {rank}"
        return self._places.check([key]) and self._places.get(key).decode() == self._place()


class CaptureAgreement:
    """What the ranks of one capture agree on: that it succeeds, or who failed where.

    Args:
        stage: The groups of this pipeline stage's ranks, which communicate with one another in the capture: one
            group of all, or two that cross. With two, ranks may raise different ones of several failures.
        pipeline: One rank of each pipeline stage; None if other stages need not know.
        recorder: Records each pass, and the time spent waiting.
    """

    def __init__(
        self,
        stage: Sequence[torch.distributed.ProcessGroup],
        pipeline: torch.distributed.ProcessGroup | None,
        recorder: CaptureRecorder | None = None,
    ):
        self._recorder = recorder or CaptureRecorder(active=False)
        self._stage = [Ballot(group) for group in stage]
        self._pipeline = None if pipeline is None else Ballot(pipeline)
        self._where = "before the first layer"
        self._failure: Failure | None = None

    def begin(self, where: str, phase: str = "") -> None:
        """Note what is captured from now on, for errors to name it.

        Args:
            phase: Which part of it: ``forward`` or ``backward`` if it is a pass.
        """
        self._where = f"{where}, {phase}" if phase else where
        self._recorder.begin(where, phase)

    def beginning(self, where: str, phase: str = "") -> Callable[..., None]:
        """Return a capture-time hook that calls ``begin``."""
        return lambda module, *offered: self.begin(where, phase)

    def join(self) -> None:
        """Wait until all ranks of the stage are about to launch a collective.

        Raises:
            CaptureFailedError, CaptureInterruptedError: a rank failed.
        """
        self._recorder.wait(self._vote_of_stage)

    def objection(self, reason: str) -> str:
        """Return why all ranks capture something else than was asked for; empty if none objects to it.

        Those of other stages, where they need to know, ask at the same time.

        Args:
            reason: Why this one objects; empty if it does not.

        Raises:
            CaptureFailedError, CaptureInterruptedError: a rank failed.
        """
        against = self._vote_of_stage(Objection(torch.distributed.get_rank(), reason) if reason else None)
        if self._pipeline is not None:
            against = self._check(self._pipeline.vote(against)) or against
        return reason or (f"{against.reason} (on rank {against.rank})" if against is not None else "")

    def finish(self) -> None:
        """Wait until all ranks, those of other stages too, have captured everything.

        Raises:
            CaptureFailedError, CaptureInterruptedError: a rank failed.
        """
        self._where = "after the last layer"
        self._vote_of_stage()
        if self._pipeline is not None:
            self._check(self._pipeline.vote())

    def failed(self, error: BaseException) -> CaptureFailedError | CaptureInterruptedError:
        """Let all ranks know that this one failed with ``error``; return what every rank is to raise.

        All ballots get its vote, also those in which others may have learnt of it already: none waits for this rank.
        """
        self._recorder.end()
        agreed = self._failure if isinstance(error, CaptureFailedError | CaptureInterruptedError) else None
        if agreed is None:
            cause = f"{type(error).__name__}: {error}".removesuffix(": ")
            agreed = Failure(torch.distributed.get_rank(), self._where, cause, not isinstance(error, Exception))
        for ballot in [*self._stage, *([] if self._pipeline is None else [self._pipeline])]:
            with suppress(RuntimeError):  # the store is gone, and the others learn that by themselves
                decided = ballot.vote(agreed)
                agreed = decided if isinstance(decided, Failure) else agreed
        return agreed.error()

    def _vote_of_stage(self, against: Against | None = None) -> Objection | None:
        for ballot in self._stage:  # what a rank learns in one group, it says in the next
            against = ballot.vote(against) or against
        return self._check(against)

    def _check(self, against: Against | None) -> Objection | None:
        if isinstance(against, Failure):
            self._failure = against
            raise against.error()
        return against


def warn_of_failure(failed: CaptureFailedError, outlook: str) -> None:
    """Log a failed capture and what follows; with the exception, on the rank that it failed on."""
    message = f"{failed}. {outlook}."
    if isinstance(failed.__cause__, CaptureFailedError):  # another rank's
        log_single_rank(logger, logging.WARNING, message)
    else:
        logger.warning(message, exc_info=failed.__cause__)


def naming_hooks(hooks: Sequence[HookDicts], names: Sequence[str], agreement: CaptureAgreement) -> list[dict[str, Any]]:
    """Return ``hooks`` of layers with one in front that says which pass of the layer begins.

    Args:
        hooks: The capture-time hooks of each layer, by kind.
    """
    with_names = []
    for name, own in zip(names, hooks, strict=True):
        kinds: dict[str, Any] = {**own}
        for kind, phase in (("forward_pre_hooks", "forward"), ("backward_pre_hooks", "backward")):
            kinds[kind] = {"agreement": agreement.beginning(name, phase), **own[kind]}
        with_names.append(kinds)
    return with_names
