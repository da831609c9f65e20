"""Describe arguments of graphed calls, traverse nested ones, and compare them with the capture."""

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
    """Usage of a tensor by the graphs of one recording; stored on the tensor as ``cg_buffer_metadata``.

    Attributes:
        is_cudagraph_input, is_cudagraph_output: Whether graphs take or return the tensor.
        input_use_count: Number of graph inputs that are this tensor.
        cudagraph_reuse_ref_count: Number of these inputs that read a different graph's output in place.
        capture_reuse_count: During capture, number of these inputs whose graphs have not been captured yet.
        fwd_cudagraph_buffer: During capture, the static tensor for the value.
        bwd_cudagraph_buffer: During capture, the static tensor for the gradient. It is set once the backward graph
            that computes the gradient is captured, until the graph that reads the gradient is captured.
        recording: Identifies the recording. Metadata of a different recording is stale.
    """

    is_cudagraph_input: bool = False
    is_cudagraph_output: bool = False
    input_use_count: int = 0
    cudagraph_reuse_ref_count: int = 0
    capture_reuse_count: int = 0
    fwd_cudagraph_buffer: torch.Tensor | None = None
    bwd_cudagraph_buffer: torch.Tensor | None = None
    recording: object | None = None


class ArgMetadata:
    """Metadata of an argument. It does not keep the memory of a tensor alive.

    Attributes:
        type: Type of the argument.
        value: Address of a tensor; the argument itself if it is not a tensor.
        shape, dtype, device, requires_grad: Properties of a tensor.
        stride: The tensor's strides; if it has gaps or overlaps, the strides of a dense copy.
        cg_buffer_metadata: The tensor's ``CudagraphBufferMetadata`` object, if it has one.
    """

    def __init__(self, arg: Any):
        self.type = type(arg)
        if not isinstance(arg, torch.Tensor):
            self.value = arg
            return
        self.value = arg.data_ptr()
        self.shape, self.dtype, self.device = arg.shape, arg.dtype, arg.device
        dense = arg if arg.is_contiguous() else torch.empty_strided(arg.shape, arg.stride(), device="meta")
        self.stride = dense.stride() if dense is arg else torch.empty_like(dense).stride()
        self.requires_grad = arg.requires_grad
        if hasattr(arg, "cg_buffer_metadata"):
            self.cg_buffer_metadata: CudagraphBufferMetadata = arg.cg_buffer_metadata

    def zeros_like(self) -> torch.Tensor:
        """Return zeros with the shape, strides, dtype, device and ``requires_grad`` of the tensor.

        Raises:
            ArgumentTypeError: The argument is not a tensor.
        """
        if not issubclass(self.type, torch.Tensor):
            raise ArgumentTypeError(f"cannot make zeros like an argument of type {self.type.__name__}: pass a tensor")
        zeros = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()
        return zeros.requires_grad_(self.requires_grad)


def metadata_of(meta: ArgMetadata) -> CudagraphBufferMetadata:
    """Return the buffer metadata of the tensor; create it if the tensor was not in a recorded step."""
    if not hasattr(meta, "cg_buffer_metadata"):
        meta.cg_buffer_metadata = CudagraphBufferMetadata()
    return meta.cg_buffer_metadata


def tree_map(func: Callable[[Any], Any], tree: Any) -> Any:
    """Map ``func`` over the leaves of nested tuples, lists, dicts, dataclasses and other pytrees.

    Dataclasses are copied with mapped fields, without running ``__post_init__``.
    """
    kind = type(tree)
    if kind is tuple or kind is list:  # the common containers, many times faster than torch's tree_map
        return kind([tree_map(func, item) for item in tree])
    if kind is dict:
        return {key: tree_map(func, item) for key, item in tree.items()}
    if tree is None or isinstance(tree, _COMMON_LEAVES):
        return func(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        mapped = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(mapped, field.name, tree_map(func, getattr(tree, field.name)))  # it may be frozen
        return mapped
    return pytree_map(lambda leaf: func(leaf) if leaf is tree else tree_map(func, leaf), tree)


_COMMON_LEAVES = (torch.Tensor, ArgMetadata, bool, int, float, str)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of ``tree`` in the order of ``tree_map``."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def tensors_of(args: Any, kwargs: Mapping[str, Any] | None = None) -> tuple[torch.Tensor, ...]:
    """Return the tensors among the arguments, in order. ``args`` may be a single tensor."""
    tensors: list[torch.Tensor] = []
    for value in _values(args, kwargs):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            tensors += (leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))
    return tuple(tensors)


