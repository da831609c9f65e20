"""What ``make_graphed_callables`` returns: a callable for one micro-batch that replays its CUDA graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from ..expected_inputs import ExpectedInputs
from .addresses import Place, places_of
from .replay import ReplayOptions, replay
from .slot import SlotCapture, flat


class GraphedSlot(SlotCapture):
    """A callable, for one micro-batch, that replays its CUDA graphs.

    It is called as the callable was, with tensors of the same shapes and dtypes, and takes part in autograd. What it
    returns lives in the graphs' memory until the next replay of a graph that shares it. The backward graph reads that
    memory, unseen by autograd: who changes an output in place changes the gradients if the callable saved it. Inputs
    may be in the graphs' memory themselves, but not each in the place of another.

    Attributes:
        eager: The function, or the module's ``forward`` as it was, which runs without graphs.
        replaced: What a module's ``__dict__`` had where this object's methods are now.
    """

    def __init__(self, name: str, func: Callable, args: tuple, kwargs: dict[str, Any], **options: Any):
        super().__init__(name, func, args, kwargs, **options)
        self.eager = func.forward if isinstance(func, torch.nn.Module) else func
        self.replaced: dict[str, Any] = {}
        self._training = getattr(func, "training", None)
        self._expected = ExpectedInputs(name, self.inputs, "input {}".format)
        self._frozen = tuple(param for param in self._all_params if not param.requires_grad)
        self._watched: list[tuple[Place, torch.Tensor | None]] = []
        self._ran_eagerly = False  # in the last call with grad

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the graphs on ``args`` and ``kwargs``.

        Keywords that the graph was not captured with are ignored; ``cuda_graph_stream`` and ``cuda_graph_event`` name
        the stream to replay on and the event that ends it; ``is_first_microbatch`` says, where quantized weights are
        cached, whether they are made anew. A module in the other mode (training or evaluation) than at capture runs
        eagerly.

        Raises:
            RuntimeError: after ``reset``; or a parameter was unfrozen or replaced since capture.
            TypeError: an input that the graph was captured with is missing, is not a tensor, or is nested otherwise.
            ValueError: a tensor is not like the captured one, requires grad and did not at capture, or
                ``is_first_microbatch`` is missing.
        """
        if self._replay is None:
            raise RuntimeError(f"the graphs of {self.name} were reset; capture them again to replay them")
        eagerly = self._training is not None and self.func.training != self._training  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            self._ran_eagerly = eagerly
        if eagerly:
            kwargs.pop("cuda_graph_stream", None)
            kwargs.pop("cuda_graph_event", None)
            return self.eager(*args, **kwargs)
        inputs = self._match_inputs(args, kwargs)
        if self._watched or self._frozen:
            self._check_parameters()
        options = None
        if self.quantized is not None or kwargs.get("cuda_graph_stream") is not None:
            options = self._replay_options(kwargs)
        outputs = replay(self._replay, options, *inputs, *self.params)
        return self._nest(outputs)

    def watch_parameters(self, module: torch.nn.Module) -> None:
        """Refuse replays once a parameter of ``module`` is another object: the graphs go on reading the former one."""
        used = set(map(id, (*self.params, *self._frozen)))
        places = places_of(module, "_parameters")
        self._watched = [(place, place.tensor) for place in places if id(place.tensor) in used]

    def _check_parameters(self) -> None:
        for place, param in self._watched:
            if param is not None and place.owner.get(place.key) is not param:
                raise RuntimeError(
                    f"{self.name}: parameter {place.key} of shape {tuple(param.shape)} was replaced after capture, and "
                    "the graphs read the former one: copy new values into it (load_state_dict does), or reset() and "
                    "capture again"
                )
        for param in self._frozen:
            if param.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{self.name}: a parameter of shape {tuple(param.shape)} required no grad at capture and does now, "
                    "but the backward graph computes no gradient of it: reset() and capture again"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(f"{self.name}: CUDA graphs cannot be copied; copy before capture, or after reset()")

    def name_inputs(self, owner: str, names: Sequence[str], advice: str) -> None:
        """Let errors about inputs speak in the words of a caller.

        Args:
            names: What they call each input, positional ones first.
            advice: What follows an error about another shape or dtype.
        """
        if len(names) == len(self._expected):  # inputs that are nested keep their numbers
            self._expected.rename(owner, names.__getitem__, advice)
        for turn in (self.forward_turn, self.backward_turn):
            if turn is not None:
                self.order.rename(turn, owner)

    def _replay_options(self, kwargs: dict[str, Any]) -> ReplayOptions | None:
        stream, event = kwargs.get("cuda_graph_stream"), kwargs.get("cuda_graph_event")
        is_first = kwargs.get("is_first_microbatch")
        after_backward = None if self.quantized is None else self.quantized.before_forward(is_first)
        if stream is None and after_backward is None:
            return None
        return ReplayOptions(stream=stream, event=event, after_backward=after_backward)

    def _match_inputs(self, args, kwargs) -> Sequence[torch.Tensor]:
        if self.kwargs:
            try:
                args = (*args, *[kwargs[key] for key in self.kwargs])
            except KeyError as missing:
                key = missing.args[0]
                raise TypeError(
                    f"{self.name} was captured with the keyword {key!r}, which this call does not give"
                ) from None
        if self._structure is None and self._expected.accepts(args):  # the usual case
            return args
        inputs, structure = flat(args)
        if len(inputs) != len(self._expected):
            raise TypeError(f"{self.name} was captured with {len(self.inputs)} tensors, this call gives {len(inputs)}")
        self._expected.check(inputs)
        if structure != self._structure:
            captured, given = (_nested(len(inputs), spec) for spec in (self._structure, structure))
            raise TypeError(f"{self.name} was captured with inputs nested as {captured}, this call gives {given}")
        return inputs

    def backward_dw(self) -> None:
        """Replay the weight gradients that the last backward pass delayed; nothing where it delays none.

        As in eager mode, a module that does not accumulate into ``main_grad`` sets ``grad`` of its parameters. The
        hooks that modules run after their weight gradients run. If the last call with grad ran eagerly, so does this.

        Raises:
            RuntimeError: after ``reset``.
        """
        if self._replay is None:
            raise RuntimeError(f"the graphs of {self.name} were reset; capture them again to replay them")
        if self._ran_eagerly:
            self._delayed.compute_eagerly()
            return
        if self.weight_gradient_graph is None:
            return
        self._replay.run(self.weight_gradient_graph, "weight gradients", None)
        self._delayed.hand_out(self._clone_param_grads)

    def reset(self) -> None:
        super().reset()
        self._frozen, self._watched = (), []


def _nested(count: int, structure: TreeSpec | None) -> Any:
    """Numbers in place of the leaves that ``flat`` found."""
    numbers = range(count)
    return tuple(numbers) if structure is None else tree_unflatten(numbers, structure)
