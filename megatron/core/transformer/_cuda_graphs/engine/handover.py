"""What the callables of a chain are given and return in the place of tensors that only its graph holds."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

APART = "Set --cuda-graph-layers-per-graph 1, a graph for each layer,"


class Placeholder(torch.Tensor):
    """Stands for a tensor that a graph computes and keeps to itself.

    Its shape, dtype and device can be read; whatever reads or writes its values raises an error.

    Args:
        like: A tensor of the same shape, dtype and device.
        name: The callable that returns it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    made_by: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str) -> "Placeholder":
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=True
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # kernels that are not torch's get no address either
        made.made_by = name
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        leaves = tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, Placeholder))._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"what {self.made_by} returned is not computed separately, and cannot be read or changed: the layer runs "
            f"in one graph with those after it, of which only the last one's output exists. {APART} for a model that "
            "uses hidden states between layers (extract_layer_indices), or leaves layers out"
        )

    # What torch does with a tensor without an operator.
    data_ptr = register_hook = register_post_accumulate_grad_hook = retain_grad = _refuse
    tolist = numpy = __deepcopy__ = __reduce_ex__ = _refuse
    data = property(_refuse, _refuse)

    def __repr__(self, **_: Any) -> str:
        return f"Placeholder(output of {self.made_by}, shape={tuple(self.shape)}, dtype={self.dtype})"


class Handover:
    """How far the calls of a chain are in its last replay, and the output that its last callable will return.

    Args:
        names: What errors call the callables, in order.
        between: What each but the last returns.
    """

    def __init__(self, names: Sequence[str], between: Sequence[Placeholder]):
        self.names = list(names)
        self.between = list(between)
        self.called = 0  # the callables that have been called in the last replay; 0 once all have
        self.output: torch.Tensor | None = None
        self.given: dict[str, tuple[torch.Tensor, int]] = {}  # keyword inputs of the first, with their versions

    def begin(self, output: torch.Tensor, given: dict[str, tuple[torch.Tensor, int]]) -> Placeholder:
        """Note a call of the first callable, which has replayed the graph, and return what it returns.

        Args:
            output: The chain's output.
            given: Keyword inputs of the first callable, with their versions.
        """
        self.output, self.given, self.called = output, given, 1
        return self.between[0]

    def end(self) -> torch.Tensor:
        """Return the chain's output, once."""
        output = self.output
        assert output is not None
        self.forget()
        return output

    def forget(self) -> None:
        """Let go of the replay in progress, and with it of its output."""
        self.called, self.output, self.given = 0, None, {}

    def rename(self, place: int, name: str) -> None:
        """Let errors call the callable at ``place`` ``name``."""
        self.names[place] = name
        if place < len(self.between):
            self.between[place].made_by = name

    def refuse(self, place: int, given: Any) -> NoReturn:
        """Raise the error about a call of the callable at ``place`` out of turn, or with ``given`` as first argument.

        The replay in progress is over.

        Raises:
            RuntimeError: names the callables.
        """
        name, previous = self.names[place], self.names[place - 1]
        if given is self.between[place - 1]:
            last = self.names[self.called - 1] if self.called else self.names[-1]
            what = f"The last one that was called is {last}"
        elif isinstance(given, Placeholder):
            what = f"It is given what {given.made_by} returned"
        else:
            what = "It is given another tensor"
        self.forget()
        raise RuntimeError(
            f"{name} runs in one graph with {previous}, and must be called once after it, with what that returned. "
            f"{what}. {APART} for a model that changes hidden states between layers, leaves layers out, or calls them "
            "twice or in another order"
        )

    def refuse_keyword(self, place: int, keyword: str) -> NoReturn:
        """Raise the error about a keyword input that is not the one of the first callable.

        Raises:
            RuntimeError: names the callables and the input.
        """
        self.forget()
        raise RuntimeError(
            f"{self.names[place]} runs in one graph with {self.names[0]}, which got another {keyword}. {APART} for a "
            f"model whose layers differ in {keyword}"
        )
