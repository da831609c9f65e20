"""The CUDA graph of the optimizer's step, also under Megatron-FSDP."""

import logging
from typing import Any

import torch

from megatron.core.utils import log_single_rank
from megatron_fsdp_cuda_graphs.overlay import extend

from ..distributed.fsdp.src.megatron_fsdp.optimizer_gradients import gradient_name
from .listed_step import Inputs, changed_input, step_inputs

_upstream: Any = extend(__name__)
_logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class OptimizerCudaGraphWrapper(_upstream.OptimizerCudaGraphWrapper):
    """megatron-core's wrapper, which also does what a graph of the step omits.

    Under Megatron-FSDP, parameters are gathered after each replay instead of inside the graph (see
    ``MegatronFSDP.start_param_sync``), and gradients keep their addresses, also if layers run eagerly. torch's
    capturable optimizers get learning rates in tensors, as a graph would bake in numbers.

    The step runs eagerly while parameters, gradients, states, hooks of the step or numbers (weight decay, for example)
    differ from those at capture, or if another optimizer's step was captured.
    """

    def __init__(self, optimizer_step_func: Any, *args: Any, **kwargs: Any):
        super().__init__(optimizer_step_func, *args, **kwargs)
        optimizer = optimizer_step_func.__self__
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        self._optimizers = [each for each in chained if each.optimizer is not None]  # None without parameters
        self._captured: tuple[Inputs, dict[Any, Any]] | None = None  # None if another step was captured
        self._told = set[str]()
        sharded = [chunk for chunk in getattr(optimizer, "model_chunks", ()) if chunk.ddp_config.use_megatron_fsdp]
        for chunk in sharded:
            chunk.ddp_config.megatron_fsdp_cuda_graph_mode = True
            chunk.param_and_grad_buffer.keep_gradients_in_place()
        self._keeps_gradients = bool(sharded)
        self._sharded = [chunk for chunk in sharded if chunk.ddp_config.fsdp_all_gather_in_start_param_sync]
        for group in optimizer.param_groups:
            if group.get("capturable") and not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device="cuda")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, as a graph once it is captured; see megatron-core."""
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

    def _read_by_step(self) -> tuple[Inputs, dict[Any, Any]]:
        """Return the objects that the host reads in a step, and the numbers, both by name."""
        objects: Inputs = {}
        numbers: dict[Any, Any] = {}
        for number, each in enumerate(self._optimizers):
            name = gradient_name(each.config.use_precision_aware_optimizer)
            # Without Megatron-FSDP, gradients are attached within the step.
            params = each.get_parameters() if self._keeps_gradients else []
            read = step_inputs(each.optimizer, [getattr(param, name, None) for param in params])
            numbers["clip_grad", number] = each.config.clip_grad
            for place, group in enumerate(each.param_groups):
                for option, value in group.items():
                    if isinstance(value, torch.Tensor):
                        read.setdefault(option, []).append(value)
                    elif option != "params":
                        numbers[option, number, place] = value
            for kind, found in read.items():
                objects[kind] = objects.get(kind, []) + found
        return objects, numbers

    def _has_changed(self) -> bool:
        """Return whether the graph would differ from the step, and log each reason once."""
        reason = "another optimizer was captured"
        if self._captured is not None:
            objects, numbers = self._read_by_step()
            known, known_numbers = self._captured
            differing = [key[0] for key in numbers if numbers[key] != known_numbers.get(key)]
            changed = changed_input(objects, known) or next(iter(differing), None)
            if changed is None:
                return False
            reason = f"{changed} changed after capture"
        if reason not in self._told:
            self._told.add(reason)
            log_single_rank(
                _logger, logging.WARNING, f"The optimizer's step runs eagerly (--optimizer-cuda-graph): {reason}"
            )
        return True
