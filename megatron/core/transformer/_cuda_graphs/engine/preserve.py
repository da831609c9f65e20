"""Puts back what warm-up and capture change: buffers, metrics, gradients, garbage collection, torch's own checks."""

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def preserve_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put the buffers of ``modules`` (token counts of an MoE router, say) back to what they held before warm-up.

    A buffer that was reassigned is the former tensor again; after an exception buffers that are new are gone.
    """
    buffers = [buffer for module in modules for buffer in module.buffers()]
    with rebind_buffers(modules), preserve_tensors(buffers):
        yield


@contextmanager
def rebind_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let every buffer of ``modules`` be the tensor again that it was; after an exception new ones are gone."""
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
    """Put ``tensors`` back to what they held before warm-up."""
    saved = {tensor: tensor.clone() for tensor in tensors}
    try:
        yield
    finally:
        with torch.inference_mode():  # in which tensors that were made in it can be written too
            for tensor, value in saved.items():
                # Others may be expanded, which cannot be written, or saved for a backward pass, which would notice.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


@contextmanager
def preserve_moe_metrics() -> Iterator[None]:
    """Put what MoE layers add up for the log (auxiliary losses) back to what it was before warm-up."""
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    metrics = {} if logging is None else logging.get_moe_metrics_tracker().metrics
    saved = {name: entry.values.clone() for name, entry in metrics.items()}
    try:
        yield
    finally:
        for name, values in saved.items():
            metrics[name].values.copy_(values)


@contextmanager
def hide_grads_and_hooks(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Take the ``grad`` and the hooks (``register_hook``) of ``params`` away, and put them back at the end.

    What accumulates into ``grad`` meanwhile can then be told apart. Hooks run at each replay, on the gradients that it
    returns; recorded in the graph they would run once more.
    """
    before = [(param.grad, param._backward_hooks) for param in params]
    for param in params:
        param.grad, param._backward_hooks = None, None
    try:
        yield
    finally:
        for param, (grad, hooks) in zip(params, before, strict=True):
            param.grad, param._backward_hooks = grad, hooks


@contextmanager
def pause_gc() -> Iterator[None]:
    """Collect no garbage until the end: a graph that is collected while another is captured spoils the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def allow_nested_backward() -> Iterator[None]:
    """Let activation checkpointing run its backward pass inside ``torch.autograd.grad``.

    It asks torch, which says no, because what it accumulates is not among what ``grad`` returns. The caller must take
    care of that.
    """
    asked = torch.autograd._is_checkpoint_valid
    torch.autograd._is_checkpoint_valid = lambda: True
    try:
        yield
    finally:
        torch.autograd._is_checkpoint_valid = asked
