"""What ``layer.cuda_graphs`` holds: graphs of a layer, and which calls they fit."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.utils import log_single_rank

from .eager_passes import EagerPasses
from .errors import ArgumentError
from .expected_inputs import DefaultInputs, ExpectedInputs
from .packed_sequences import PackedUse
from .snapshot import Snapshot

# Inputs that only attention reads; layers without attention receive them too.
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
_ADVICE = ". CUDA graphs need the same --seq-length, --micro-batch-size and precision in every step."
logger = logging.getLogger(__name__)

# Not inputs of the layer: they tell the engine how to replay.
_REPLAY_OPTIONS = ("is_first_microbatch", "cuda_graph_stream", "cuda_graph_event")


class LayerGraph:
    """Replays the graphs of one layer for one micro-batch, from either engine.

    Args:
        sample_args: Its static positional inputs, tensors.
        sample_kwargs: Its static keyword inputs, tensors.
        has_attention: Whether the graphs hold attention; if not, inputs that only attention reads are ignored.
        num_microbatches: The number of micro-batches that every step must have; None for any number.
        absent: The values of keywords that are missing or None at a replay; by default ``sample_kwargs``.
        defaults: Restores ``absent`` after replays that were given other values; one object for all layers of the same
            type of attention mask.
        snapshot: What the graphs rely on, checked before the layer's hooks run; None for no check.
        gathered: The same of what hooks gather, checked behind them at the first micro-batch of each step.
        may_run_eagerly: Whether a pass that the graphs do not fit may run eagerly among replays.
        eager_passes: Counts passes of another shape than at capture, which run eagerly, one for all layers; None if
            they may not.
        packed: What the graphs do with packed sequences; None if there are none, or attention is not captured.

    Attributes:
        around: Called with the engine's callable, positional and keyword arguments in the place of it; None for itself.
    """

    def __init__(
        self,
        name: str,
        graphed: Any,
        sample_args: tuple[torch.Tensor, ...],
        sample_kwargs: dict[str, torch.Tensor],
        *,
        has_attention: bool,
        num_microbatches: int | None = None,
        absent: dict[str, torch.Tensor] | None = None,
        defaults: DefaultInputs | None = None,
        snapshot: Snapshot | None = None,
        gathered: Snapshot | None = None,
        may_run_eagerly: bool = False,
        eager_passes: EagerPasses | None = None,
        packed: PackedUse | None = None,
    ):
        self._eager_passes = EagerPasses() if eager_passes is None else eager_passes
        self._only_shape = sample_args[0].shape if sample_args and eager_passes is not None else None
        self._snapshot, self._may_run_eagerly = snapshot, may_run_eagerly
        # Without them routers, for one, neither count tokens nor add up losses.
        self._only_with_gradients = may_run_eagerly
        self.packed = packed
        self.around: Callable[[Any, tuple, dict[str, Any]], Any] | None = None
        self.name = name
        self.graphed = graphed
        self._num_args = len(sample_args)
        self._ignored = frozenset() if has_attention else ATTENTION_INPUTS
        self.num_microbatches = num_microbatches
        absent = sample_kwargs if absent is None else absent
        self._defaults = DefaultInputs() if defaults is None else defaults
        self._keywords = [(key, absent[key]) for key in sample_kwargs]
        self._gathered = gathered
        self._expected: ExpectedInputs | None = None
        names = _input_names(sample_args, sample_kwargs)
        if hasattr(graphed, "name_inputs"):  # this project's engine, which checks its inputs itself
            graphed.name_inputs(name, names, _ADVICE)
        else:
            self._expected = ExpectedInputs(name, (*sample_args, *sample_kwargs.values()), names.__getitem__, _ADVICE)
        if hasattr(graphed, "backward_dw"):
            self.backward_dw = graphed.backward_dw

    def __call__(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        """Replay on ``args`` and ``kwargs``: see ``replay``."""
        return self.replay(args, kwargs)

    def fits(self, hidden_states: Any) -> bool:
        """Whether a replay on ``hidden_states`` computes what the layer would. If not, log why, once for each reason.

        Raises:
            RuntimeError: it does not, and the layer must not run eagerly among replays.
        """
        if self._only_with_gradients and not torch.is_grad_enabled():
            return False
        shape = self._only_shape
        if shape is not None and getattr(hidden_states, "shape", shape) != shape:
            self._warn_of_shape(hidden_states.shape)
            return False
        snapshot = self._snapshot
        if snapshot is None or not snapshot.changed():
            return True
        if not self._may_run_eagerly:
            raise RuntimeError(
                f"{self.name}: {snapshot.reason()}. What these graphs hold cannot run eagerly for a while: change "
                "it back, or call delete_cuda_graphs() and, to have graphs again, create_cudagraphs()"
            )
        reason = f"{self.name} runs eagerly: {snapshot.reason()}"
        if self._eager_passes.note(reason):
            logger.warning(reason)
        return False

    def _warn_of_shape(self, shape: torch.Size) -> None:
        """Note that a pass whose hidden states have another ``shape`` runs eagerly; warn of it once for each shape.

        So it does in every layer of the model, as hidden states keep their shape from one layer to the next.
        """
        reason = (  # the same for all layers
            f"captured with hidden_states of {tuple(self._only_shape or ())}. Passes with {tuple(shape)} run eagerly, "
            f"in all layers{self._eager_passes.outlook}"
        )
        if self._eager_passes.note(reason, (shape[0], shape[1])):
            log_single_rank(logger, logging.WARNING, f"{self.name} was {reason}")

    def replay(self, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> Any:
        """Replay on ``args`` and ``kwargs``, which is emptied of what the graphs take.

        A keyword may be None. If the layer was captured with it, the graph then reads the value at capture: the causal
        mask, for example.

        Raises:
            ArgumentTypeError: an input is not a tensor.
            ValueError: the graph was captured without an input, or an input has another shape or dtype, or requires
                grad and did not at capture.
            ChangedSinceCaptureError: a parameter, or a main gradient that the graphs write, has moved since capture.
        """
        if len(args) != self._num_args:
            raise ArgumentError(
                f"{self.name} was captured with {self._num_args} positional inputs and is called with {len(args)}"
            )
        if self._gathered is not None and kwargs.get("is_first_microbatch"):
            self._gathered.check()
        replay_kwargs: dict[str, Any] = {}
        for name, absent in self._keywords:
            given = kwargs.pop(name, None)
            if given is None:
                self._defaults.restore(name, absent)
                given = absent
            else:
                self._defaults.will_overwrite(name, absent)
            replay_kwargs[name] = given
        if self._expected is not None:
            self._expected.check((*args, *replay_kwargs.values()))
        for name in _REPLAY_OPTIONS:
            if name in kwargs:
                replay_kwargs[name] = kwargs.pop(name)
        for name, given in kwargs.items():
            if given is not None and name not in self._ignored:
                raise ArgumentError(
                    f"{self.name} was captured without {name}, so its CUDA graph cannot take it. Train with "
                    f"--cuda-graph-impl none, or leave out what makes {name} necessary."
                )
        if self.around is not None:
            return self.around(self.graphed, args, replay_kwargs)
        return self.graphed(*args, **replay_kwargs)

    def reset(self) -> None:
        """Free the graphs."""
        self.graphed.reset()
        self._gathered = self._snapshot = None
        self._keywords = []


def static_inputs(
    graphed: Any, sample_args: tuple[torch.Tensor, ...], sample_kwargs: dict[str, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that the graphs of ``graphed``, an engine's callable, read their inputs from, with names.

    This project's engine has its own in the place of some samples.
    """
    inputs = getattr(graphed, "inputs", (*sample_args, *sample_kwargs.values()))
    names = _input_names(sample_args, sample_kwargs)
    return list(zip(names if len(names) == len(inputs) else map(str, range(len(inputs))), inputs, strict=True))


def _input_names(sample_args: tuple[torch.Tensor, ...], sample_kwargs: dict[str, torch.Tensor]) -> tuple[str, ...]:
    return (*("hidden_states" if i == 0 else f"argument {i}" for i in range(len(sample_args))), *sample_kwargs)


class LayerGraphs(list[LayerGraph]):
    """The graphs of a layer, one for each micro-batch. A deep copy is empty: a copied layer runs eagerly."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerGraphs":
        return LayerGraphs()
