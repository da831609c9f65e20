"""A layer's graphed callable with the arguments it was captured with: what ``layer.cuda_graphs`` holds."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch

from .engine.addresses import AddressGuard

# What only attention reads; a layer without attention is given them all the same.
_ATTENTION_INPUTS = frozenset(
    (
        "attention_mask",
        "rotary_pos_emb",
        "rotary_pos_cos",
        "rotary_pos_sin",
        "rotary_pos_cos_sin",
        "sequence_len_offset",
    )
)
# Not inputs of the layer: they tell the engine how to replay.
_REPLAY_OPTIONS = ("is_first_microbatch", "cuda_graph_stream", "cuda_graph_event")


class LayerGraph:
    """Replays the graphs of one layer for one micro-batch, from either engine.

    Args:
        name: What errors call the layer.
        graphed: The engine's callable.
        sample_args: Its static positional inputs, tensors.
        sample_kwargs: Its static keyword inputs, tensors.
        has_attention: Whether the graphs hold attention; if not, what only attention reads is ignored.
        num_microbatches: How many micro-batches every step must have; None where one graph serves any number.
        absent: What a replay reads for a keyword that it is not given; by default what is in ``sample_kwargs``.
        given: The ``id`` of each tensor of ``sample_kwargs`` in whose place replays were given another; one set for all
            layers that share these tensors.
        guard: Checked at the first micro-batch of each step; None for no check.
    """

    def __init__(
        self,
        name: str,
        graphed: Any,
        sample_args: tuple[torch.Tensor, ...],
        sample_kwargs: dict[str, torch.Tensor],
        has_attention: bool,
        num_microbatches: int | None = None,
        absent: dict[str, torch.Tensor] | None = None,
        given: set[int] | None = None,
        guard: AddressGuard | None = None,
    ):
        self._name = name
        self._graphed = graphed
        self._static_args = sample_args
        self._static_kwargs = sample_kwargs
        self._ignored = frozenset() if has_attention else _ATTENTION_INPUTS
        self.num_microbatches = num_microbatches
        self._absent = sample_kwargs if absent is None else absent
        self._given = set() if given is None else given
        self._guard = guard
        if hasattr(graphed, "backward_dw"):
            self.backward_dw = graphed.backward_dw

    def __call__(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        """Replay on ``args`` and ``kwargs``.

        A keyword may be None if the layer was captured without it, or if no replay ever gave it, to this layer or one
        that shares its static inputs: then the graph reads what capture put there (of a causal attention mask, the
        causal mask).

        Raises:
            ValueError: an input that the graph was not captured with, or of another shape or dtype.
            MovedBufferError: a parameter, or a main gradient that the graphs write, has moved since capture.
        """
        if len(args) != len(self._static_args):
            raise ValueError(
                f"{self._name} was captured with {len(self._static_args)} positional inputs and is called with "
                f"{len(args)}"
            )
        for i, (given, static) in enumerate(zip(args, self._static_args, strict=True)):
            self._compare(f"argument {i}" if i else "hidden_states", given, static)
        if self._guard is not None and kwargs.get("is_first_microbatch"):
            self._guard.check()
        replay_kwargs = {name: kwargs.pop(name) for name in _REPLAY_OPTIONS if name in kwargs}
        for name, static in self._static_kwargs.items():
            given = kwargs.pop(name, None)
            if given is None:
                if id(static) in self._given:
                    raise ValueError(f"{self._name}: {name} was given to some replays and is None in this one")
                given = self._absent[name]
            else:
                self._given.add(id(static))
                self._compare(name, given, static)
            replay_kwargs[name] = given
        for name, given in kwargs.items():
            if given is not None and name not in self._ignored:
                raise ValueError(
                    f"{self._name} was captured without {name}, so its CUDA graph cannot take it. Train with "
                    f"--cuda-graph-impl none, or leave out what makes {name} necessary."
                )
        return self._graphed(*args, **replay_kwargs)

    def _compare(self, name: str, given: Any, static: torch.Tensor) -> None:
        if not isinstance(given, torch.Tensor):
            raise ValueError(f"{self._name}: {name} must be a tensor for a CUDA graph, got {given!r}")
        if given.shape != static.shape or given.dtype != static.dtype:
            raise ValueError(
                f"{self._name} was captured with {name} of {tuple(static.shape)} {static.dtype} and is called with "
                f"{tuple(given.shape)} {given.dtype}. CUDA graphs need the same --seq-length, --micro-batch-size and "
                "precision in every step."
            )

    def wrapped(self, wrap: Callable[[Any], Any]) -> "LayerGraph":
        """Return this graph, to be used in its place, with the engine's callable inside ``wrap``."""
        graph = copy(self)
        graph._graphed = wrap(self._graphed)
        return graph

    def reset(self) -> None:
        """Free the graphs."""
        self._graphed.reset()
        self._guard = None
        self._static_args, self._static_kwargs, self._absent = (), {}, {}
