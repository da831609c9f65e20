"""Write exact metrics of each training step as JSON lines.

``megatron.training`` prints six digits of the loss and three of the gradient norm, too few to compare runs, and has no
callback. :meth:`StepMetrics.record_training_log` therefore wraps its public function ``training_log``, which is called
once per step.
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
    """Appends one JSON object per step to ``path`` on the last rank, which has the loss under pipeline parallelism.

    Keys of a line:
        step: Number of the step, counted from 1.
        loss: Exact mean loss of the step's tokens (JSON floats are written with ``repr``).
        loss_hex: ``float.hex`` of the loss.
        grad_norm, grad_norm_hex: Gradient norm before clipping; null if there is none.
        ms: Milliseconds since the previous step was logged, including GPU work; null for the first step.
        reserved_mib: Device memory reserved by the allocator on this rank, in MiB.
        graphs: Number of graph pairs on this rank: one per captured model or layer. In a pipeline, each has
            several, for the micro-batches in flight.
        skipped: Whether the optimizer skipped the step.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.last_time: float | None = None
        self.graphable: list[torch.nn.Module] = []

    def watch(self, model_chunks: list) -> list:
        """Store the modules whose graphs are counted. Add this method to ``ModelConfig.post_wrap_hooks``."""
        modules = (module for chunk in model_chunks for module in chunk.modules())
        self.graphable = [module for module in modules if isinstance(module, MegatronModule)]
        return model_chunks

    def record_training_log(self) -> None:
        """Empty the file, and wrap ``megatron.training.training.training_log`` to append a line per step.

        Call this on all ranks before ``pretrain``, whose first collective delays steps until the file is empty.
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
        """Append the metrics of one step to the file.

        Args:
            losses: ``{"lm loss": loss}``, a float tensor with one element; empty if there is no loss.
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
        """Return the number of graphs on this rank, for ``--cuda-graph-impl transformer_engine`` and ``local``."""
        count = 0
        for module in self.graphable:
            count += len(getattr(module, "cuda_graphs", ()))
            count += len(getattr(vars(module).get("forward"), "slots", ()))  # graphs of a model
            manager = getattr(module, "cudagraph_manager", None)
            count += sum(runner.fwd_graph is not None for runner in getattr(manager, "cudagraph_runners", ()))
        return count
