"""One row of the table of flags."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from .flag_options import Options

MEGATRON_FSDP = "--use-megatron-fsdp"
TORCH_FSDP = "--use-torch-fsdp2"


class Verdict(enum.Enum):
    """What is known of flags together with per-layer graphs."""

    WORKS = "works"
    REFUSED = "refused"
    NO_EFFECT = "no effect"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Row:
    """What happens to some flags together with a sharded model and per-layer graphs.

    Attributes:
        name: Of the row, for tests.
        flags: The flags, as typed.
        verdict: What is known of them.
        when: Whether options are of this row.
        words: The line that a user gets: the flag at fault, why, and what to do. Of what works, a remark or nothing.
        shown: The test that shows it, as a path in this repository.
        graphs: The values of ``--cuda-graph-impl`` that the row is about.
        sharding: The flag that shards the model.
    """

    name: str
    flags: str
    verdict: Verdict
    when: Callable[[Options], bool]
    words: str = ""
    shown: str = ""
    graphs: tuple[str, ...] = ("transformer_engine",)
    sharding: str = MEGATRON_FSDP

    def applies(self, options: Options, sharding: str) -> bool:
        """Whether the row is about ``options`` of a model that the flag ``sharding`` shards."""
        return sharding == self.sharding and options.implementation in self.graphs and self.when(options)
