"""Test graphs of whole forward and backward passes, including the work of their hooks."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.captured import GraphedCallable, GraphOwner, capture_passes
from megatron.core.transformer._cuda_graphs.engine.plan import ordered_plan, unordered_plan

from .captured_cases import assert_same_bits, copies, device_tensor, mlp
from .sinks import replays

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Owner(GraphOwner):
    """A graph owner that records calls of its methods, and whether each pass is captured."""

    def __init__(self):
        self.events: list[str] = []

    @contextmanager
    def running(self, phase):
        captured = " captured" if torch.cuda.is_current_stream_capturing() else ""
        self.events.append(f"{phase}{captured}")
        yield
        self.events.append(f"{phase} ends")

    def before_forward(self):
        self.events.append("before forward")

    def before_backward(self):
        self.events.append("before backward")

    def after_backward(self):
        self.events.append("after backward")

    def before_eager_forward(self):
        self.events.append("before eager forward")

    def forget(self):
        self.events.append("forgotten")


def whole(name, func, module, inputs, owner):
    return GraphedCallable(
        name,
        func,
        (),
        inputs,
        module=module,
        owner=owner,
        holds_hooks=True,
        allow_unused_input=True,
    )


def capture(plan, slots, warmup=1):
    capture_passes(plan, slots, num_warmup_iters=warmup, shares_memory=True)


class Sums:
    """A module whose parameter hooks accumulate gradients in buffers, like Megatron-FSDP's."""

    def __init__(self):
        torch.manual_seed(3)
        self.module = mlp()
        self.sums = {param: torch.zeros_like(param) for param in self.module.parameters()}
        for param in self.module.parameters():
            param.register_post_accumulate_grad_hook(self._add)

    def _add(self, param):
        with torch.no_grad():
            self.sums[param] += param.grad
        param.grad = None

    def losses(self, x, weights):
        return (self.module(x) * weights).sum(-1)

    def zero(self):
        for total in self.sums.values():
            total.zero_()


def inputs(seed):
    return [device_tensor(4, 6, seed=seed).detach(), device_tensor(4, 6, seed=seed + 100).detach()]


def captured(model, owner=None, warmup=2):
    x, weights = inputs(0)
    passes = whole("model", model.losses, model.module, {"x": x, "weights": weights}, owner or Owner())
    capture(unordered_plan(1), [passes], warmup)
    model.zero()
    return passes


def trained(graphs):
    """Train three steps; return losses and accumulated gradients."""
    model = Sums()
    passes = captured(model) if graphs else None
    numbers = []
    for step in range(3):
        given = inputs(step)
        losses = passes.replay(given) if passes is not None else model.losses(*given)
        losses.mean().backward()
        numbers += copies([losses, *model.sums.values()])
    return numbers


def test_replays_with_hooks_and_dropout_are_bit_identical():
    assert_same_bits(trained(True), trained(False))


def test_autocast_that_caches_weights_is_refused():
    with torch.autocast("cpu", cache_enabled=True), pytest.raises(RuntimeError, match="autocast would cache weights"):
        captured(Sums())


def test_owner_surrounds_warm_up_capture_and_replays():
    model, owner = Sums(), Owner()
    passes = captured(model, owner, warmup=1)
    assert owner.events == [
        "forward",
        "forward ends",
        "backward",
        "backward ends",
        "forward captured",
        "forward ends",
        "backward captured",
        "backward ends",
    ]
    owner.events.clear()
    passes.replay(inputs(1)).sum().backward()
    assert owner.events == ["before forward", "before backward", "after backward"]
    passes.reset()
    assert owner.events[-1] == "forgotten"


def test_forward_only_plan_captures_one_graph():
    model, owner = Sums(), Owner()
    model.module.eval()
    x, weights = inputs(0)
    passes = whole("model", model.losses, model.module, {"x": x, "weights": weights}, owner)
    with torch.no_grad():
        capture(unordered_plan(1).forward_only(), [passes])
        assert owner.events == ["forward", "forward ends", "forward captured", "forward ends"]
        assert passes.forward_graph is not None and passes.backward_graph is None
        expected = [model.losses(*inputs(step)) for step in range(2)]
        with replays() as launched:
            replayed = [passes.replay(inputs(step)) for step in range(2)]
    assert_same_bits(replayed, expected)
    assert launched == [passes.forward_graph] * 2
    assert not any(total.any() for total in model.sums.values())


# A virtual pipeline stage with two chunks and three micro-batches, and up to three passes in flight.
ORDER = [1, 1, 2, -2, 2, -1, 1, -2, -1, 2, -2, -1]


def chunk_passes(order, graphs, skipped=()):
    """Run model chunks in a pipeline order; return outputs, input gradients and accumulated gradients.

    If ``graphs``, all micro-batches except those in ``skipped`` replay.
    """
    models = {chunk: Sums() for chunk in (1, 2)}
    functions = {chunk: lambda x, model=model: model.module(x) for chunk, model in models.items()}
    slots: dict[tuple[int, int], GraphedCallable] = {}
    if graphs:
        for chunk in models:
            for number in range(order.count(chunk)):
                x = device_tensor(4, 6, seed=0).detach().requires_grad_()
                name = f"chunk {chunk}, {number}"
                slots[chunk, number] = whole(name, functions[chunk], models[chunk].module, {"x": x}, Owner())
        capture(ordered_plan(order, [1, 1], 2), list(slots.values()))
        for model in models.values():
            model.zero()
    numbers = []
    for round_ in range(2):
        done, running = Counter[int](), {}
        for step in order:
            chunk, number = abs(step), done[step]
            done[step] += 1
            if step > 0:
                x = device_tensor(4, 6, seed=10 * round_ + number).detach().requires_grad_()
                replayed = graphs and number not in skipped
                running[chunk, number] = x, slots[chunk, number].replay([x]) if replayed else functions[chunk](x)
            else:
                x, output = running[chunk, number]
                output.backward(device_tensor(*output.shape, seed=number + 50).detach())
        for x, output in running.values():  # later replays must not overwrite them
            numbers += copies([output, x.grad])
        numbers += copies([total for model in models.values() for total in model.sums.values()])
    return numbers


@pytest.mark.parametrize("skipped", [(), (1,)])
def test_micro_batches_in_flight_are_bit_identical(skipped):
    assert_same_bits(chunk_passes(ORDER, True, skipped), chunk_passes(ORDER, False))
