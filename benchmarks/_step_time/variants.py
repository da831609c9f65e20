"""How it is trained: eagerly, with graphs of layers or of the model, under Megatron-FSDP or DistributedDataParallel."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .configurations import NO_FUSION, Configuration

# Per-layer graphs need the two buffer flags; all variants have them, so that they differ in graphs only.
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
DDP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
# It needs an output layer of its own: compare with configurations that have one.
FSDP2 = ("--use-torch-fsdp2", "--ckpt-format", "torch_dcp", "--untie-embeddings-and-output-weights")
WARMUP_STEPS = 3  # eager steps before anything is captured
IMPLEMENTATION = "--cuda-graph-impl"
OPTIMIZER = ("--optimizer-cuda-graph",)
GROUPED = "--moe-use-grouped-tensor"  # tokens per expert stay on the device
PER_LAYER = "transformer_engine"
# A full-iteration graph demands it.
NO_CHECKS = "--no-check-for-nan-in-loss-and-grad"


@dataclass(frozen=True)
class Variant:
    """One way to train a configuration.

    Attributes:
        name: As the user wrote it.
        flags: Flags of ``megatron.training``.
        environment: Variables set during the training. Of those read earlier only NCCL's take effect
            (``Run.process_environment``).
        references: Variants that must compute the same bits; the first that ran is compared with.
        one_graph: Whether a graph holds all passes of a step.
        communicates: Whether parameters are gathered and gradients reduced (``resident.without_collectives``).
        checks_losses: Whether each micro-batch's loss is looked at, as by default in Megatron.
        fuses_gradients: Whether matrix products write gradients of weights where they are reduced. The worker has the
            tests' stand-in for Apex's extension, for which megatron-core asks, and which it does not call where
            parameters are sharded.
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
        """Whether experts are computed without the host."""
        return GROUPED in self.flags

    @property
    def per_layer(self) -> bool:
        """Whether there is a graph for each layer."""
        return PER_LAYER in self.flags

    def flags_for(self, configuration: Configuration) -> list[str]:
        """Return all flags of training ``configuration`` this way.

        The variant's own are last and win. ``~--flag`` removes a flag and its values.
        """
        in_parts = self.per_layer and not self.groups_experts
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
# The optimizer's shards are those of FSDP; parameters and gradients lie whole on each rank.
_RESIDENT = (*_FULL, "--data-parallel-sharding-strategy", "optim")
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("eager", (*FSDP, *_graphs("none"))),
        Variant("native", (*FSDP, *_graphs(PER_LAYER))),
        Variant("full_iteration", _FULL, one_graph=True),
        Variant("compute_alone", _RESIDENT, references=(), one_graph=True, communicates=False),
        Variant("ddp", (*DDP, *_graphs("none")), references=("ddp",)),
        Variant("ddp_graphs", (*DDP, *_graphs(PER_LAYER)), references=("ddp",)),
        Variant("fsdp2", (*FSDP2, *_graphs("none")), references=("fsdp2",)),
        Variant("fsdp2_graphs", (*FSDP2, *_graphs(PER_LAYER)), references=("fsdp2",)),
    )
}
# What follows a variant's name and a plus: fields and flags.
ADDITIONS: dict[str, tuple[dict[str, bool], tuple[str, ...]]] = {
    "checks": ({"checks_losses": True}, ()),
    "grouped": ({}, (GROUPED,)),  # experts in one call each way: their bits may be others
    "fused": ({"fuses_gradients": True}, ()),  # the sum over micro-batches is then made by the products
    "optimizer": ({}, OPTIMIZER),  # with another Adam, which keeps its step count on the device
}
ON_CPU = ("eager", "native")


def parts(text: str) -> tuple[str, list[str], list[str]]:
    """Return the name, the variables and the flags of a variant as the user wrote it."""
    name, _, rest = text.partition(":")
    variables, _, flags = rest.partition(":")
    return name, [each for each in variables.split(",") if each], flags.split()


def variant(text: str) -> Variant:
    """Return the variant that ``text`` names, with further variables and flags: ``native:NAME=VALUE,...:FLAGS``.

    What it is trained with may follow its name, each behind a plus (``ADDITIONS``): ``native+fused+optimizer``.

    Raises:
        ValueError: there is no such variant or addition, or a variable has no value.
    """
    name, variables, flags = parts(text)
    pairs = [pair.split("=", 1) for pair in variables]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"--variants: {text!r} is not NAME:VARIABLE=VALUE,...:FLAGS")
    first, *added = name.split("+")
    base = _choice(VARIANTS, first)
    references = base.references
    for each in added:
        fields, more = _choice(ADDITIONS, each)
        base = replace(base, flags=(*base.flags, *more), **fields)
    if "optimizer" in added and "eager" in references:
        references = (*references, "full_iteration")
    unchecked = [each for each in added if each != "checks"]  # computes the same
    names = ["+".join([reference, *these]) for these in (added, unchecked) for reference in references]
    return replace(
        base,
        name=text,
        flags=(*base.flags, *flags),
        environment={**base.environment, **dict(pairs)},
        references=tuple(dict.fromkeys(names)),
    )


def _choice(known: Mapping[str, Any], name: str) -> Any:
    if name not in known:
        raise ValueError(f"--variants: there is no {name!r}; choose among {', '.join(known)}")
    return known[name]


def default_names(configuration: Configuration, *, on_cpu: bool) -> list[str]:
    """The variants of ``configuration`` that are run unless the user says which."""
    if on_cpu:
        return list(ON_CPU)
    known = [name for name, each in VARIANTS.items() if not set(FSDP2) <= set(each.flags)]
    if not configuration.has_dynamic_shapes:
        return [*known, "full_iteration+optimizer", "eager+optimizer", "native+optimizer"]
    several = [name for name in known if not VARIANTS[name].one_graph]
    return [*several, "eager+grouped", "native+grouped", "eager+optimizer", "native+optimizer"]
