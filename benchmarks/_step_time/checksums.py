"""Compute checksums of gradients and weights."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.training import training


class Checksums:
    """Computes checksums of gradients before each optimizer step and of weights after it, without synchronizing."""

    def __init__(self) -> None:
        self._steps: list[dict[str, torch.Tensor]] = []
        self._set_up = training.setup_model_and_optimizer
        training.setup_model_and_optimizer = self._set_up_and_watch

    def _set_up_and_watch(self, *args: Any, **kwargs: Any) -> Any:
        training.setup_model_and_optimizer = self._set_up
        chunks, optimizer, *others = self._set_up(*args, **kwargs)
        run_step = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            grads = ((f"gradient of {name}", _gradient(param)) for name, param in _named_parameters(chunks))
            sums = {name: _checksum(grad) for name, grad in grads if grad is not None}
            result = run_step(*args, **kwargs)
            self._steps.append(sums | {name: _checksum(param) for name, param in _named_parameters(chunks)})
            return result

        optimizer.step = step
        return chunks, optimizer, *others

    def after_step(self, step: int) -> None:
        """Do nothing; part of the interface of ``StepProfile``."""

    def found(self) -> list[dict[str, int]]:
        """Return each step's checksums on all ranks, keyed by ``rank RANK: NAME``. All ranks must call this."""
        mine = [{name: int(value) for name, value in step.items()} for step in self._steps]
        ranks: list[list[dict[str, int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        return [
            {f"rank {rank}: {name}": value for rank, sums in enumerate(step) for name, value in sums.items()}
            for step in zip(*ranks, strict=True)
        ]


def _named_parameters(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the named parameters of the optimizer under Megatron-FSDP, otherwise of the model."""
    for chunk in chunks:
        buffer: Any = getattr(chunk, "param_and_grad_buffer", None)
        yield from chunk.named_parameters() if buffer is None else buffer.optimizer_named_parameters


def _gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the gradient of ``param`` that the optimizer uses; None if there is none."""
    grads = (getattr(param, name, None) for name in ("decoupled_grad", "grad", "main_grad"))
    return next((grad for grad in grads if grad is not None), None)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bit patterns of a tensor, an int64 scalar on its device."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    return local.contiguous().view(bits).sum(dtype=torch.int64)
