"""Test weight gradients that modules compute in a separate pass, like TransformerEngine's ``backward_dw``."""

import queue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.engine.plan import ordered_plan
from megatron.core.transformer._cuda_graphs.te.sample_inputs import sample_arguments

from ..pipeline_orders import orders
from .captured_cases import assert_same_bits, copies, device_tensor, mlp

pytestmark = pytest.mark.usefixtures("cpu_backend")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, put):
        ctx.save_for_backward(x, weight)
        ctx.put = put
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.put((grad, x))
        return grad @ weight, None, None


class DelayedLinear(torch.nn.Module):
    """Linear layer with TransformerEngine's ``delay_wgrad_compute`` interface."""

    def __init__(self, accumulates: bool = False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6, device="cuda"))
        self.weight.main_grad = torch.zeros(6, 6, device="cuda")
        self.wgrad_store = SimpleNamespace(context=queue.Queue())
        self.accumulates = accumulates
        self.notified = 0

    def forward(self, x):
        return _Product.apply(x, self.weight, self.wgrad_store.context.put)

    def need_backward_dw(self):
        return True

    def backward_dw(self):
        grad, x = self.wgrad_store.context.get(block=False)
        if self.accumulates:
            self.weight.main_grad.addmm_(grad.t(), x)
        else:
            self.weight.grad = grad.t() @ x
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def _trigger_wgrad_accumulation_and_reduce_hooks(self):
        self.notified += 1


def numbers_of(module: DelayedLinear, call, backward_dw) -> list:
    """Return outputs and gradients of two steps, each a backward pass followed by ``backward_dw``."""
    numbers = []
    for step in range(2):
        x, before = device_tensor(4, 6, seed=step), module.notified
        y = call(x)
        y.square().sum().backward()
        numbers += copies([y, x.grad, module.weight.grad, module.weight.main_grad])
        backward_dw()
        assert module.notified == before + 1
        numbers += copies([module.weight.grad, module.weight.main_grad])
    return numbers


@pytest.mark.parametrize("accumulates", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("order", [None, [1, -1, -1.5]], ids=["unordered", "ordered"])
def test_delayed_gradients_are_bit_identical_to_eager(order, accumulates):
    torch.manual_seed(5)
    module = DelayedLinear(accumulates)
    weight = module.weight.detach().clone()
    module_of_eager = DelayedLinear(accumulates)
    with torch.no_grad():
        module_of_eager.weight.copy_(weight)
    (graphed,) = make_graphed_callables((module,), ((device_tensor(4, 6),),), _order=order)
    module.weight.main_grad.zero_()  # warm-up accumulated into it, as with TransformerEngine's engine
    assert_same_bits(
        numbers_of(module, graphed, graphed.backward_dw),
        numbers_of(module_of_eager, module_of_eager, module_of_eager.backward_dw),
    )


def test_order_without_delayed_gradients_is_refused():
    module = DelayedLinear()
    with pytest.raises(ValueError, match=r"callable 0 \(DelayedLinear\) delays its weight gradients: add"):
        make_graphed_callables((module,), ((device_tensor(4, 6),),), _order=[1, -1])
    assert module.wgrad_store.context.qsize() == 0


@pytest.mark.parametrize("capturing", [False, True], ids=["warm-up", "capture"])
def test_failed_capture_leaves_nothing_delayed(capturing):
    module = DelayedLinear()

    def fail(*call):
        calls.append(0)
        if len(calls) > (3 if capturing else 0):  # three warm-up passes run first
            raise ValueError("failed")

    calls: list[int] = []
    with pytest.raises(ValueError, match="failed"):
        make_graphed_callables((module,), ((device_tensor(4, 6),),), capture_time_hooks=[{"backward_hooks": {0: fail}}])
    assert module.wgrad_store.context.qsize() == 0
    x = torch.arange(24.0, device="cuda").view(4, 6)  # exact sums in any order
    module(x).sum().backward()
    module.backward_dw()
    assert torch.equal(module.weight.grad, x.sum(0).expand(6, 6))


def test_fused_operations_delay_weight_gradients():
    class Fused(torch.nn.Module):
        _module_groups = None

        def __init__(self):
            super().__init__()
            self.operation = DelayedLinear()

        def forward(self, x):
            return self.operation.forward(x)  # skips its hooks

    module = make_graphed_callables(Fused(), (device_tensor(4, 6),))
    x = device_tensor(4, 6)
    module(x).sum().backward()
    module.backward_dw()
    assert_same_bits([module.operation.weight.grad], [torch.ones_like(x).t() @ x.detach()])


def test_eager_pass_computes_weight_gradients_eagerly():
    module = make_graphed_callables(DelayedLinear(), (device_tensor(4, 6),)).eval()
    x = torch.full((4, 6), 2.0, device="cuda", requires_grad=True)
    module(x).sum().backward()
    module.backward_dw()
    assert module.wgrad_store.context.qsize() == 0
    assert module.weight.grad.eq(8).all()


class MarkedBias(torch.nn.Module):
    """A linear layer times a parameter; only the linear layer is marked as delaying weight gradients.

    The backward pass still computes all gradients, as TransformerEngine does for the bias under FP8.
    """

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6).cuda()
        self.other = torch.nn.Parameter(torch.ones(6, device="cuda"))
        for param in self.linear.parameters():
            param.skip_backward_post_hook = True

    def forward(self, x):
        return self.linear(x).tanh() * self.other


