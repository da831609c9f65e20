"""chains: consecutive callables are recorded in one graph, and train as they do with a graph each."""

import sys
import weakref
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.chain import Chain, ChainFollower
from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.engine.slot import GraphedSlot

from .captured_cases import Forward, assert_same_bits, copies, device_tensor, keywords, mlp
from .sinks import Buckets, replays

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Owner:
    """Notes when it is called."""

    def __init__(self):
        self.events: list[str] = []

    @contextmanager
    def recording(self, phase):
        assert torch.cuda.is_current_stream_capturing()
        self.events.append(f"{phase} begins")
        yield
        assert torch.cuda.is_current_stream_capturing()
        self.events.append(f"{phase} ends")

    def before_forward(self):
        self.events.append("before forward")

    def before_backward(self):
        self.events.append("before backward")

    def after_backward(self):
        self.events.append("after backward")


def captured(layers, members=(), order=(1, -1), owner=None, **options: Any):
    """The slots of ``layers``, which ``members`` chain together, and their sinks."""
    sinks = [Buckets(layer) for layer in layers]
    samples = [(device_tensor(4, 6, seed=slot),) for slot in range(len(layers) * order.count(1))]
    chains = [Chain(of_chain, owner or Owner()) for of_chain in members]
    arguments: dict[str, Any] = {
        "_order": list(order),
        "_num_layers_per_chunk": [len(layers)],
        "_reuse_graph_input_output_buffers": True,
        "gradient_sinks": sinks,
        "chains": chains,
    }
    return make_graphed_callables(tuple(layers), samples, **arguments | options), sinks


def trained(members, *, order=(1, -1), count=5, graphs=True, steps=3, **options):
    """Outputs and gradients of a training of ``count`` layers, and how many graphs were replayed in its last step."""
    torch.manual_seed(5)
    layers = [mlp() for _ in range(count)]
    microbatches = order.count(1)
    slots, sinks = captured(layers, members, order, **options) if graphs else (layers * microbatches, [])
    numbers, replayed_in_a_step = [], 0
    for step in range(steps):
        inputs: dict[int, torch.Tensor] = {}
        outputs: dict[int, torch.Tensor] = {}
        with replays() as replayed:
            for kind in order:
                if kind > 0:
                    m = len(outputs)
                    inputs[m] = hidden = device_tensor(4, 6, seed=10 * step + m)
                    for call in slots[m * count : (m + 1) * count]:
                        hidden = call(hidden)
                    outputs[m] = hidden
                    numbers += copies([hidden])
                else:
                    m = min(outputs.keys() - {done for done, x in inputs.items() if x.grad is not None})
                    outputs[m].square().sum().backward()
                    grads = [param.grad for layer in layers for param in layer.parameters()]
                    if graphs:
                        assert grads == [None] * len(grads)
                        grads = [grad for sink in sinks for grad in sink.grads]
                    numbers += copies([inputs[m].grad, *grads])
                    for layer in layers:
                        layer.zero_grad()
        replayed_in_a_step = len(replayed)
    return numbers, replayed_in_a_step


# ------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("members", "graphs"),
    [
        ([], 10),
        ([range(5)], 2),
        ([range(2), range(2, 5)], 4),
        ([range(1, 3)], 8),
        ([range(2), range(3, 5)], 6),
        ([[2]], 10),
    ],
    ids=str,
)
def test_a_chain_is_one_graph_and_bit_equal_to_a_graph_each(members, graphs):
    numbers, replayed = trained(members)
    assert replayed == graphs
    assert_same_bits(numbers, trained([], graphs=False)[0])


@pytest.mark.parametrize("order", [(1, 1, -1, -1), (1, -1, 1, -1), (1, 1, -1, 1, -1, -1)], ids=str)
def test_each_micro_batch_has_a_chain_of_its_own(order):
    numbers, replayed = trained([range(1, 4)], order=order)
    assert replayed == 2 * 3 * order.count(1)
    assert_same_bits(numbers, trained([], order=order, graphs=False)[0])


def test_without_shared_memory_a_chain_is_bit_equal_too():
    numbers, replayed = trained([range(5)], _reuse_graph_input_output_buffers=False)
    assert replayed == 2
    assert_same_bits(numbers, trained([], graphs=False)[0])