def metas_of(args: Any, kwargs: Mapping[str, Any] | None = None) -> list[ArgMetadata]:
    """Return the ``ArgMetadata`` of tensors in ``args`` and ``kwargs``, in the order of ``tensors_of``."""
    return [leaf for leaf in leaves_of(_values(args, kwargs)) if isinstance(leaf, ArgMetadata)]


def described(tree: Any) -> Any:
    """Return ``tree`` with each tensor replaced by its ``ArgMetadata``."""
    return tree_map(lambda leaf: ArgMetadata(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def with_tensors(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return ``tree`` with its tensors, or their ``ArgMetadata``, replaced by ``tensors`` in order."""
    return tree_map(lambda leaf: next(tensors) if isinstance(leaf, (torch.Tensor, ArgMetadata)) else leaf, tree)


def _values(args: Any, kwargs: Mapping[str, Any] | None) -> list[Any]:
    positional = [args] if isinstance(args, (torch.Tensor, ArgMetadata)) else list(args or ())
    return positional + list((kwargs or {}).values())


_SUPPORTED = (torch.Tensor, type(None), bool, int, float, str, Enum, torch.dtype, ArgMetadata, ProcessGroup)


def _check_supported_type(meta: ArgMetadata) -> None:
    """Raise ArgumentTypeError if graphs do not support the type of an argument or of one of its leaves."""
    for leaf in () if issubclass(meta.type, torch.Tensor) else leaves_of(meta.value):
        if not (isinstance(leaf, _SUPPORTED) or is_inference_context(leaf)):
            raise ArgumentTypeError(
                f"--cuda-graph-impl local does not support arguments of type {type(leaf).__name__}: pass tensors, "
                "None, bool, int, float, str, enums, process groups, inference contexts, or dataclasses, tuples, lists "
                "and dicts of these"
            )


def is_inference_context(value: Any) -> bool:
    """Return whether ``value`` is a static or dynamic inference context of Megatron."""
    from megatron.core.inference.contexts import BaseInferenceContext  # imports this module

    return isinstance(value, BaseInferenceContext)


def mismatches(
    args: Sequence[Any], kwargs: Mapping[str, Any], captured: tuple[tuple, dict[str, Any]], grad_enabled: bool
) -> list[str]:
    """Return one line per difference between a call and the ``captured`` call; an empty list if they match.

    Tensors must have the captured shape, dtype and device. With ``grad_enabled``, they may require grad only if the
    captured tensor did. All other arguments must be equal and have the same type.
    """
    found: list[str] = []
    _compare(dict(enumerate(args)), dict(enumerate(captured[0])), ("args",), grad_enabled, found)
    _compare(kwargs, captured[1], ("kwargs",), grad_enabled, found)
    return found


def _compare(given: Any, captured: Any, where: tuple[str, ...], grad_enabled: bool, found: list[str]) -> None:
    if given is captured:
        return
    problem = None
    if isinstance(captured, ArgMetadata) and isinstance(given, torch.Tensor):
        if given.shape != captured.shape:
            problem = f"shape {tuple(given.shape)}, captured with {tuple(captured.shape)}"
        elif given.dtype != captured.dtype:
            problem = f"{given.dtype}, captured with {captured.dtype}"
        elif given.device != captured.device:
            problem = f"device {given.device}, captured with {captured.device}"
        elif grad_enabled and given.requires_grad and not captured.requires_grad:
            problem = "requires grad, but did not at capture: the graph does not compute its gradient"
    elif isinstance(captured, ArgMetadata):
        problem = f"{type(given).__name__}, captured with a tensor"
    elif type(given) is not type(captured):
        problem = f"{type(given).__name__}, captured with {type(captured).__name__}"
    elif isinstance(given, (tuple, list, dict)) or dataclasses.is_dataclass(given):
        parts: Any = given
        captured_parts: Any = captured
        if not isinstance(given, dict):
            parts, captured_parts = _parts(given), _parts(captured)
        for key, value in captured_parts.items():
            if key in parts:
                _compare(parts[key], value, (*where, key), grad_enabled, found)
            else:
                found.append(f"{_place((*where, key))} is missing: it was given at capture")
        found += [f"{_place((*where, key))} was not given at capture" for key in parts if key not in captured_parts]
    elif is_inference_context(given):  # a graph writes to the caches of the captured context
        problem = f"a different {type(given).__name__} than at capture; call delete_cuda_graphs() first"
    elif given != captured:
        problem = f"{given!r}, captured with {captured!r}"
    if problem is not None:
        found.append(f"{_place(where)}: {problem}")


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _place(where: tuple[Any, ...]) -> str:
    return where[0] + "".join(f"[{key!r}]" for key in where[1:])
