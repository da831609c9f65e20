"""Ranks that agree before each phase of a capture, so that one that fails leaves no other waiting in a collective.

Collectives of a capture run at the beginning of a phase: Megatron-FSDP's hooks gather parameters before each pass of a
layer. If ranks enter no phase before all have got through the one before, those that launched a collective are joined
in it by all others. In a capture of the whole model each of Megatron-FSDP's collectives begins a phase.

They agree on the host, over the store that the process groups were set up with: a device may be busy with a collective,
and nothing may be enqueued on a stream that is captured.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, distributed_c10d

from ..errors import CaptureFailedError

# How long to wait for ranks that neither fail nor get ahead: as long as torch waits for NCCL by default.
_PATIENCE = timedelta(minutes=10)
_AGREED = "agreed"


@dataclass(frozen=True)
class Failure:
    """Why a capture failed.

    Attributes:
        rank: The rank that it failed on, of all ranks.
        where: What was captured.
        cause: The type of the exception and its text.
        interrupted: Whether it was an interruption, not an error.
    """

    rank: int
    where: str
    cause: str
    interrupted: bool = False

    def error(self) -> CaptureFailedError:
        """Return the exception that every rank raises."""
        error = CaptureFailedError(f"CUDA graph capture failed on rank {self.rank}, {self.where}: {self.cause}")
        error.interrupted = self.interrupted
        return error


class Ballot:
    """Votes of the ranks of ``group`` in one capture; all must make it, and call ``vote`` equally often.

    A ballot of one rank, or of ranks that cannot communicate (torch's ``fake`` backend), communicates nothing.
    """

    def __init__(self, group: torch.distributed.ProcessGroup):
        self._size = 1 if torch.distributed.get_backend(group) == "fake" else group.size()
        self._votes = 0
        self._store: Store | None = None
        if self._size > 1:
            store = PrefixStore(f"cuda_graph_capture/{group.group_name}", distributed_c10d._get_default_store())
            # Each rank counts for itself: one that fails early may begin its next capture before others begin this one.
            capture = store.add(f"captures of rank {group.rank()}", 1)
            self._store = PrefixStore(str(capture), store)

    def vote(self, failure: Failure | None = None) -> Failure | None:
        """Return None once all ranks have voted for None; otherwise, at once, the failure that a rank voted first.

        Raises:
            RuntimeError: a rank has not voted for ten minutes.
        """
        if self._store is None:
            return failure
        decided = self._cast(failure)
        if failure is not None and decided is None:  # Ctrl-C came in the vote before, which had counted
            decided = self._cast(failure)
        return decided

    def _cast(self, failure: Failure | None) -> Failure | None:
        """Vote, and return what all have decided.

        An interrupted vote does not count: what this rank votes next belongs to the same.
        """
        assert self._store is not None
        verdict = str(self._votes + 1)
        if failure is not None:
            self._store.compare_set(verdict, "", json.dumps(asdict(failure)))
        elif self._store.add(f"{verdict} voters", 1) == self._size:
            self._store.compare_set(verdict, "", _AGREED)
        try:
            self._store.wait([verdict], _PATIENCE)
        except torch.distributed.DistStoreError as error:
            raise RuntimeError(
                f"a rank that captures CUDA graphs with this one gave no sign of life for {_PATIENCE}: it died, or "
                "waits for another rank"
            ) from error
        text = self._store.get(verdict).decode()
        self._votes += 1
        return None if text == _AGREED else Failure(**json.loads(text))


class CaptureAgreement:
    """What the ranks of one capture agree on: that it succeeds, or who failed where.

    Args:
        stage: The groups of this pipeline stage's ranks, which communicate with one another in the capture: one
            group of all, or two that cross. With two, ranks may raise different ones of several failures.
        pipeline: One rank of each pipeline stage; None if other stages need not know.
    """

    def __init__(
        self, stage: Sequence[torch.distributed.ProcessGroup], pipeline: torch.distributed.ProcessGroup | None
    ):
        self._stage = [Ballot(group) for group in stage]
        self._pipeline = None if pipeline is None else Ballot(pipeline)
        self._where = "before the first layer"
        self._failure: Failure | None = None

    def begin(self, where: str, module: torch.nn.Module | None = None) -> None:
        """Wait until all ranks of the stage begin this phase.

        Args:
            where: Says what is captured in it.
            module: Not used; hooks are called with it.

        Raises:
            CaptureFailedError: a rank failed.
        """
        failure: Failure | None = None
        for ballot in self._stage:  # what a rank learns in one group, it says in the next
            failure = ballot.vote(failure) or failure
        self._check(failure)
        self._where = where

    def finish(self) -> None:
        """Wait until all ranks, those of other stages too, have captured everything.

        Raises:
            CaptureFailedError: a rank failed.
        """
        self.begin("after the last layer")
        if self._pipeline is not None:
            self._check(self._pipeline.vote())

    def failed(self, error: BaseException) -> CaptureFailedError:
        """Let all ranks know that this one failed with ``error``; return what every rank is to raise.

        All ballots get its vote, also those in which others may have learnt of it already: none waits for this rank.
        """
        agreed = self._failure if isinstance(error, CaptureFailedError) else None
        if agreed is None:
            cause, interrupted = f"{type(error).__name__}: {error}", not isinstance(error, Exception)
            agreed = Failure(torch.distributed.get_rank(), self._where, cause, interrupted)
        for ballot in self._stage:
            agreed = ballot.vote(agreed) or agreed
        if self._pipeline is not None:
            agreed = self._pipeline.vote(agreed) or agreed
        return agreed.error()

    def _check(self, failure: Failure | None) -> None:
        if failure is not None:
            self._failure = failure
            raise failure.error()
