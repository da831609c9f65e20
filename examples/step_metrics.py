"""Exact metrics of each training step, as JSON lines.

``megatron.training`` prints six digits of the loss and three of the gradient norm, too few to tell two runs apart, and
offers no callback. Its public function ``training_log`` is called once a step with everything that is needed, so
:meth:`StepMetrics.record_training_log` puts a recorder in front of it.
"""

import functools
import inspect
import json
import time
from pathlib import Path

import torch

from megatron.core.transformer.module import MegatronModule
from megatron.training import training
from megatron.training.utils.common_utils import is_last_rank


class StepMetrics:
    """Appends one JSON object a step to ``path``, on the last rank, which has the loss under pipeline parallelism.

    Keys of a line:
        step: number of the step, from 1.
        loss: mean loss of the step's tokens, exact (JSON floats are written with ``repr``).
        loss_hex: the same as ``float.hex()``.
        grad_norm, grad_norm_hex: norm of the gradient before clipping; null if the step had none.
        ms: milliseconds since the step before was logged, GPU work included; null for the first.
        reserved_mib: MiB of device memory that the allocator holds on this rank.
        graphs: layer graphs that this rank holds, one for each layer and micro-batch slot that was captured; 1 if it
            holds graphs of the whole model, or of all layers of its decoder.
        skipped: whether the optimizer skipped the step.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.last_time: float | None = None
        self.graphable: list[torch.nn.Module] = []

    def watch(self, model_chunks: list) -> list:
        """Remember the layers and models whose graphs are to be counted; fits ``ModelConfig.post_wrap_hooks``."""
        modules = (module for chunk in model_chunks for module in chunk.modules())
        self.graphable = [module for module in modules if isinstance(module, MegatronModule)]
        return model_chunks

    def record_training_log(self) -> None:
        """Empty the file and put the recorder in front of ``megatron.training.training.training_log``.

        Call it before ``pretrain``: its first collective keeps a late rank from emptying a file that has lines.
        """
        original = training.training_log
        signature = inspect.signature(original)

        @functools.wraps(original)
        def training_log(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            if is_last_rank():
                self.record(given["iteration"], given["loss_dict"], given["grad_norm"], bool(given["skipped_iter"]))
            return original(*args, **kwargs)

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")
        training.training_log = training_log

    def record(self, step: int, losses: dict[str, torch.Tensor], grad_norm: float | None, skipped: bool) -> None:
        """Append the line of one step.

        Args:
            losses: 'lm loss' as a float tensor of one element; empty where there is no loss.
        """
        torch.cuda.synchronize()
        now = time.perf_counter()
        loss = losses["lm loss"].item() if losses else None
        norm = None if grad_norm is None else float(grad_norm)
        line = {
            "step": step,
            "loss": loss,
            "loss_hex": None if loss is None else loss.hex(),
            "grad_norm": norm,
            "grad_norm_hex": None if norm is None else norm.hex(),
            "ms": None if self.last_time is None else (now - self.last_time) * 1000,
            "reserved_mib": torch.cuda.memory_reserved() / 2**20,
            "graphs": self.graphs(),
            "skipped": skipped,
        }
        self.last_time = now
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def graphs(self) -> int:
        """Count the graphs of ``--cuda-graph-impl transformer_engine`` and ``local`` (runners of layers)."""
        count = 0
        for module in self.graphable:
            count += len(getattr(module, "cuda_graphs", ()))
            count += len(getattr(vars(module).get("forward"), "slots", ()))  # they stand for a model's or decoder's
            manager = getattr(module, "cudagraph_manager", None)
            count += sum(runner.fwd_graph is not None for runner in getattr(manager, "cudagraph_runners", ()))
        return count
