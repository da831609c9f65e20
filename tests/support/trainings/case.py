"""Describe how a small model is trained: the model, its graphs, and how steps change."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

VOCABULARY = 128
EVALUATION = 10_000  # evaluations read the batches from this step on


@dataclass(frozen=True)
class Case:
    """Configuration of a training run.

    Attributes:
        model: ``gpt``, ``vision`` (a vision encoder) or ``captions`` (a GPT that reads a vision encoder's features).
        pattern: ``--hybrid-layer-pattern`` for a hybrid model; overrides ``layers`` and ``mtp``.
        transformer_engine: Use TransformerEngine's layers instead of Megatron's.
        mtp: Number of multi-token prediction depths.
        positions: ``position_embedding_type``.
        tied: Share weights between the embedding and the output layer.
        packed: Maximum number of packed sequences in a micro-batch; 0 for one sequence per row.
        fp8: ``fp8_recipe``; None for no FP8.
        unbalanced: Bias the router to send all tokens to the first experts.
        wrapper: ``fsdp`` (Megatron-FSDP) or ``ddp`` (DistributedDataParallel).
        virtual: Model chunks per pipeline stage; None without interleaving.
        passes: Number of forward passes per micro-batch; all precede its backward passes.
        microbatches_later: Number of micro-batches from the second step after capture on; 0 for no change.
        sequences_later, micro_batches_later: Sequence lengths and micro-batch sizes to cycle through from the second
            step after capture on; empty for no change. Each is kept for ``turn`` steps.
        later_on_one_rank: Change shapes on the last data-parallel rank only.
        masked_step: The only step with a stricter mask than the causal mask; None to use the causal mask in every
            step.
        released: Step to run with released graphs; None to keep the graphs. Before this step and the next, the
            optimizer is offloaded and reloaded, and the model evaluates. Before step ``released + 2``, weights under
            Megatron-FSDP are overwritten in place.
        reloads: Save a checkpoint before the capture; load it before steps ``released - 1`` and ``released + 1``.
        evaluates: Evaluate after the first step that follows capture; ``often`` to evaluate before capture, after
            capture and after each step.
        evaluated_sequence: Sequence length in evaluation; 0 to use the training sequence length.
        modules: ``cuda_graph_modules``; empty for whole layers.
        holds: The largest unit of a graph: ``model`` or ``layer``; None for the default.
        loss_outside: Call the model without labels, and compute the loss from its logits.
        local: Use ``cuda_graph_impl="local"``.
        full_iteration: Use megatron-core's ``cuda_graph_impl="full_iteration"``.
        unchecked: Skip flag validation.
        norm_on_device: Compute the gradient norm without synchronizing, as TransformerEngine's kernels do.
        adapters: Rank of adapters on linear layers; all other parameters are frozen. 0 for none.
        frozen: Regular expression of the names of parameters to freeze before wrapping; empty for none.
        frozen_later: Like ``frozen``, for parameters to freeze before the second step.
        thawed: First step in which parameters with ``decoupled_lr`` have a nonzero learning rate.
        warmup: Steps before capture; with ``local``, warm-up passes per layer.
        config: Additional attributes of ``TransformerConfig`` and the wrapper's configuration, by name.
    """

    model: str = "gpt"
    pattern: str = ""
    transformer_engine: bool = False
    layers: int = 4
    hidden: int = 64
    sequence: int = 32
    micro_batch: int = 2
    dtype: str = "fp32"
    dropout: float = 0.0
    experts: int = 0
    mtp: int = 0
    positions: str = "rope"
    tied: bool = True
    packed: int = 0
    fp8: str | None = None
    unbalanced: bool = False
    wrapper: str = "fsdp"
    virtual: int | None = None
    microbatches: int = 1
    passes: int = 1
    microbatches_later: int = 0
    sequences_later: tuple[int, ...] = ()
    micro_batches_later: tuple[int, ...] = ()
    turn: int = 1
    later_on_one_rank: bool = False
    masked_step: int | None = None
    released: int | None = None
    reloads: bool = False
    evaluates: bool | str = False
    evaluated_sequence: int = 0
    modules: tuple[str, ...] = ()
    holds: str | None = "model"
    loss_outside: bool = False
    local: bool = False
    full_iteration: bool = False
    unchecked: bool = False
    norm_on_device: bool = False
    adapters: int = 0
    frozen: str = ""
    frozen_later: str = ""
    thawed: int = 0
    steps: int = 12
    warmup: int = 3
    config: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Case":
        """Return a case with the attributes in ``values``. Other keys go to ``config``, and lists become tuples."""
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        own: dict[str, Any] = {each.name: given.pop(each.name) for each in fields(cls) if each.name in given}
        return cls(**own, config=tuple(sorted(given.items())))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the entry ``name`` of ``config``, or ``default``."""
        return dict(self.config).get(name, default)

    @property
    def implementation(self) -> str:
        """The value of ``--cuda-graph-impl`` with graphs."""
        if self.full_iteration:
            return "full_iteration"
        return "local" if self.local else "transformer_engine"

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]

    @property
    def cuda_graph_layers_per_graph(self) -> str | int | None:
        """The value of ``TransformerConfig.cuda_graph_layers_per_graph``."""
        return 1 if self.holds == "layer" else self.holds

    def microbatches_of(self, step: int) -> int:
        """Return the number of micro-batches in ``step``."""
        return self.microbatches_later or self.microbatches if step > self.warmup else self.microbatches

    def sequence_of(self, step: int) -> int:
        """Return the sequence length of ``step``."""
        if step >= EVALUATION:
            return self.evaluated_sequence or self.sequence
        return self._in_turn(self.sequences_later, step) or self.sequence

    def micro_batch_of(self, step: int) -> int:
        """Return the micro-batch size of ``step``."""
        return self._in_turn(self.micro_batches_later, step) or self.micro_batch

    def _in_turn(self, later: tuple[int, ...], step: int) -> int:
        since = step - self.warmup - 1
        return later[since // self.turn % len(later)] if later and since >= 0 else 0

    def __str__(self) -> str:
        changed = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "config"}
        shown = {name: value for name, value in changed.items() if name == "holds" or value != getattr(Case, name)}
        shown |= dict(self.config)
        return " ".join(f"{name}={value}" for name, value in shown.items())
