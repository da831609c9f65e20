"""Define small layers with a ``CudaGraphManager``, and train them eagerly or with local graphs."""

from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer.cuda_graphs import CudaGraphManager, create_cudagraphs

HIDDEN = 8


def config(**changes: Any) -> SimpleNamespace:
    """Return a configuration with the attributes that local graphs read."""
    options = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 2, "cuda_graph_retain_backward_graph": False}
    return SimpleNamespace(**options | changes)


def groups(pipeline: int = 1) -> Any:
    """Return process groups with ``pipeline`` pipeline stages."""
    return SimpleNamespace(pp=SimpleNamespace(size=lambda: pipeline))


def use_graphable_rng() -> None:
    """Initialize Megatron's RNG tracker with graph-safe states."""
    tensor_parallel_random.initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    tensor_parallel_random.get_cuda_rng_tracker().add("model-parallel-rng", 77)


class Calls:
    """Number of eager calls of a layer, kept outside the layer because passes may not change its attributes."""

    def __init__(self) -> None:
        self.count = 0


class Layer(torch.nn.Module):
    """A residual layer with dropout and a linear map scaled by ``scale``, with an optional graph manager."""

    def __init__(self, number: int = 1, graphs: bool = True, pipeline: int = 1, dropout: float = 0.0, **changes: Any):
        super().__init__()
        self.layer_number = number
        self.config = config(**changes)
        self.is_first_layer = self.is_last_layer = True
        if graphs:  # before its submodules, as in megatron-core
            self.cudagraph_manager = CudaGraphManager(self.config, pg_collection=groups(pipeline))
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.dropout = dropout
        self.calls = Calls()

    def forward(self, hidden_states, scale=None, factor=1.0, **unused):
        self.calls.count += 1
        with tensor_parallel_random.get_cuda_rng_tracker().fork():
            dropped = torch.nn.functional.dropout(hidden_states, self.dropout, self.training)
        out = torch.nn.functional.gelu(self.linear(dropped)) * factor
        return hidden_states + (out if scale is None else out * scale), None

    def __call__(self, *args, **kwargs):
        if hasattr(self, "cudagraph_manager"):
            return self.cudagraph_manager(self, args, kwargs)
        return super().__call__(*args, **kwargs)


class Stack(torch.nn.Module):
    """A sequence of layers between two eager linear maps."""

    def __init__(self, layers: list[Layer]):
        super().__init__()
        self.before = torch.nn.Linear(HIDDEN, HIDDEN)
        self.layers = torch.nn.ModuleList(layers)
        self.after = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x, **kwargs):
        x = self.before(x)
        for layer in self.layers:
            x, _ = layer(x, **kwargs)
        return self.after(x)


def add_to_main_grad(param: Any) -> None:
    """Add the gradient to the main gradient, like the hook of DistributedDataParallel."""
    if param.grad is not None:
        param.main_grad.add_(param.grad)
        param.grad = None


def stack(count: int = 3, graphs: bool = True, **options: Any) -> Stack:
    """Return a seeded stack of ``count`` layers on the GPU."""
    torch.manual_seed(5)
    torch.cuda.manual_seed(5)
    use_graphable_rng()
    return Stack([Layer(i + 1, graphs, **options) for i in range(count)]).cuda()


def batch(step: int, microbatch: int = 0, size: int = 3) -> torch.Tensor:
    """Return the inputs of a micro-batch, ``[size, HIDDEN]``."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randn(size, HIDDEN, generator=generator).cuda()


def train(model: Stack, steps: int = 5, microbatches: int = 1, **kwargs: Any) -> list[Any]:
    """Train ``model`` with plain SGD; return all losses and gradients, and the final parameters."""
    trace: list[Any] = []
    for step in range(steps):
        for microbatch in range(microbatches):
            loss = model(batch(step, microbatch), **kwargs).square().mean()
            loss.backward()
            trace.append(loss.item())
        create_cudagraphs()
        with torch.no_grad():
            for param in model.parameters():
                trace.append(param.grad.tolist())
                param -= 0.1 * param.grad
                param.grad = None
    return [*trace, [param.tolist() for param in model.parameters()]]


def eager_calls(model: Stack) -> list[int]:
    """Return the number of eager calls of each layer, including warm-up and capture."""
    return [layer.calls.count for layer in model.layers]


def runners(model: Stack) -> list[Any]:
    """Return the runners of all layers."""
    return [runner for layer in model.layers for runner in layer.cudagraph_manager.cudagraph_runners]


def record(model: Stack, **kwargs: Any) -> Any:
    """Record and capture one step."""
    model(batch(0), **kwargs).square().mean().backward()
    return create_cudagraphs()
