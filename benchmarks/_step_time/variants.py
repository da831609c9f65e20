"""Define the variants of a configuration: eager or with graphs, under Megatron-FSDP."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .configurations import NO_FUSION, Configuration

# Graphs need the two buffer flags; eager variants set them to be comparable.
FSDP = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "optim_grads_params",
    "--use-distributed-optimizer",
    "--ckpt-format",
    "fsdp_dtensor",
    "--fsdp-double-buffer",
    "--fsdp-db-use-persist-buf-on-alloc-fail",
)
WARMUP_STEPS = 3  # eager steps before capture
IMPLEMENTATION = "--cuda-graph-impl"
GROUPED = "--moe-use-grouped-tensor"  # token counts stay on the GPU
TE_GRAPHS = "transformer_engine"
# Required by a full-iteration graph.
NO_CHECKS = "--no-check-for-nan-in-loss-and-grad"


@dataclass(frozen=True)
class Variant:
    """One way to train a configuration.

    Attributes:
        name: Name on the command line.
        flags: Flags of ``megatron.training``.
        environment: Environment variables for the run (see ``Run.process_environment``).
        references: Variants that must be bit-identical to this one; only the first that ran is compared.
        one_graph: Whether one graph holds all passes of a step.
        communicates: Whether to gather parameters and reduce gradients (``resident.without_collectives``).
        checks_losses: Whether to check each micro-batch's loss, Megatron's default.
        fuses_gradients: Whether to fuse weight gradients. The worker provides the tests' stub of Apex's extension,
            which megatron-core requires but does not call for sharded parameters.
    """

    name: str
    flags: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    references: tuple[str, ...] = ("eager",)
    one_graph: bool = False
    communicates: bool = True
    checks_losses: bool = False
    fuses_gradients: bool = False

    @property
    def groups_experts(self) -> bool:
        """Whether to use grouped experts, whose token counts stay on the GPU."""
        return GROUPED in self.flags

    @property
    def uses_te_graphs(self) -> bool:
        """Whether to set ``--cuda-graph-impl transformer_engine``."""
        return TE_GRAPHS in self.flags

    def flags_for(self, configuration: Configuration) -> list[str]:
        """Return all flags to train ``configuration``.

        The variant's flags come last and so take precedence. ``~--flag`` removes a flag and its values.
        """
        in_parts = self.uses_te_graphs and not self.groups_experts
        checks = () if self.checks_losses else (NO_CHECKS,)
        flags = [*configuration.flags, *checks, *(configuration.graph_flags if in_parts else ()), *self.flags]
        removed = {flag[1:] for flag in flags if flag.startswith("~")}
        if self.fuses_gradients:
            removed.add(NO_FUSION)
        kept, keep = [], True
        for flag in flags:
            keep = flag not in removed and flag[0] != "~" if flag.startswith(("--", "~")) else keep
            kept += [flag] if keep else []
        return kept


def _graphs(implementation: str) -> tuple[str, ...]:
    return (IMPLEMENTATION, implementation, "--cuda-graph-warmup-steps", str(WARMUP_STEPS))


_FULL = (*FSDP, *_graphs("full_iteration"))
# Only the optimizer is sharded; each rank holds all parameters and gradients.
_RESIDENT = (*_FULL, "--data-parallel-sharding-strategy", "optim")
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("eager", (*FSDP, *_graphs("none"))),
        Variant("native", (*FSDP, *_graphs(TE_GRAPHS))),
        Variant("full_iteration", _FULL, one_graph=True),
        Variant("compute_alone", _RESIDENT, references=(), one_graph=True, communicates=False),
    )
}
# Additions after a plus: fields and flags.
ADDITIONS: dict[str, tuple[dict[str, bool], tuple[str, ...]]] = {
    "checks": ({"checks_losses": True}, ()),
    "grouped": ({}, (GROUPED,)),  # may round differently
    "fused": ({"fuses_gradients": True}, ()),  # matrix products accumulate over micro-batches
}
ON_CPU = ("eager", "native")


def parts(text: str) -> tuple[str, list[str], list[str]]:
    """Split a variant into its name, variables and flags."""
    name, _, rest = text.partition(":")
    variables, _, flags = rest.partition(":")
    return name, [each for each in variables.split(",") if each], flags.split()


def variant(text: str) -> Variant:
    """Return a variant by name, for example ``native+fused+checks:NAME=VALUE,...:FLAGS`` (see ``ADDITIONS``).

    Raises:
        ValueError: The variant or an addition is unknown, or a variable has no value.
    """
    name, variables, flags = parts(text)
    pairs = [pair.split("=", 1) for pair in variables]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"a variable in {text!r} has no value: write NAME:VARIABLE=VALUE,...:FLAGS")
    first, *added = name.split("+")
    base = _choice(VARIANTS, first)
    for each in added:
        fields, more = _choice(ADDITIONS, each)
        base = replace(base, flags=(*base.flags, *more), **fields)
    unchecked = [each for each in added if each != "checks"]  # bit-identical
    names = ["+".join([reference, *these]) for these in (added, unchecked) for reference in base.references]
    return replace(
        base,
        name=text,
        flags=(*base.flags, *flags),
        environment={**base.environment, **dict(pairs)},
        references=tuple(dict.fromkeys(names)),
    )


def _choice(known: Mapping[str, Any], name: str) -> Any:
    if name not in known:
        raise ValueError(f"unknown variant {name!r}: choose from {', '.join(known)}")
    return known[name]


def default_names(configuration: Configuration, *, on_cpu: bool) -> list[str]:
    """Return the default variants of ``configuration``."""
    if on_cpu:
        return list(ON_CPU)
    if not configuration.has_dynamic_shapes:
        return list(VARIANTS)
    several = [name for name, each in VARIANTS.items() if not each.one_graph]
    return [*several, "eager+grouped", "native+grouped", "full_iteration+grouped"]
