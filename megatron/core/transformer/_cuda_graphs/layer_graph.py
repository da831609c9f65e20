"""The graphs of one layer, stored in ``layer.cuda_graphs``, and the checks that a call matches them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.utils import log_single_rank

from .errors import ArgumentError, ChangedSinceCaptureError
from .inputs import DefaultInputs, PackedUse
from .snapshot import Snapshot

# Inputs that only attention reads. Layers without attention also receive them.
ATTENTION_INPUTS = frozenset(
    (
        "attention_mask",
        "rotary_pos_emb",
        "rotary_pos_cos",
        "rotary_pos_sin",
        "rotary_pos_cos_sin",
        "sequence_len_offset",
    )
)
ANOTHER_SHAPE = (
    "To capture another shape in your own training loop, call helper.delete_cuda_graphs(), set helper.seq_length and "
    "helper.micro_batch_size, and call helper.create_cudagraphs()"
)
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LayerGraph:
    """Replays the graphs of one layer for one micro-batch.

    Attributes:
        graphed: The engine's callable.
        run: Replays ``graphed``; for vision layers, also drops None outputs (see ``Role.wrap``).
        shape: The shape of hidden states at capture; None if passes with different shapes may not run eagerly.
        keywords: Default values of keyword inputs, keyed by name.
        defaults: Restores ``keywords`` after replays with different values; shared by layers with the same mask type.
        ignored: Keywords that calls may pass although the graphs do not read them.
        num_microbatches: The required number of micro-batches per step; None for any number.
        snapshot: State that the graphs depend on, checked before the layer's hooks run.
        gathered: Addresses of parameters and main gradients, checked after the hooks of a step's first micro-batch.
        may_run_eagerly: Whether passes that do not match the graphs run eagerly. If so, passes without gradients
            always do: in a replay, routers would count their tokens.
        logged: Reasons for eager passes that have been logged; shared by all layers.
        packed: How the graphs use packed sequences; None without packed sequences or if attention is not captured.
        runner: Gathers and releases parameters around replays, for Megatron-FSDP's hooks; None without Megatron-FSDP.
    """

    name: str
    graphed: Any
    run: Callable[..., Any]
    shape: torch.Size | None
    keywords: dict[str, torch.Tensor]
    defaults: DefaultInputs
    ignored: frozenset[str]
    num_microbatches: int | None
    snapshot: Snapshot
    gathered: Snapshot
    may_run_eagerly: bool
    logged: set[str]
    packed: PackedUse | None
    runner: Any

    def fits(self, hidden_states: Any) -> bool:
        """Return whether a replay on ``hidden_states`` is equivalent to an eager call. Log each mismatch once.

        Raises:
            ChangedSinceCaptureError: The state changed since capture, and the layer cannot run eagerly between replays.
        """
        if self.may_run_eagerly and not torch.is_grad_enabled():
            return False
        if self.shape is not None and getattr(hidden_states, "shape", self.shape) != self.shape:
            reason = (  # the same for all layers
                f"captured with hidden_states of {tuple(self.shape)}. All layers run passes of shape "
                f"{tuple(hidden_states.shape)} eagerly. {ANOTHER_SHAPE}"
            )
            if reason not in self.logged:
                self.logged.add(reason)
                log_single_rank(logger, logging.WARNING, f"{self.name} was {reason}")
            return False
        if not self.snapshot.changed():
            return True
        if not self.may_run_eagerly:
            raise ChangedSinceCaptureError(f"{self.name} can neither replay nor run eagerly: {self.snapshot.reason()}")
        reason = f"{self.name} runs eagerly: {self.snapshot.reason()}"
        if reason not in self.logged:
            self.logged.add(reason)
            logger.warning(reason)
        return False

    def replay(self, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> Any:
        """Replay on ``args`` and ``kwargs``, and return the output of ``run``.

        Inputs of the graphs are removed from ``kwargs``. If one is missing or None, the graph reads its captured value,
        for example the causal mask.

        Raises:
            TypeError: An input is not a tensor.
            ValueError: An input was not present at capture, or differs from capture in shape, dtype or
                ``requires_grad``.
            ChangedSinceCaptureError: A parameter, or a main gradient that the graphs write, moved since capture.
        """
        if len(args) != 1:
            raise ArgumentError(
                f"{self.name} was captured with one positional input, got {len(args)}: pass all others by keyword"
            )
        if kwargs.get("is_first_microbatch"):
            self.gathered.check()
        given: dict[str, Any] = {}
        for name, absent in self.keywords.items():
            value = kwargs.pop(name, None)
            if value is None:
                self.defaults.restore(name, absent)
                value = absent
            else:
                self.defaults.will_overwrite(name, absent)
            given[name] = value
        if "is_first_microbatch" in kwargs:
            given["is_first_microbatch"] = kwargs.pop("is_first_microbatch")
        for name, value in kwargs.items():
            if value is not None and name not in self.ignored:
                raise ArgumentError(
                    f"{self.name} was captured without {name}, so its CUDA graph cannot take it: remove the option "
                    f"that adds {name}, or train with --cuda-graph-impl none"
                )
        return self.run(*args, **given)

    def backward_dw(self) -> None:
        """Replay the delayed weight gradients."""
        self.graphed.backward_dw()

    def reset(self) -> None:
        """Free the graphs."""
        self.graphed.reset()
        self.snapshot.forget()
        self.gathered.forget()
        self.keywords = {}


class LayerGraphs(list[LayerGraph]):
    """The graphs of a layer, one per micro-batch. A deep copy is empty, so that a copied layer runs eagerly."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerGraphs":
        return LayerGraphs()


@contextmanager
def unchanged_dispatcher(layer: Any) -> Iterator[None]:
    """Context manager that restores attributes (shapes, counts, splits) of the layer's token dispatcher, if any.

    A replay runs no Python code, so eager code after it must read the captured values, not values from an eager pass
    with a different shape.
    """
    dispatcher = getattr(getattr(layer, "mlp", None), "token_dispatcher", None)
    owners = (dispatcher, getattr(dispatcher, "_comm_manager", None))
    kept = [(vars(owner), dict(vars(owner))) for owner in owners if owner is not None]
    try:
        yield
    finally:
        for attributes, values in kept:
            attributes.clear()
            attributes.update(values)
