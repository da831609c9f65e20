"""Arguments of graphed modules: metadata that stands for tensors, traversal of nested arguments, their comparison."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map as pytree_map

from ..errors import ArgumentTypeError


@dataclass
class CudagraphBufferMetadata:
    """How graphs use a tensor: the attribute ``cg_buffer_metadata`` of tensors of a recorded step.

    Attributes:
        is_cudagraph_input: Whether graphs take the tensor as an input.
        input_use_count: The number of graph inputs that are this tensor.
        cudagraph_reuse_ref_count: The number of those inputs that read the output of another graph in place, without a
            copy.
        capture_reuse_count: During capture, the number of those inputs that graphs still to be captured may read.
        fwd_cudagraph_buffer: During capture, the static tensor that holds its value.
        bwd_cudagraph_buffer: During capture, the static tensor that holds its gradient, from the backward graph that
            computes it to the one that reads it.
        is_saved_for_backward: Whether its memory is kept until a backward pass, as for every input of a pass with
            gradients, even if autograd does not save it.
        recording: Identifies the recording. Tensors may outlive it; metadata of another recording is stale.
        users: The runners that need its value until their backward pass, as bits (``Turn.bit``).
    """

    is_cudagraph_input: bool = False
    is_cudagraph_output: bool = False
    input_use_count: int = 0
    cudagraph_reuse_ref_count: int = 0
    capture_reuse_count: int = 0
    fwd_cudagraph_buffer: torch.Tensor | None = None
    bwd_cudagraph_buffer: torch.Tensor | None = None
    is_saved_for_backward: bool = False
    recording: object | None = None
    users: int = 0


class ArgMetadata:
    """Describes an argument: a tensor by its properties, without its memory, any other argument by itself.

    Attributes:
        value: The address of a tensor; any other argument itself.
        shape, stride, dtype, device, requires_grad: Of a tensor. A tensor whose elements overlap or leave gaps gets
            strides without either.
        cg_buffer_metadata: The tensor's ``CudagraphBufferMetadata``, if it has one: the same object, not a copy.
    """

    def __init__(self, arg: Any):
        self.type = type(arg)
        if not isinstance(arg, torch.Tensor):
            self.value = arg
            return
        self.value = arg.data_ptr()
        self.shape, self.dtype, self.device = arg.shape, arg.dtype, arg.device
        self.stride = arg.stride() if arg.is_contiguous() else _dense_stride(arg)
        self.requires_grad = arg.requires_grad
        if hasattr(arg, "cg_buffer_metadata"):
            self.cg_buffer_metadata: CudagraphBufferMetadata = arg.cg_buffer_metadata

    @property
    def is_tensor(self) -> bool:
        """Whether the argument is a tensor."""
        return issubclass(self.type, torch.Tensor)

    def zeros_like(self) -> torch.Tensor:
        """Return a new tensor of zeros with the shape, strides, dtype, device and ``requires_grad`` of the argument.

        Raises:
            ArgumentTypeError: the argument is not a tensor.
        """
        if not self.is_tensor:
            raise ArgumentTypeError(f"an argument of type {self.type.__name__} has no zeros: only tensors have")
        zeros = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()
        return zeros.requires_grad_(self.requires_grad)


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of ``tensor`` in memory of its own: dimensions in the same order, without gaps or overlaps."""
    return torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), device="meta")).stride()


def metadata_of(meta: ArgMetadata) -> CudagraphBufferMetadata:
    """Return the metadata of the tensor that ``meta`` describes; new one if the tensor was in no recorded step."""
    if not hasattr(meta, "cg_buffer_metadata"):
        meta.cg_buffer_metadata = CudagraphBufferMetadata()
    return meta.cg_buffer_metadata


def tree_map(func: Callable[[Any], Any], tree: Any) -> Any:
    """Map ``func`` over the leaves of ``tree``: nested tuples, lists, dicts and dataclasses.

    A dataclass is copied with its fields mapped; ``__post_init__`` does not run. Other containers that torch's
    ``tree_map`` knows (named tuples, say) are mapped too.
    """
    kind = type(tree)
    if kind is tuple or kind is list:  # the common containers, many times faster than torch's tree_map
        return kind([tree_map(func, item) for item in tree])
    if kind is dict:
        return {key: tree_map(func, item) for key, item in tree.items()}
    if tree is None or isinstance(tree, _LEAVES):
        return func(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        mapped = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(mapped, field.name, tree_map(func, getattr(tree, field.name)))  # it may be frozen
        return mapped
    return pytree_map(lambda leaf: func(leaf) if leaf is tree else tree_map(func, leaf), tree)


# The most common leaf types, checked first.
_LEAVES = (torch.Tensor, ArgMetadata, bool, int, float, str)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of ``tree``, in the order in which ``tree_map`` meets them."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def tensors_of(args: Any, kwargs: Mapping[str, Any] | None = None) -> tuple[torch.Tensor, ...]:
    """Return the tensors among the arguments, in order."""
    tensors: list[torch.Tensor] = []
    for value in _arguments(args, kwargs):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            tensors += (leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))
    return tuple(tensors)


def metas_of(args: Any, kwargs: Mapping[str, Any] | None = None) -> list[ArgMetadata]:
    """Return the descriptions of tensors among arguments that were described, in the order of ``tensors_of``."""
    return [leaf for value in _arguments(args, kwargs) for leaf in leaves_of(value) if isinstance(leaf, ArgMetadata)]