def test_keyword_inputs_are_those_of_the_first():
    torch.manual_seed(5)
    layers = [Forward(keywords) for _ in range(3)]
    scale, shift = device_tensor(4, 6, seed=1, grad=False), device_tensor(6, seed=2, grad=False)
    static = [{"scale": torch.zeros_like(scale), "shift": torch.zeros_like(shift)} for _ in layers]
    slots, _ = captured(layers, [range(3)], sample_kwargs=static)
    outputs = []
    for calls in (layers, slots):
        hidden = device_tensor(4, 6)
        for call in calls:
            hidden = call(hidden, scale=scale, shift=shift)
        outputs += copies([hidden])
    assert_same_bits(outputs[:1], outputs[1:])


@pytest.fixture
def chained_with_keywords():
    """Two chained callables, and their keyword inputs; the first one's call returns what it hands on."""
    layers = [Forward(keywords) for _ in range(2)]
    given = {"scale": device_tensor(4, 6, seed=1, grad=False), "shift": device_tensor(6, seed=2, grad=False)}
    static = [{name: torch.zeros_like(tensor) for name, tensor in given.items()} for _ in layers]
    slots, _ = captured(layers, [range(2)], sample_kwargs=static)
    yield slots[0](device_tensor(4, 6), **given), slots[1], given
    del layers


def test_another_keyword_input_than_the_first_callables_is_refused(chained_with_keywords):
    between, second, given = chained_with_keywords
    with pytest.raises(
        RuntimeError, match=r"callable 1 .* with callable 0 .*which got another shift\. Set --cuda-graph"
    ):
        second(between, scale=given["scale"], shift=given["shift"].clone())


def test_another_view_of_a_keyword_input_is_no_other(chained_with_keywords):
    between, second, given = chained_with_keywords
    assert second(between, scale=given["scale"], shift=given["shift"].detach()).isfinite().all()


def test_a_keyword_input_that_was_changed_in_between_is_refused(chained_with_keywords):
    between, second, given = chained_with_keywords
    given["shift"].add_(1)
    with pytest.raises(RuntimeError, match="got another shift"):
        second(between, **given)


def test_modules_in_evaluation_mode_are_recorded_one_by_one():
    layers = [mlp().eval() for _ in range(2)]
    slots, _ = captured(layers, [range(2)])
    hidden = device_tensor(4, 6, grad=False)
    expected = layers[1](layers[0](hidden))
    assert slots[0].forward_graph is not slots[1].forward_graph
    assert_same_bits([expected], [slots[1](slots[0](hidden))])


def test_a_callable_that_returns_a_tuple_goes_on_doing_so():
    layers = [Forward(lambda linear, x: (linear(x),)), Forward(lambda linear, x: (linear(x),))]
    slots, _ = captured(layers, [range(2)])
    (between,) = slots[0](device_tensor(4, 6))
    (output,) = slots[1](between)
    assert_same_bits([output], [layers[1](layers[0](device_tensor(4, 6))[0])[0]])


def test_each_callable_returns_what_it_returns_alone():
    def in_a_tuple(linear, x):
        return (linear(x),)

    layers = [Forward(in_a_tuple), mlp(0), Forward(in_a_tuple), mlp(0)]
    slots, _ = captured(layers, [range(2), range(2, 4)])
    first, second, third, fourth = slots
    assert_same_bits(
        [fourth(*third(second(*first(device_tensor(4, 6)))))],
        [layers[3](*layers[2](layers[1](*layers[0](device_tensor(4, 6)))))],
    )


def test_a_callable_may_take_fewer_keyword_inputs_than_the_first():
    torch.manual_seed(5)
    layers = [Forward(keywords), mlp(0.0), Forward(keywords)]
    scale, shift = device_tensor(4, 6, seed=1, grad=False), device_tensor(6, seed=2, grad=False)
    static = {"scale": torch.zeros_like(scale), "shift": torch.zeros_like(shift)}
    slots, _ = captured(layers, [range(3)], sample_kwargs=[static, {}, static])
    given = {"scale": scale, "shift": shift}
    outputs = []
    for first, second, third in (layers, slots):
        outputs += copies([third(second(first(device_tensor(4, 6), **given)), **given)])
    assert_same_bits(outputs[:1], outputs[1:])


def test_only_the_first_callable_replays():
    slots, _ = captured([mlp() for _ in range(3)], [range(3)])
    assert [isinstance(slot, ChainFollower) for slot in slots] == [False, True, True]


def test_what_passes_between_the_callables_is_not_kept():
    recorded, follow = [], GraphedSlot.follow

    def noting(slot, previous, first):
        recorded.append((previous, slot))
        follow(slot, previous, first)

    with mock.patch.object(GraphedSlot, "follow", noting):
        captured([mlp() for _ in range(4)], [range(4)])
    assert len(recorded) == 3
    for _, slot in recorded:
        assert (slot.inputs, slot.grad_inputs) == ((), ())
    for previous, _ in recorded[1:]:
        assert (previous.outputs, previous.grad_outputs) == ((), ())


