"""Capture the optimizer's step as a CUDA graph, with or without Megatron-FSDP."""

import logging
from typing import Any

import torch

from megatron.core.utils import log_single_rank
from megatron_fsdp_cuda_graphs.overlay import extend

from ..distributed.fsdp.src.megatron_fsdp.optimizer_gradients import gradient_name
from ..distributed.fsdp.src.megatron_fsdp.parameter_swap import same
from .local_shards import gradients_of, hooks_of

_upstream: Any = extend(__name__)
_logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class OptimizerCudaGraphWrapper(_upstream.OptimizerCudaGraphWrapper):
    """Extends megatron-core's ``OptimizerCudaGraphWrapper`` to support Megatron-FSDP and changes after capture.

    Under Megatron-FSDP, parameters are gathered after each replay instead of inside the graph (see
    ``MegatronFSDP.start_param_sync``), and gradients keep their addresses, even if layers run eagerly. torch's
    capturable optimizers get learning rates in tensors, because a graph would bake in numbers.

    The step runs eagerly while parameters, gradients, states, step hooks or numbers (weight decay, for example) differ
    from capture, or if the captured step belongs to a different optimizer.
    """

    def __init__(self, optimizer_step_func: Any, *args: Any, **kwargs: Any):
        super().__init__(optimizer_step_func, *args, **kwargs)
        optimizer = getattr(optimizer_step_func, "__self__", None)
        sharded = [chunk for chunk in getattr(optimizer, "model_chunks", ()) if chunk.ddp_config.use_megatron_fsdp]
        for chunk in sharded:
            chunk.ddp_config.megatron_fsdp_cuda_graph_mode = True
            chunk.param_and_grad_buffer.keep_gradients_in_place()
        self._optimizer, self._told, self._released = optimizer, set[str](), False
        self._captured: dict[tuple[str, int], Any] = {}  # read by the captured step; empty if another was captured
        self._sharded = [chunk for chunk in sharded if chunk.ddp_config.fsdp_all_gather_in_start_param_sync]
        for group in getattr(optimizer, "param_groups", ()):
            if group.get("capturable") and not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device="cuda")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, or replay its graph once it is captured; see megatron-core."""
        if self._released:
            return self.optimizer_step_func()
        if type(self).cuda_graph is not None:
            if self._has_changed():
                self.next_iter()
                return self.optimizer_step_func()
            for chunk in self._sharded:
                chunk.param_and_grad_buffer.before_weights_change()
        result = super().__call__(*args, **kwargs)
        if type(self).cuda_graph is not None:
            self._captured = self._captured or self._read_by_step()
            for chunk in self._sharded:
                chunk.start_param_sync()
        return result

    def release(self) -> None:
        """Free the graph and the gradients that it reads; steps run eagerly until ``restore``."""
        self._released = True
        if self._captured:
            type(self).cuda_graph = type(self).result = None
            type(self).curr_iteration, self._captured = self.cuda_graph_warmup_steps, {}
        for each in self._optimizers:
            if hasattr(each, "free_gradients"):
                each.free_gradients()

    def restore(self) -> None:
        """Continue after ``release``. If it has freed the graph, the next step is captured."""
        self._released = False

    @property
    def _optimizers(self) -> list[Any]:
        return getattr(self._optimizer, "chained_optimizers", [self._optimizer])

    def _read_by_step(self) -> dict[tuple[str, int], Any]:
        """Return the values that the host reads during a step, keyed by name and group; tensors compare by identity."""
        read: dict[tuple[str, int], Any] = {}
        for number, group in enumerate(getattr(self._optimizer, "param_groups", ())):
            for name, value in group.items():
                if name == "params":
                    read["parameters", number] = _Same(*value)
                else:
                    read[name, number] = _Same(value) if isinstance(value, torch.Tensor) else value
        for number, each in enumerate(self._optimizers):
            stepping, config = getattr(each, "optimizer", each), getattr(each, "config", None)
            states = getattr(stepping, "state", {})
            values = [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]
            read["states", number] = _Same(states, *values)
            read["clip_grad", number] = getattr(config, "clip_grad", None)
            if isinstance(stepping, torch.optim.Optimizer):
                read["step hooks", number] = _Same(*hooks_of(stepping))
            name = gradient_name(getattr(config, "use_precision_aware_optimizer", False))
            params = [param for group in getattr(each, "param_groups", ()) for param in group["params"]]
            # Without Megatron-FSDP, the step itself attaches the gradients.
            grads = [grad for grad in gradients_of(params, name) if getattr(grad, "stays", False)]
            read["gradients", number] = _Same(*grads)
        return read

    def _has_changed(self) -> bool:
        """Return whether a replay could differ from an eager step, and log each reason once."""
        now = self._read_by_step()
        if now == self._captured:
            return False
        names = [key[0] for key in now if now[key] != self._captured.get(key)]
        reason = "another optimizer's step was captured"
        if self._captured:
            reason = f"{(names or ['a parameter group'])[0]} changed after capture"
        if reason not in self._told:
            self._told.add(reason)
            log_single_rank(
                _logger, logging.WARNING, f"The optimizer's step runs eagerly (--optimizer-cuda-graph): {reason}"
            )
        return True


class _Same:
    """Compares objects by identity, and keeps them alive because the graph reads them."""

    def __init__(self, *values: Any):
        self._values = list(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and same(other._values, self._values)
