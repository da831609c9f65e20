"""What the tape knows of an operator: read off its schema and tags once, and kept."""

import functools
from dataclasses import dataclass

import torch

from .collectives import is_collective

# wait for the device on a GPU, though no tag of theirs says so
_SYNC = {"bincount", "histc", "is_nonzero", "item", "linalg_eig", "linalg_eigvals", "_linalg_check_errors"}
# take bool masks as indices, which are turned into positions (nonzero) inside the operator
_MASKABLE = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# change what a tensor object is, not what memory holds
_METADATA = {"resize_", "resize_as_", "set_", "_resize_output_", "rename_", "requires_grad_", "detach_"}


@dataclass(frozen=True)
class Op:
    """How the tape treats one overload.

    ``written`` names the arguments it writes: positions for positional ones, names for keyword-only ones.
    """

    name: str
    is_replayable: bool
    waits_for_device: bool
    is_maskable: bool
    is_random: bool
    writes_nothing: bool
    written: tuple[int | str, ...]


@functools.cache
def describe(func: torch._ops.OpOverload) -> Op:
    """Return what the tape must know of ``func``."""
    name = func._schema.name.split("::")[-1]
    tags = func.tags
    written: list[int | str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
    maskable = name in _MASKABLE
    dynamic = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    return Op(
        name=str(func),
        is_replayable=func.namespace in ("aten", "prims") or is_collective(func),
        waits_for_device=name in _SYNC or (dynamic and not maskable),
        is_maskable=maskable,
        is_random=torch.Tag.nondeterministic_seeded in tags,
        writes_nothing=name in _ALLOCATES or name in _METADATA or torch.Tag.inplace_view in tags,
        written=tuple(written),
    )


def waits_for_device(op: Op, args: tuple, kwargs: dict) -> bool:
    """Whether this call would make the host wait for values on the device, as CUDA's operator does."""
    if op.name == "aten.repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return op.waits_for_device or (op.is_maskable and _needs_positions(op, args))


def _needs_positions(op: Op, args: tuple) -> bool:
    """Whether an indexing call holds a mask that has to be turned into positions on the host.

    Writing one value under one mask is a ``masked_fill`` and needs none.
    """
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return False
    is_fill = "put" in op.name and len(masks) == sum(i is not None for i in args[1]) == 1 and args[2].numel() == 1
    accumulates = len(args) > 3 and args[3]
    return not (is_fill and not accumulates)