def test_later_captures_may_use_the_memory_of_what_a_chain_returns():
    slots, _ = captured([mlp() for _ in range(2)], [range(2)])
    (output,) = slots[0].outputs
    assert uses(output) <= 2


def test_later_captures_may_use_the_memory_of_gradients_that_a_chain_has_read():
    slots, _ = captured([mlp() for _ in range(4)], [range(2), range(2, 4)])
    (grad,) = slots[2].grad_inputs
    assert uses(grad) <= 2


def uses(tensor):
    """How many storages share the memory: the CPU backend's pool holds all of it, and whoever keeps it is one more."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


# ---------------------------------------------------------------------------------------------------------- owner


def test_an_owner_is_called_around_recording_and_replays():
    owner = Owner()
    slots, sinks = captured([mlp(), mlp()], [range(2)], owner=owner)
    assert owner.events == ["forward begins", "forward ends", "backward begins", "backward ends"]
    owner.events.clear()
    with replays() as replayed:
        hidden = slots[0](device_tensor(4, 6))
        assert owner.events == ["before forward"]
        hidden = slots[1](hidden)
        hidden.sum().backward()
    assert owner.events == ["before forward", "before backward", "after backward"]
    assert len(replayed) == 2
    assert [sink.events for sink in sinks] == [[], []]


def test_hooks_of_the_callables_run_while_the_chain_is_recorded():
    recorded = []

    def hooks(i):
        def run(module):
            recorded.append((i, torch.cuda.is_current_stream_capturing()))

        return {"forward_pre_hooks": {0: lambda module, args, kwargs: run(module)}, "backward_hooks": {0: run}}

    captured([mlp() for _ in range(3)], [range(3)], num_warmup_iters=1, capture_time_hooks=[hooks(i) for i in range(3)])
    passes = [0, 1, 2, 2, 1, 0]
    assert recorded == [*((i, False) for i in passes), *((i, True) for i in passes)]


# ------------------------------------------------------------------------------------------------------- refusals


def called(slots, calls):
    """Call ``slots``: each with what ``calls`` says was returned by another before, -1 being the input."""
    returned = {-1: device_tensor(4, 6)}
    for index, given in calls:
        returned[index] = slots[index](returned[given])
    return returned


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([(1, -1)], "callable 1 .* with callable 0 .*given another tensor"),
        ([(0, -1), (2, 0)], r"callable 2 .* with callable 1 .*given what callable 0 \(Sequential\) returned"),
        ([(0, -1), (1, 0), (1, 0)], "callable 1 .*The last one that was called is callable 1"),
        ([(0, -1), (1, 0), (1, 1)], "callable 1 .* with callable 0 .*given what callable 1 "),
        ([(0, -1), (1, 0), (2, 1), (2, 1)], "callable 2 .*The last one that was called is callable 2"),
        ([(0, -1), (1, 0), (0, -1), (2, 1)], "callable 2 .*The last one that was called is callable 0"),
        ([(0, -1), (0, 0)], "what callable 0 .* returned is not computed separately"),
        ([(0, -1), (1, 0), (3, 1)], "what callable 1 .* returned is not computed separately"),
        ([(0, -1), (1, -1)], "callable 1 .* with callable 0 .*given another tensor"),
        ([(3, -1), (1, 3)], "callable 1 .* with callable 0 .*given another tensor"),
    ],
)
def test_a_callable_that_is_left_out_or_called_twice_or_in_another_order_is_an_error(calls, message):
    torch.manual_seed(5)
    layers = [mlp(0) for _ in range(4)]
    slots, _ = captured(layers, [range(3)])
    with pytest.raises(RuntimeError, match=message + ".*--cuda-graph-layers-per-graph 1"):
        called(slots, calls)
    in_order = [(i, i - 1) for i in range(4)]  # the next pass is none the worse
    assert_same_bits([called(slots, in_order)[3]], [called(layers, in_order)[3]])


USES = {
    "sum": lambda x: x + 1,
    "copy": lambda x: torch.zeros(4, 6).copy_(x),
    "change in place": lambda x: x.add_(1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "set data": lambda x: setattr(x, "data", torch.ones(1)),
    "slice": lambda x: x[0],
    "item": lambda x: x.sum().item(),
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy(),
    "address": lambda x: x.data_ptr(),
    "hook": lambda x: x.register_hook(print),
    "retain_grad": lambda x: x.retain_grad(),
    "deepcopy": deepcopy,
    "pickle": lambda x: x.__reduce_ex__(2),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("grad", [True, False])
def test_what_passes_between_callables_of_a_chain_cannot_be_used(use, grad):
    slots, _ = captured([mlp(), mlp()], [range(2)])
    between = slots[0](device_tensor(4, 6))
    changes_a_leaf = grad and use is USES["change in place"]  # torch's own error comes first
    with torch.set_grad_enabled(grad):
        with pytest.raises(
            RuntimeError, match="a leaf Variable" if changes_a_leaf else r"callable 0 .* is not computed separately"
        ):
            use(between)
        assert slots[1](between).isfinite().all()


def test_what_passes_between_callables_of_a_chain_says_what_it_stands_for():
    slots, _ = captured([mlp(), mlp()], [range(2)])
    x = device_tensor(4, 6)
    between = slots[0](x)
    assert (between.shape, between.dtype, between.device) == (x.shape, x.dtype, x.device)
    assert between.requires_grad
    assert repr(between) == "Placeholder(output of callable 0 (Sequential), shape=(4, 6), dtype=torch.float32)"
    slots[1](between)
    assert slots[0](x) is between  # it was made at capture


def in_a_list(linear, x):
    return [linear(x)]


def test_a_callable_that_returns_a_list_goes_on_doing_so():
    layers = [Forward(in_a_list) for _ in range(3)]
    slots, _ = captured(layers, [range(3)])
    hidden = device_tensor(4, 6)
    for slot in slots:
        (hidden,) = taken = slot(hidden)
        assert isinstance(taken, list)
        taken.clear()  # the next replay returns another one
    (again,) = slots[2](*slots[1](*slots[0](device_tensor(4, 6))))
    assert_same_bits([again], [hidden])


def test_a_callable_after_the_first_costs_one_call():
    def in_a_tuple(linear, x):
        return (linear(x),)

    layers = [Forward(in_a_tuple) for _ in range(3)]
    slots, _ = captured(layers, [range(3)])
    (hidden,) = slots[0](device_tensor(4, 6))
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    slots[2](*slots[1](hidden))
    sys.setprofile(None)
    assert calls == ["__call__", "__call__", "end", "forget"]


def test_a_chain_holds_its_output_until_its_last_callable_returns_it():
    slots, _ = captured([mlp(), mlp()], [range(2)])
    x = device_tensor(4, 6)
    graph = weakref.ref(slots[1](slots[0](x)).grad_fn)
    assert graph() is None
    between = slots[0](x)
    output = slots[0].handover.output
    assert slots[1](between) is output
    assert slots[0].handover.output is None
    with pytest.raises(RuntimeError, match="given another tensor"):
        slots[1](x if slots[0](x) is between else None)
    assert slots[0].handover.output is None


def two_outputs(linear, x):
    return linear(x), x.sum()


def no_gradient(linear, x):
    return linear(x).detach()


@pytest.mark.parametrize(
    ("first", "kwargs", "message"),
    [
        (lambda: Forward(two_outputs), [{}, {}], ", and returned 2, nor"),
        (mlp, [{}, {"scale": None, "shift": None}], r"takes \[\], not \['scale', 'shift'\]"),
        (lambda: Forward(no_gradient), [{}, {}], "must return one tensor that requires grad"),
    ],
    ids=["two outputs", "other keywords", "no gradient"],
)
def test_callables_that_do_not_follow_each_other_are_refused_at_capture(first, kwargs, message):
    second = Forward(keywords) if kwargs[1] else mlp()
    given = [{name: device_tensor(6, grad=False) for name in of_callable} for of_callable in kwargs]
    with pytest.raises(RuntimeError, match=rf"callable 1 .* cannot be in one graph with callable 0 .*{message}"):
        captured([first(), second], [range(2)], sample_kwargs=given, num_warmup_iters=0)
    assert not torch.cuda.is_current_stream_capturing()


def test_a_chain_refuses_evaluation():
    layers = [mlp(), mlp()]
    slots, _ = captured(layers, [range(2)])
    layers[0].eval()
    with pytest.raises(RuntimeError, match=r"callable 0 .* runs in one graph with the layers after it, and only in"):
        slots[0](device_tensor(4, 6))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("called", [0, 1])
def test_after_reset_a_chain_cannot_be_replayed(which, called):
    slots, _ = captured([mlp(), mlp()], [range(2)])
    hidden = slots[0](device_tensor(4, 6))
    slots[which].reset()
    if which > called:  # the graphs are the first one's
        slots[0](device_tensor(4, 6))
        return
    with pytest.raises(RuntimeError, match=f"graphs of callable {called} .* were reset"):
        slots[called](hidden)
