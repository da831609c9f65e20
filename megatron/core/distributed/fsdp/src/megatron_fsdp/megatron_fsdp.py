"""``MegatronFSDP`` whose hooks are named methods of one object, and which supports per-layer CUDA graphs.

Everything else in this module is megatron-core's.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

from .fsdp_chain import UnitChain
from .fsdp_hooks import FsdpHooks

_upstream: Any = extend(__name__)


class MegatronFSDP(_upstream.MegatronFSDP):
    """megatron-core's ``MegatronFSDP`` with the hooks of ``fsdp_hooks.FsdpHooks``.

    Its arguments, methods and behaviour are megatron-core's.

    Attributes:
        fsdp_hooks: The hooks and their state.
    """

    fsdp_hooks: FsdpHooks

    def _register_fsdp_hooks(self, root_module: torch.nn.Module) -> None:
        self.forward_pre_hooks: dict = {}
        self.forward_hooks: dict = {}
        self.backward_pre_hooks: dict = {}
        self.grad_acc_hooks: dict = {}
        self.fsdp_hooks = hooks = FsdpHooks(self)
        hooks.register(root_module)
        # Schedules that run a layer in parts call these by name.
        self.post_forward_release_module = hooks.release_after_forward
        self.post_backward_release_module = hooks.release_after_backward
        self.pre_backward = partial(hooks.start_backward, None, skip_backward_hook=True)
        self.post_backward = hooks.finish_backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; see megatron-core. Warns if an exception ended the last backward pass."""
        self.fsdp_hooks.before_forward()
        return super().forward(*inputs, **kwargs)

    def zero_grad_buffer(self) -> None:
        """Zero all gradients; see megatron-core. Warns if an exception ended the last backward pass."""
        self.fsdp_hooks.before_step()
        super().zero_grad_buffer()

    def capture_graphs(self, modules: Iterable[torch.nn.Module]) -> AbstractContextManager[None]:
        """Return the context in which CUDA graphs of ``modules`` are captured; see ``GraphedUnits.capture``."""
        return self.fsdp_hooks.graphed.capture(modules)

    def gradient_sinks(self, modules: Iterable[torch.nn.Module], whole: bool) -> list[Any]:
        """Return for each of ``modules`` what takes its gradients in its backward graph; None for autograd.

        Args:
            modules: Those that are about to be captured.
            whole: Whether their graphs hold all that they compute.
        """
        return [self.fsdp_hooks.gradient_sink(module, whole) for module in modules]

    def chain(self, modules: Sequence[torch.nn.Module]) -> UnitChain | None:
        """Return who owns a chain of ``modules``, which are recorded in one graph; None if they cannot be.

        Args:
            modules: Consecutive modules, whole, for each of which ``gradient_sinks`` has returned one.
        """
        return self.fsdp_hooks.chain(modules)

    def forget_graphs(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note that ``modules`` no longer run as CUDA graphs."""
        self.fsdp_hooks.graphed.forget(modules)
