"""Compute the gradient norm and clip without TransformerEngine and without synchronizing."""

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch


def apply(function, noop_flag, tensor_lists, *args):
    """Replace TransformerEngine's ``multi_tensor_applier``: call ``function`` with a chunk size and all arguments."""
    return function(2048 * 32, noop_flag, tensor_lists, *args)


def norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    """Replace ``multi_tensor_l2norm``: return the total norm of the first list, and None for norms per tensor."""
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensor_lists[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale(chunk_size, noop_flag, tensor_lists, factor):
    """Replace ``multi_tensor_scale_tensor``: scale the first list by the tensor ``factor`` into the second list."""
    for source, to in zip(*tensor_lists, strict=True):
        to.copy_(source * factor)


def norm_on_device() -> AbstractContextManager[object]:
    """Return a context in which gradient clipping does not synchronize."""
    from megatron.core.optimizer import clip_grads

    if torch.cuda.is_available() and clip_grads.multi_tensor_scale_tensor_impl is not None:
        return nullcontext()
    return mock.patch.multiple(
        clip_grads, multi_tensor_applier=apply, l2_norm_impl=norm, multi_tensor_scale_tensor_impl=scale
    )
