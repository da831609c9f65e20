"""How it is trained: eagerly, with graphs of layers or of the model, under Megatron-FSDP or DistributedDataParallel."""

from dataclasses import dataclass, field, replace

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
            tests' stand-in for Apex's extension, which only the output layer calls.
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
        """All flags of training ``configuration`` this way; the variant's own are last and win."""
        in_parts = self.per_layer and not self.groups_experts
        checks = () if self.checks_losses else (NO_CHECKS,)
        flags = [*configuration.flags, *checks, *(configuration.graph_flags if in_parts else ()), *self.flags]
        return [flag for flag in flags if not (self.fuses_gradients and flag == NO_FUSION)]


def _graphs(implementation: str) -> tuple[str, ...]:
    return (IMPLEMENTATION, implementation, "--cuda-graph-warmup-steps", str(WARMUP_STEPS))


def _engine(name: str) -> dict[str, str]:
    return {"MEGATRON_CUDA_GRAPH_ENGINE": name}


_FULL = (*FSDP, *_graphs("full_iteration"))
# The optimizer's shards are those of FSDP; parameters and gradients lie whole on each rank.
_RESIDENT = (*_FULL, "--data-parallel-sharding-strategy", "optim")
_CHECKED_REFERENCES = ("eager+checks", "eager")
_GROUPED_REFERENCES = ("eager+grouped",)
_FUSED_REFERENCES = ("eager+fused",)
_OPTIMIZER_REFERENCES = ("eager+optimizer", "full_iteration+optimizer")
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("eager", (*FSDP, *_graphs("none"))),
        Variant("native", (*FSDP, *_graphs(PER_LAYER)), _engine("native")),
        Variant("te", (*FSDP, *_graphs(PER_LAYER)), _engine("transformer_engine")),
        Variant("full_iteration", _FULL, one_graph=True),
        Variant("compute_alone", _RESIDENT, references=(), one_graph=True, communicates=False),
        Variant("ddp", (*DDP, *_graphs("none")), references=("ddp",)),
        Variant("ddp_graphs", (*DDP, *_graphs(PER_LAYER)), _engine("native"), references=("ddp",)),
        Variant("fsdp2", (*FSDP2, *_graphs("none")), references=("fsdp2",)),
        Variant("fsdp2_graphs", (*FSDP2, *_graphs(PER_LAYER)), _engine("native"), references=("fsdp2",)),
        Variant("eager+checks", (*FSDP, *_graphs("none")), references=_CHECKED_REFERENCES, checks_losses=True),
        Variant(
            "native+checks", (*FSDP, *_graphs(PER_LAYER)), _engine("native"), _CHECKED_REFERENCES, checks_losses=True
        ),
        # Experts in one call each way: their bits may be others.
        Variant("eager+grouped", (*FSDP, *_graphs("none"), GROUPED), {}, _GROUPED_REFERENCES),
        Variant("native+grouped", (*FSDP, *_graphs(PER_LAYER), GROUPED), _engine("native"), _GROUPED_REFERENCES),
        # The sum over micro-batches is then made by the products.
        Variant("eager+fused", (*FSDP, *_graphs("none")), {}, _FUSED_REFERENCES, fuses_gradients=True),
        Variant(
            "native+fused", (*FSDP, *_graphs(PER_LAYER)), _engine("native"), _FUSED_REFERENCES, fuses_gradients=True
        ),
        Variant("full_iteration+fused", _FULL, {}, _FUSED_REFERENCES, one_graph=True, fuses_gradients=True),
        Variant(
            "compute_alone+fused",
            _RESIDENT,
            references=(),
            one_graph=True,
            communicates=False,
            fuses_gradients=True,
        ),
        # The optimizer's graph comes with another Adam, which keeps its step count on the device.
        Variant("full_iteration+optimizer", (*_FULL, *OPTIMIZER), {}, _OPTIMIZER_REFERENCES, one_graph=True),
        Variant("eager+optimizer", (*FSDP, *_graphs("none"), *OPTIMIZER), {}, _OPTIMIZER_REFERENCES),
        Variant("native+optimizer", (*FSDP, *_graphs(PER_LAYER), *OPTIMIZER), _engine("native"), _OPTIMIZER_REFERENCES),
    )
}
ON_CPU = ("eager", "native")


def parts(text: str) -> tuple[str, list[str], list[str]]:
    """Return the name, the variables and the flags of a variant as the user wrote it."""
    name, _, rest = text.partition(":")
    variables, _, flags = rest.partition(":")
    return name, [each for each in variables.split(",") if each], flags.split()


def variant(text: str) -> Variant:
    """Return the variant that ``text`` names, with further variables and flags: ``native:NAME=VALUE,...:FLAGS``.

    Raises:
        ValueError: there is no such variant, or a variable has no value.
    """
    name, variables, flags = parts(text)
    if name not in VARIANTS:
        raise ValueError(f"--variants: there is no {name!r}; choose among {', '.join(VARIANTS)}")
    pairs = [pair.split("=", 1) for pair in variables]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"--variants: {text!r} is not NAME:VARIABLE=VALUE,...:FLAGS")
    base = VARIANTS[name]
    return replace(base, name=text, flags=(*base.flags, *flags), environment={**base.environment, **dict(pairs)})


def default_names(configuration: Configuration, *, on_cpu: bool) -> list[str]:
    """The variants of ``configuration`` that are run unless the user says which."""
    if on_cpu:
        return list(ON_CPU)
    experts = configuration.has_dynamic_shapes
    known = {
        name: each
        for name, each in VARIANTS.items()
        if not (set(FSDP2) <= set(each.flags) or each.checks_losses or each.fuses_gradients)
    }
    return [name for name, each in known.items() if not (each.one_graph if experts else each.groups_experts)]