def described(tree: Any) -> Any:
    """Return ``tree`` with an ``ArgMetadata`` in the place of each tensor."""
    return tree_map(lambda leaf: ArgMetadata(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def with_tensors(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return ``tree`` with the next of ``tensors`` in the place of each tensor or description of one."""
    return tree_map(lambda leaf: next(tensors) if isinstance(leaf, (torch.Tensor, ArgMetadata)) else leaf, tree)


def _arguments(args: Any, kwargs: Mapping[str, Any] | None) -> list[Any]:
    positional = [args] if isinstance(args, (torch.Tensor, ArgMetadata)) else list(args or ())
    return positional + list((kwargs or {}).values())


_SCALARS = (torch.Tensor, type(None), bool, int, float, str, Enum, torch.dtype, ArgMetadata, ProcessGroup)


def _check_supported_type(meta: ArgMetadata) -> None:
    """Refuse an argument of a type that graphs cannot take.

    Supported are tensors, None, bools, numbers, strings, enums, dtypes, process groups, inference contexts, and
    dataclasses, tuples, lists and dicts of these.

    Raises:
        ArgumentTypeError: the argument, or a leaf of it, has another type.
    """
    for leaf in leaves_of(meta.value) if not meta.is_tensor else ():
        if not (isinstance(leaf, _SCALARS) or is_inference_context(leaf)):
            raise ArgumentTypeError(
                f"an argument of type {type(leaf).__name__} cannot be given to a module with --cuda-graph-impl local: "
                "a graph takes tensors, None, bool, int, float, str, enums, process groups, inference contexts and "
                "dataclasses, tuples, lists and dicts of these"
            )


def is_inference_context(value: Any) -> bool:
    """Whether ``value`` is one of Megatron's inference contexts, static or dynamic."""
    from megatron.core.inference.contexts import BaseInferenceContext  # imports this module

    return isinstance(value, BaseInferenceContext)


def mismatches(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    captured_args: Sequence[Any],
    captured_kwargs: Mapping[str, Any],
    grad_enabled: bool,
) -> list[str]:
    """Return a line for each difference; an empty list if the graph can be replayed with these arguments.

    Tensors must have the captured shape, dtype and device. Where gradients are wanted, one that was captured without
    ``requires_grad`` must not require grad. Everything else must be equal to what was captured, of the same type.

    Args:
        captured_args, captured_kwargs: Of the captured call, with descriptions in the place of tensors.
        grad_enabled: Whether the call is to be differentiated.

    Raises:
        ArgumentTypeError: an argument has a type that graphs cannot take.
    """
    found: list[str] = []
    if len(args) != len(captured_args):
        found.append(f"{len(args)} positional arguments, captured with {len(captured_args)}")
    else:
        for index, (given, captured) in enumerate(zip(args, captured_args, strict=True)):
            _compare(given, captured, f"args[{index}]", grad_enabled, found)
    if kwargs.keys() != captured_kwargs.keys():
        missing, unexpected = captured_kwargs.keys() - kwargs.keys(), kwargs.keys() - captured_kwargs.keys()
        found += [f"keyword {name!r} is missing: it was given at capture" for name in sorted(missing)]
        found += [f"keyword {name!r} was not given at capture" for name in sorted(unexpected)]
    for name, captured in captured_kwargs.items():
        if name in kwargs:
            _compare(kwargs[name], captured, f"kwargs[{name!r}]", grad_enabled, found)
    return found


def _compare(given: Any, captured: Any, where: str, grad_enabled: bool, found: list[str]) -> None:
    if isinstance(captured, ArgMetadata) and isinstance(given, torch.Tensor):
        if given.shape != captured.shape:
            found.append(f"{where}: shape {tuple(given.shape)}, captured with {tuple(captured.shape)}")
        if given.dtype != captured.dtype:
            found.append(f"{where}: {given.dtype}, captured with {captured.dtype}")
        if given.device != captured.device:
            found.append(f"{where}: device {given.device}, captured with {captured.device}")
        if grad_enabled and given.requires_grad and not captured.requires_grad:
            found.append(f"{where}: requires grad, captured without: the graph computes no gradient of it")
    elif isinstance(captured, ArgMetadata):
        found.append(f"{where}: {type(given).__name__}, captured with a tensor")
    elif given is captured:
        return
    elif type(given) is not type(captured):
        _check_supported_type(ArgMetadata(given))
        found.append(f"{where}: {type(given).__name__}, captured with {type(captured).__name__}")
    elif (parts := _parts(given)) is not None:
        captured_parts = _parts(captured) or {}
        if parts.keys() != captured_parts.keys():
            found.append(f"{where}: entries {', '.join(parts)}, captured with {', '.join(captured_parts)}")
            return
        for part, value in parts.items():
            _compare(value, captured_parts[part], f"{where}{part}", grad_enabled, found)
    elif is_inference_context(given):  # a graph writes to the caches of the context at capture
        found.append(f"{where}: another {type(given).__name__} than at capture; delete_cuda_graphs() frees its graphs")
    elif given != captured:
        _check_supported_type(ArgMetadata(given))
        found.append(f"{where}: {given!r}, captured with {captured!r}")


def _parts(value: Any) -> dict[str, Any] | None:
    """What a tuple, list, dict or dataclass consists of, by how it is written behind ``value``; None for others."""
    if isinstance(value, (tuple, list)):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if isinstance(value, dict):
        return {f"[{key!r}]": item for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    return None
