"""The CUDA graph of the optimizer's step, under Megatron-FSDP too."""

import logging
from typing import Any

import torch

from megatron.core.utils import log_single_rank
from megatron_fsdp_cuda_graphs.overlay import extend

from ..distributed.fsdp.src.megatron_fsdp.optimizer_gradients import gradient_name
from .local_shards import gradients_of, hooks_of, same

_upstream: Any = extend(__name__)
_logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class OptimizerCudaGraphWrapper(_upstream.OptimizerCudaGraphWrapper):
    """megatron-core's wrapper, which also does what a graph of the step leaves out.

    Parameters under Megatron-FSDP are not gathered within the graph (see ``MegatronFSDP.start_param_sync``) but after
    each replay, and their gradients stay where the graph reads them, whether layers run as graphs or not. torch's
    capturable optimizers get learning rates that are tensors: numbers would stay as at capture.

    The step runs eagerly as long as parameters, which of them have gradients, states, hooks of the step or other
    numbers (weight decay, say) are not those of the capture, or if the step of another optimizer was captured.

    Raises:
        ValueError: there is no eager step before the capture (``cuda_graph_warmup_steps``): the first one makes the
            optimizer's states, which every replay would make anew.
    """

    def __init__(self, optimizer_step_func: Any, *args: Any, **kwargs: Any):
        super().__init__(optimizer_step_func, *args, **kwargs)
        if self.cuda_graph_warmup_steps < 1:
            raise ValueError(
                "--optimizer-cuda-graph needs --cuda-graph-warmup-steps 1 or more: the first step makes the "
                "optimizer's states, and every replay of it would make them anew"
            )
        optimizer = getattr(optimizer_step_func, "__self__", None)
        sharded = [chunk for chunk in getattr(optimizer, "model_chunks", ()) if chunk.ddp_config.use_megatron_fsdp]
        for chunk in sharded:
            chunk.ddp_config.megatron_fsdp_cuda_graph_mode = True
            chunk.param_and_grad_buffer.keep_gradients_in_place()
        self._optimizer, self._told = optimizer, set[str]()
        self._captured: dict[tuple[str, int], Any] = {}  # what the captured step has read; empty if it was another one
        self._sharded = [chunk for chunk in sharded if chunk.ddp_config.fsdp_all_gather_in_start_param_sync]
        for group in getattr(optimizer, "param_groups", ()):
            if group.get("capturable") and not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device="cuda")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, as a graph if it has been captured; see megatron-core."""
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

    def _read_by_step(self) -> dict[tuple[str, int], Any]:
        """Return by name what the host reads in a step: objects in the place of tensors and states."""
        read: dict[tuple[str, int], Any] = {}
        for number, group in enumerate(getattr(self._optimizer, "param_groups", ())):
            for name, value in group.items():
                if name == "params":
                    read[name, number] = _Same(*value)
                else:
                    read[name, number] = _Same(value) if isinstance(value, torch.Tensor) else value
        optimizers = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        for number, each in enumerate(optimizers):
            stepping, config = getattr(each, "optimizer", each), getattr(each, "config", None)
            states = getattr(stepping, "state", {})
            values = [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]
            read["the states", number] = _Same(states, *values)
            read["clip_grad", number] = getattr(config, "clip_grad", None)
            if isinstance(stepping, torch.optim.Optimizer):
                read["hooks of the step", number] = _Same(*hooks_of(stepping))
            name = gradient_name(getattr(config, "use_precision_aware_optimizer", False))
            params = [param for group in getattr(each, "param_groups", ()) for param in group["params"]]
            # Others than Megatron-FSDP attach gradients within the step.
            grads = [grad for grad in gradients_of(params, name) if getattr(grad, "stays", False)]
            read["the gradients", number] = _Same(*grads)
        return read

    def _has_changed(self) -> bool:
        """Whether the graph would not do what the step does now; log what is the reason, once."""
        now = self._read_by_step()
        if now == self._captured:
            return False
        names = [key[0] for key in now if now[key] != self._captured.get(key)]
        reason = f"{(names or ['a group'])[0]} changed after capture" if self._captured else "another one was captured"
        if reason not in self._told:
            self._told.add(reason)
            log_single_rank(
                _logger, logging.WARNING, f"The optimizer's step runs eagerly (--optimizer-cuda-graph): {reason}"
            )
        return True


class _Same:
    """Is equal to what stands for the same objects, which it keeps: the graph reads them."""

    def __init__(self, *values: Any):
        self._values = list(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and same(other._values, self._values)
