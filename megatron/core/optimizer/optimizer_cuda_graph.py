"""The CUDA graph of the optimizer's step, under Megatron-FSDP too."""

from typing import Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class OptimizerCudaGraphWrapper(_upstream.OptimizerCudaGraphWrapper):
    """megatron-core's wrapper, which also does what a graph of the step leaves out.

    Parameters under Megatron-FSDP are not gathered within the graph (see ``MegatronFSDP.start_param_sync``) but after
    each replay, and their gradients stay where the graph reads them, whether layers run as graphs or not. torch's
    capturable optimizers get learning rates that are tensors: numbers would stay as at capture.

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
        self._sharded = [chunk for chunk in sharded if chunk.ddp_config.fsdp_all_gather_in_start_param_sync]
        for group in getattr(optimizer, "param_groups", ()):
            if group.get("capturable") and not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device="cuda")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, as a graph if it has been captured; see megatron-core."""
        result = super().__call__(*args, **kwargs)
        if type(self).cuda_graph is not None:
            for chunk in self._sharded:
                chunk.start_param_sync()
        return result
