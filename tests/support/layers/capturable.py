"""Make an optimizer's step capturable without TransformerEngine.

Without TransformerEngine, megatron-core uses torch's Adam, which rejects ``capturable`` on CPU ranks, and synchronizes
to compute the gradient norm.
"""

from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from unittest import mock

import torch


def apply(function, noop_flag, tensor_lists, *args):
    """Replace TransformerEngine's ``multi_tensor_applier``: pass all arguments and a chunk size to ``function``."""
    return function(2048 * 32, noop_flag, tensor_lists, *args)


def norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    """Replace ``multi_tensor_l2norm``: return the 2-norm over the first list, float32 ``[1]``; no norms per tensor."""
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensor_lists[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale(chunk_size, noop_flag, tensor_lists, factor):
    """Replace ``multi_tensor_scale_tensor``: write the first list times the tensor ``factor`` to the second list."""
    for source, to in zip(*tensor_lists, strict=True):
        to.copy_(source * factor)


def capturable_on_this_device() -> AbstractContextManager[object]:
    """Return a context in which optimizers support ``capturable`` and clipping does not synchronize."""
    from megatron.core.optimizer import clip_grads

    stack = ExitStack()
    if not torch.cuda.is_available() or clip_grads.multi_tensor_scale_tensor_impl is None:
        for name, stand_in in {
            "multi_tensor_applier": apply,
            "l2_norm_impl": norm,
            "multi_tensor_scale_tensor_impl": scale,
        }.items():
            stack.enter_context(mock.patch.object(clip_grads, name, stand_in))
        devices = mock.Mock(return_value=["cpu", "cuda"])
        stack.enter_context(
            mock.patch.object(import_module("torch.optim.adam"), "_get_capturable_supported_devices", devices)
        )
    return stack
