"""Restores state that warm-up and capture change: buffers, metrics, gradients, garbage collection, a check of torch."""

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..replacements import between, replaced_attribute


@contextmanager
def preserve_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore the buffers of ``modules`` (token counts of an MoE router, say) and their values.

    A buffer that was reassigned becomes the former tensor again; after an exception new buffers are removed.
    """
    buffers = [buffer for module in modules for buffer in module.buffers()]
    with rebind_buffers(modules), preserve_tensors(buffers):
        yield


@contextmanager
def rebind_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore which tensor each buffer of ``modules`` is; after an exception new buffers are removed."""
    owners = dict.fromkeys(child for module in modules for child in module.modules())
    bound = [(owner._buffers, dict(owner._buffers)) for owner in owners]
    try:
        yield
    except BaseException:
        for current, buffers in bound:
            for name in current.keys() - buffers.keys():
                del current[name]
        raise
    finally:
        for current, buffers in bound:
            current.update(buffers)


@contextmanager
def preserve_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the values of ``tensors``."""
    saved = {tensor: tensor.clone() for tensor in tensors}
    try:
        yield
    finally:
        with torch.inference_mode():  # inference tensors can be written here too
            for tensor, value in saved.items():
                # Unchanged ones may be expanded (not writable), or saved for a backward pass, which checks versions.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def moe_metrics() -> list[torch.Tensor]:
    """Return the metrics that MoE layers accumulate for the log (auxiliary losses)."""
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    metrics = {} if logging is None else logging.get_moe_metrics_tracker().metrics
    return [entry.values for entry in metrics.values()]


@contextmanager
def hide_grads_and_hooks(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Remove the ``grad`` and the hooks (``register_hook``) of ``params``, and restore them at the end.

    Gradients accumulated in the context can then be told from earlier ones. Hooks run at each replay, on the gradients
    that it returns; recorded in the graph they would run twice.
    """
    without = replaced_attribute(params, "_backward_hooks", lambda hooks: None)
    with replaced_attribute(params, "grad", lambda grad: None), without:
        yield


def pause_gc() -> AbstractContextManager[None]:
    """Disable garbage collection: freeing a graph while another is captured invalidates the capture."""
    return between(gc.disable, gc.enable) if gc.isenabled() else nullcontext()


def allow_nested_backward() -> AbstractContextManager[None]:
    """Let activation checkpointing run its backward pass inside ``torch.autograd.grad``.

    torch refuses that, because the gradients it accumulates are not among those that ``grad`` returns. The caller must
    collect them.
    """
    return replaced_attribute([torch.autograd], "_is_checkpoint_valid", lambda is_valid: lambda: True)