def test_gradients_of_marked_parameters_outlive_backward():
    torch.manual_seed(5)
    order = [1, 1, -1, -1]
    layers = tuple(MarkedBias() for _ in range(3))
    count = order.count(1)
    slots = make_graphed_callables(
        layers,
        [(device_tensor(4, 6, seed=slot),) for slot in range(3 * count)],
        _order=order,
        _num_layers_per_chunk=[3],
        _reuse_graph_input_output_buffers=True,
    )

    def read_late(calls):
        losses = []
        for microbatch in range(count):
            hidden = device_tensor(4, 6, seed=microbatch)
            for layer in range(3):
                hidden = calls[microbatch * 3 + layer](hidden)
            losses.append(hidden.square().sum())
        marked = [param for layer in layers for param in layer.linear.parameters()]
        grads = [torch.autograd.grad(loss, marked) for loss in losses]
        return copies([grad for each in grads for grad in each])

    assert_same_bits(read_late(slots), read_late([slot.eager for slot in slots]))


def run_order(order, layers, delaying, graphed):
    """Run a pipeline order twice, with an input and a loss per slot; return outputs and gradients.

    ``layers`` maps each chunk to its number of layers. The chunks in ``delaying`` delay weight gradients.
    """
    torch.manual_seed(7)
    modules = [DelayedLinear(True) if chunk in delaying else mlp() for chunk, n in layers.items() for _ in range(n)]
    params = [param for module in modules for param in module.parameters()]
    plan = ordered_plan(order, list(layers.values()), len(modules))
    calls = [modules[index] for index in plan.callable_of_slot]
    if graphed:
        samples = sample_arguments(plan, lambda index: ((device_tensor(4, 6, seed=9),), {}))
        calls = make_graphed_callables(
            tuple(modules),
            [args for args, _ in samples],
            _order=order,
            _num_layers_per_chunk=list(layers.values()),
            _reuse_graph_input_output_buffers=True,
        )
        for param in params:
            if hasattr(param, "main_grad"):
                param.main_grad.zero_()
    numbers = []
    for run in range(2):
        inputs = [device_tensor(4, 6, seed=100 * run + slot) for slot in range(len(calls))]
        outputs = [torch.empty(0)] * len(calls)
        for step in plan.steps:
            slot = step.slot
            if step.kind.value == "forward":
                outputs[slot] = calls[slot](inputs[slot])
            elif step.kind.value == "backward":
                outputs[slot].square().sum().backward()
                numbers += copies([outputs[slot], inputs[slot].grad])
            else:
                calls[slot].backward_dw()
        numbers += copies([param.grad for param in params])
        numbers += copies([param.main_grad for param in params if hasattr(param, "main_grad")])
    return numbers


@settings(max_examples=15, deadline=None)
@given(orders())
def test_random_orders_are_bit_identical_to_eager(case):
    order, layers, _ = case
    if not sum(layers):
        return
    of_chunk = dict(enumerate(layers, start=1))
    delaying = {int(-step) for step in order if step % 1}
    graphed = run_order(order, of_chunk, delaying, True)
    assert_same_bits(graphed, run_order(order, of_chunk, delaying, False))
