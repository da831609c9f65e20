"""Compares the arguments of a call with those that a graph was captured with."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .arguments import ArgMetadata, _check_supported_type, is_inference_context


def mismatches(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arg_metas: Sequence[ArgMetadata],
    kwarg_metas: Mapping[str, ArgMetadata],
    grad_enabled: bool,
) -> list[str]:
    """Return a line for each difference; an empty list if the graph can be replayed with these arguments.

    Tensors must have the captured shape, dtype and device. Where gradients are wanted, one that was captured without
    ``requires_grad`` must not require grad. Everything else must be equal to what was captured, of the same type.

    Args:
        args, kwargs: Of the call.
        arg_metas, kwarg_metas: Of the captured call.
        grad_enabled: Whether the call is to be differentiated.

    Raises:
        TypeError: an argument has a type that graphs cannot take.
    """
    found: list[str] = []
    if len(args) != len(arg_metas):
        found.append(f"{len(args)} positional arguments, captured with {len(arg_metas)}")
    else:
        for index, (given, meta) in enumerate(zip(args, arg_metas, strict=True)):
            _compare(given, meta, f"args[{index}]", grad_enabled, found)
    if kwargs.keys() != kwarg_metas.keys():
        missing, unexpected = sorted(kwarg_metas.keys() - kwargs.keys()), sorted(kwargs.keys() - kwarg_metas.keys())
        found += [f"keyword {name!r} is missing: it was given at capture" for name in missing]
        found += [f"keyword {name!r} was not given at capture" for name in unexpected]
    for name, meta in kwarg_metas.items():
        if name in kwargs:
            _compare(kwargs[name], meta, f"kwargs[{name!r}]", grad_enabled, found)
    return found


def _compare(given: Any, meta: ArgMetadata, where: str, grad_enabled: bool, found: list[str]) -> None:
    if given is None and meta.value is None:
        return
    if meta.is_tensor:
        if isinstance(given, torch.Tensor):
            _compare_tensor(given, meta, where, grad_enabled, found)
        else:
            found.append(f"{where}: {type(given).__name__}, captured with a tensor")
        return
    if type(given) is not meta.type:
        _check_supported_type(ArgMetadata(given))
        found.append(f"{where}: {type(given).__name__}, captured with {meta.type.__name__}")
    elif dataclasses.is_dataclass(given):
        for field in dataclasses.fields(given):
            inner = _meta_of(getattr(meta.value, field.name))
            _compare(getattr(given, field.name), inner, f"{where}.{field.name}", grad_enabled, found)
    elif isinstance(given, (tuple, list)):
        if len(given) != len(meta.value):
            found.append(f"{where}: {len(given)} entries, captured with {len(meta.value)}")
            return
        for index, (item, inner) in enumerate(zip(given, meta.value, strict=True)):
            _compare(item, _meta_of(inner), f"{where}[{index}]", grad_enabled, found)
    elif isinstance(given, dict):
        if given.keys() != meta.value.keys():
            found.append(f"{where}: keys {sorted(given)}, captured with {sorted(meta.value)}")
            return
        for key, item in given.items():
            _compare(item, _meta_of(meta.value[key]), f"{where}[{key!r}]", grad_enabled, found)
    elif is_inference_context(given):  # a graph writes to the caches of the context at capture
        if given is not meta.value:
            found.append(
                f"{where}: another {type(given).__name__} than at capture; delete_cuda_graphs() frees its graphs"
            )
    elif given is not meta.value and given != meta.value:
        _check_supported_type(ArgMetadata(given))
        found.append(f"{where}: {given!r}, captured with {meta.value!r}")


def _meta_of(value: Any) -> ArgMetadata:
    return value if isinstance(value, ArgMetadata) else ArgMetadata(value)


def _compare_tensor(given: torch.Tensor, meta: ArgMetadata, where: str, grad_enabled: bool, found: list[str]) -> None:
    if given.shape != meta.shape:
        found.append(f"{where}: shape {tuple(given.shape)}, captured with {tuple(meta.shape)}")
    if given.dtype != meta.dtype:
        found.append(f"{where}: {given.dtype}, captured with {meta.dtype}")
    if given.device != meta.device:
        found.append(f"{where}: device {given.device}, captured with {meta.device}")
    if grad_enabled and given.requires_grad and not meta.requires_grad:
        found.append(f"{where}: requires grad, captured without: the graph computes no gradient of it")
