"""The trainings of a benchmark, in the order in which they run."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .configurations import LOG_INTERVAL, Configuration
from .variants import Variant

PROFILED_STEPS = LOG_INTERVAL + 5  # step_profile.LAST
MIN_STEPS = 2 * LOG_INTERVAL  # of a training, for one time of its second half


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        number: Its place in the plan.
        configuration, variant: Names.
        flags: Flags of ``megatron.training``.
        environment: Variables set during the training; those of NCCL and CUDA also when processes start.
        side_stream: Whether it runs on a stream other than the default one, as ``megatron.training`` does for
            CUDA graphs.
        steps: How many steps are timed.
        profiled: Whether it is profiled, and not timed.
        top_python: How many Python functions a profile lists.
        communicates: Whether parameters are gathered and gradients reduced.
        checksums: Whether checksums of gradients and weights are taken, in which case times mean less.
    """

    number: int
    configuration: str
    variant: str
    flags: list[str]
    environment: dict[str, str]
    side_stream: bool
    steps: int
    profiled: bool
    top_python: int
    communicates: bool = True
    checksums: bool = False

    @property
    def process_environment(self) -> dict[str, str]:
        """Variables that the processes start with."""
        return {name: value for name, value in self.environment.items() if name.startswith(("NCCL_", "CUDA_"))}

    @property
    def file_name(self) -> str:
        """A name for files of this run."""
        return re.sub(r"[^\w.+=-]+", "_", f"{self.configuration}-{self.variant}")


def plan(trained: Iterable[tuple[Configuration, Variant]], *, steps: int, profiled: bool, top_python: int) -> list[Run]:
    """Return a timed run of each pair, then, if ``profiled``, a profiled one of each.

    What is profiled comes last, as CUDA's profiling interface stays in a process once it was used.
    """
    pairs = list(trained)
    runs: list[Run] = []
    for profile in (False, True) if profiled else (False,):
        for configuration, variant in pairs:
            flags = variant.flags_for(configuration)
            if profile:  # all runs have as many steps in their flags, and so the same data and learning rates
                flags += ["--exit-interval", str(PROFILED_STEPS)]
            runs.append(
                Run(
                    len(runs),
                    configuration.name,
                    variant.name,
                    flags,
                    variant.environment,
                    variant.per_layer,
                    steps,
                    profile,
                    top_python,
                    variant.communicates,
                )
            )
    return runs
