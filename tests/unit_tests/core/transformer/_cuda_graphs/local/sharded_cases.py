"""Train layers whose weights are sharded across this rank and a simulated rank, with megatron-core's code.

Stand-ins replace only TransformerEngine's gather and reduction. Their outputs contain NaN until ``Work.wait``.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp
from megatron.core.transformer.cuda_graphs import create_cudagraphs, is_graph_capturing

from .local_graph_cases import HIDDEN, Layer, Stack, batch, use_graphable_rng

WIDTH = 12  # differs from HIDDEN because megatron-core gathers weights of the same shape into one buffer
GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 0)


class Work:
    """A pending collective whose ``wait`` writes ``result`` to ``output``."""

    def __init__(self, output: torch.Tensor, result: torch.Tensor):
        self.output, self.result = output, result
        output.fill_(torch.nan)

    def wait(self) -> None:
        self.output.copy_(self.result)


def _run(result: torch.Tensor, output: torch.Tensor | None, async_op: bool) -> tuple[torch.Tensor, Work | None]:
    output = torch.empty_like(result) if output is None else output
    work = Work(output, result)
    if async_op:
        return output, work
    work.wait()
    return output, None


def gather(shard, group, async_op=False, quantizer=None, output_tensor=None):
    """Emulate a two-rank all-gather on rank 0: the other rank's shard is ``shard / 2``."""
    return _run(torch.cat([shard, shard / 2]), output_tensor, async_op)


def reduce_scatter(gradient, group, async_op=False, output=None):
    """Emulate a two-rank reduce-scatter on rank 0: the other rank's gradient is ``gradient / 4``."""
    return _run((gradient * 1.25)[: gradient.shape[0] // 2], output, async_op)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up megatron-core's module to run without TransformerEngine, and reset its global state."""
    for name, value in {
        "HAVE_TE": True,
        "gather_along_first_dim": gather,
        "reduce_scatter_along_first_dim": reduce_scatter,
        "in_fp8_activation_recompute_phase": lambda: False,
        "get_dummy_wgrad": lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype, device="cuda"),
        "_GTP_CACHE": None,
        "_AG_STREAMS": {},
        "_RS_STREAMS": {},
        "_inflight_comm_params": set(),
        "_CG_MEMPOOL": None,
        "_CG_MEMPOOL_DEVICE": None,
    }.items():
        monkeypatch.setattr(gtp, name, value)


class ShardedLinear(torch.autograd.Function):
    """A linear map with a sharded weight, like TransformerEngine's modules."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.materialize_group_for_forward().t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dgrad = grad @ weight.materialize_group_for_backward()
        buffer = weight.grad_buffer()
        buffer.copy_(grad.t() @ x)
        return dgrad, weight.finalize_group_grads(buffer)


class ShardedLayer(Layer):
    """A residual layer with two sharded weights and a replicated bias."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        del self.linear
        self.first, self.second = self._shard(WIDTH, HIDDEN), self._shard(HIDDEN, WIDTH)
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))

    def _shard(self, rows: int, columns: int) -> torch.nn.Parameter:
        shard = gtp.GTPShardedParam((torch.randn(rows // 2, columns) / 4).cuda())
        shard.chain_id = gtp.GTPChain.GRAPHED.value
        gtp._gtp_attach_attrs(shard, GROUP)
        return shard

    def forward(self, hidden_states, *args, **kwargs):
        self.calls.count += 1
        hidden = torch.nn.functional.gelu(ShardedLinear.apply(hidden_states, self.first) + self.bias)
        return hidden_states + ShardedLinear.apply(hidden, self.second), None


def sharded_stack(
    count: int = 3, graphs: bool = True, kind: type[ShardedLayer] = ShardedLayer, **options: Any
) -> Stack:
    """Return a seeded stack of ``count`` layers with main gradients."""
    gtp.reset_gtp_state()
    torch.manual_seed(5)
    use_graphable_rng()
    model = Stack([kind(i + 1, graphs, **options) for i in range(count)]).cuda()
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param)
        param.grad_added_to_main_grad = False
    return model


def follow_hooks(model: Stack) -> list[tuple[str, list]]:
    """Register a hook on each weight; return the list to which it appends the weight's name and main gradient."""
    names = {id(param): name for name, param in model.named_parameters()}
    told: list[tuple[str, list]] = []

    def tell(param):
        if not is_graph_capturing():  # like the hook of DistributedDataParallel
            told.append((names[id(param)], param.main_grad.tolist()))

    for layer in model.layers:
        for param in (layer.first, layer.second):
            param.register_grad_accum_hook(None, partial(tell, param))
    return told


def train_sharded(
    model: Stack,
    steps: int = 3,
    microbatches: int = 1,
    at_once: int = 1,
    between_steps: Callable[[Stack, int], Any] = lambda model, step: None,
    create: Callable[[], Any] = create_cudagraphs,
) -> list[Any]:
    """Train ``model``.

    Args:
        model: A model from ``sharded_stack``.
        steps: Number of steps.
        microbatches: Number of micro-batches per step.
        at_once: Number of forward passes that precede their backward passes.
        between_steps: Called after each step; its results are added to the trace.
        create: Called at the end of each step to capture the graphs.

    Returns:
        All losses, main gradients and parameters, and the hook calls.
    """
    told = follow_hooks(model)
    trace: list[Any] = []
    for step in range(steps):
        for first in range(0, microbatches, at_once):
            losses = [model(batch(step, first + i)).square().mean() for i in range(at_once)]
            for loss in losses:
                loss.backward()
                trace.append(loss.item())
            gtp.wait_for_gtp_grad_reduction_on_current_stream()
        trace.append(sorted(told))
        told.clear()
        create()
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None and not param.grad_added_to_main_grad:
                    param.main_grad += param.grad
                param.grad = None
                param.grad_added_to_main_grad = False
                trace.append(param.main_grad.tolist())
                param -= 0.1 * param.main_grad
                param.main_grad.zero_()
        trace.append(between_steps(model, step))
    return [*trace, [param.tolist() for param in model.parameters()]]
