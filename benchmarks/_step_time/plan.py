"""Plan the training runs of a benchmark."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .configurations import LOG_INTERVAL, Configuration
from .variants import Variant

PROFILED_STEPS = LOG_INTERVAL + 5  # step_profile.LAST
MIN_STEPS = 2 * LOG_INTERVAL  # so that the second half has at least one measurement


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        number: Index in the plan.
        configuration, variant: Names of the configuration and of the variant.
        flags: Flags of ``megatron.training``.
        environment: Environment variables for the run; those in ``process_environment`` are set earlier.
        side_stream: Whether to run on a side stream, as ``megatron.training`` does with CUDA graphs.
        steps: Number of timed steps.
        profiled: Whether to profile instead of timing.
        communicates: Whether to gather parameters and reduce gradients.
        checksums: Whether to compute checksums of gradients and weights, which affects times.
    """

    number: int
    configuration: str
    variant: str
    flags: list[str]
    environment: dict[str, str]
    side_stream: bool
    steps: int
    profiled: bool
    communicates: bool = True
    checksums: bool = False

    @property
    def process_environment(self) -> dict[str, str]:
        """Variables that NCCL and CUDA read once, so they are set when the processes start."""
        return {name: value for name, value in self.environment.items() if name.startswith(("NCCL_", "CUDA_"))}

    @property
    def file_name(self) -> str:
        """Prefix of the names of this run's files."""
        return re.sub(r"[^\w.+=-]+", "_", f"{self.configuration}-{self.variant}")


def plan(trained: Iterable[tuple[Configuration, Variant]], *, steps: int, profiled: bool) -> list[Run]:
    """Return a timed run of each configuration and variant, then profiled runs if ``profiled``.

    Profiled runs come last because CUDA's profiling interface stays loaded after its first use.
    """
    pairs = list(trained)
    runs: list[Run] = []
    for profile in (False, True) if profiled else (False,):
        for configuration, variant in pairs:
            flags = variant.flags_for(configuration)
            if profile:  # keeps --train-iters, and thus data and learning rates
                flags += ["--exit-interval", str(PROFILED_STEPS)]
            runs.append(
                Run(
                    len(runs),
                    configuration.name,
                    variant.name,
                    flags,
                    variant.environment,
                    variant.uses_te_graphs,
                    steps,
                    profile,
                    variant.communicates,
                )
            )
    return runs
