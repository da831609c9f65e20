"""make_graphed_callables: replays compute what eager runs compute, to the bit."""

import copy
import functools
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.engine.plan import ordered_plan
from megatron.core.transformer._cuda_graphs.te.sample_inputs import sample_arguments

from .captured_cases import (
    CASES,
    Case,
    Forward,
    assert_same_bits,
    copies,
    descend,
    device_tensor,
    frozen_mlp,
    mlp,
    nested_outputs,
    product,
    structure,
    train,
)

pytestmark = pytest.mark.usefixtures("cpu_backend")


def test_the_signature_is_that_of_transformer_engine():
    # transformer_engine.pytorch.make_graphed_callables of TransformerEngine 2.20.2.
    assert list(inspect.signature(make_graphed_callables).parameters) == [
        "modules",
        "sample_args",
        "num_warmup_iters",
        "allow_unused_input",
        "sample_kwargs",
        "fp8_enabled",
        "fp8_calibrating",
        "fp8_recipe",
        "fp8_group",
        "fp8_weight_caching",
        "enabled",
        "calibrating",
        "recipe",
        "amax_reduction_group",
        "cache_quantized_params",
        "_order",
        "_num_layers_per_chunk",
        "pool",
        "retain_graph_in_backward",
        "_reuse_graph_input_output_buffers",
        "clone_param_grads_on_return",
        "pre_warmup_hook",
        "post_warmup_hook",
        "capture_time_hooks",
    ]


# --------------------------------------------------------------------------------------------------- one callable


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_is_bit_equal_to_eager_with(case):
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


@pytest.mark.parametrize(
    "options",
    [
        {"clone_param_grads_on_return": False},
        {"retain_graph_in_backward": True},
        {"num_warmup_iters": 0},
        {"num_warmup_iters": 1},
        {"allow_unused_input": True},
        {"_order": [1, -1]},
    ],
    ids=str,
)
def test_training_is_bit_equal_to_eager_with_option(options):
    def capture(func, args, sample_kwargs):
        if "_order" not in options:
            return make_graphed_callables(func, args, sample_kwargs=sample_kwargs, **options)
        return make_graphed_callables((func,), (args,), sample_kwargs=(sample_kwargs,), **options)[0]

    assert_same_bits(train(CASES["dropout"], capture), train(CASES["dropout"], None))


def test_the_comparison_notices_a_replay_that_does_nothing(monkeypatch):
    expected = train(CASES["dropout"], None)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    with pytest.raises(AssertionError, match="differs"):
        assert_same_bits(train(CASES["dropout"], make_graphed_callables), expected)


def test_replays_run_no_python_of_the_callable():
    calls = []

    def counted(x):
        calls.append(x)
        return x * 2

    graphed = make_graphed_callables(counted, (device_tensor(3),), num_warmup_iters=2)
    assert len(calls) == 3
    for seed in range(3):
        x = device_tensor(3, seed=seed)
        assert torch.equal(graphed(x), x * 2)
    assert len(calls) == 3


def test_outputs_keep_their_structure():
    x = device_tensor(4, 6)
    graphed = make_graphed_callables(Forward(nested_outputs), (x,))
    assert structure(graphed(x)) == {"double": ((4, 6), [()]), "alone": (4, 6)}


def test_outputs_that_need_no_grad_have_none():
    graphed = make_graphed_callables(lambda x: (x * 2, (x * 2).detach(), x.argmax()), (device_tensor(3),))
    assert [output.requires_grad for output in graphed(device_tensor(3))] == [True, False, False]


def test_an_output_that_the_loss_does_not_use_has_zero_gradient():
    graphed = make_graphed_callables(lambda x: (x * 2, x * 3), (device_tensor(3),))
    for _ in range(2):
        x = device_tensor(3)
        sum(graphed(x)).sum().backward()
        assert x.grad.tolist() == [5.0] * 3
        x = device_tensor(3)
        graphed(x)[1].sum().backward()
        assert x.grad.tolist() == [3.0] * 3


def test_a_replay_under_no_grad_needs_no_backward():
    graphed = make_graphed_callables(product, (device_tensor(4, 6), device_tensor(4, 6)))
    x, y = device_tensor(4, 6, seed=5), device_tensor(4, 6, seed=6)
    with torch.no_grad():
        output = graphed(x, y)
    assert not output.requires_grad
    assert torch.equal(output, product(x, y))


def test_warm_up_and_capture_leave_no_gradients():
    module, x = mlp(), device_tensor(4, 6)
    make_graphed_callables(module, (x,))
    assert [tensor.grad for tensor in (x, *module.parameters())] == [None] * 5


# ----------------------------------------------------------------------------------------------- several callables


def train_chain(graphed):
    """Numbers of a training of two modules, one after the other."""
    torch.manual_seed(3)
    modules = mlp(), mlp()
    params = [param for module in modules for param in module.parameters()]
    called = modules
    if graphed:
        called = make_graphed_callables(modules, tuple((device_tensor(4, 6, seed=9),) for _ in modules))
    numbers = []
    for step in range(3):
        x = device_tensor(4, 6, seed=step)
        loss = called[1](called[0](x)).square().sum()
        loss.backward()
        numbers += copies([loss, x.grad, *(param.grad for param in params)])
        descend(params)
    return [*numbers, torch.cuda.get_rng_state()]


def test_a_tuple_of_modules_trains_bit_equal_to_eager():
    assert_same_bits(train_chain(graphed=True), train_chain(graphed=False))


def test_a_tuple_of_modules_gives_the_modules_themselves():
    modules = mlp(), mlp()
    graphed = make_graphed_callables(modules, ((device_tensor(4, 6),), (device_tensor(4, 6),)))
    assert len(graphed) == 2
    assert all(one is other for one, other in zip(graphed, modules, strict=True))


def test_a_module_alone_gives_itself():
    module = mlp()
    assert make_graphed_callables(module, (device_tensor(4, 6),)) is module


INTERLEAVED, ONE_BY_ONE = [1, 2, 1, 2, -2, -1, -2, -1], [1, 2, -2, -1, 1, 2, -2, -1]


def train_pipeline(order, graphed, **options):
    """Numbers of a training of two chunks, of two layers and of one, with two micro-batches a step."""
    torch.manual_seed(3)
    layers = mlp(), mlp(), mlp()
    params = [param for layer in layers for param in layer.parameters()]
    chunks = {(c, m): layers[:2] if c == 1 else layers[2:] for c in (1, 2) for m in range(2)}
    if graphed:
        plan = ordered_plan(order, [2, 1], 3)
        samples = sample_arguments(plan, lambda index: ((device_tensor(4, 6, seed=9),), {}))
        slots = make_graphed_callables(
            layers, [args for args, _ in samples], _order=order, _num_layers_per_chunk=[2, 1], **options
        )
        chunks = {(1, 0): slots[0:2], (1, 1): slots[2:4], (2, 0): slots[4:5], (2, 1): slots[5:6]}
    numbers = []
    for step in range(3):
        count = dict.fromkeys(order, 0)
        inputs = [device_tensor(4, 6, seed=10 * step + m) for m in range(2)]
        hidden, losses = list(inputs), {}
        for chunk in order:
            microbatch = count[chunk]
            count[chunk] += 1
            if chunk > 0:
                for layer in chunks[chunk, microbatch]:
                    hidden[microbatch] = layer(hidden[microbatch])
                if chunk == 2:
                    losses[microbatch] = hidden[microbatch].square().sum()
            elif chunk == -2:  # autograd goes on through the other chunk
                losses[microbatch].backward()
                numbers += copies([losses[microbatch], inputs[microbatch].grad])
        numbers += copies([param.grad for param in params])
        descend(params)
    return [*numbers, torch.cuda.get_rng_state()]


@pytest.mark.parametrize("order", [INTERLEAVED, ONE_BY_ONE], ids=["interleaved", "one by one"])
@pytest.mark.parametrize("reuse", [False, True], ids=["own gradients", "shared gradients"])
def test_chunks_and_microbatches_train_bit_equal_to_eager(order, reuse):
    graphed = train_pipeline(order, True, _reuse_graph_input_output_buffers=reuse)
    assert_same_bits(graphed, train_pipeline(order, False))


def test_shared_gradients_are_one_set_for_outputs_that_are_alike():
    layers = mlp(), mlp(), Forward(lambda linear, x: linear(x)[:2])
    slots = make_graphed_callables(
        layers,
        tuple((device_tensor(4, 6),) for _ in layers),
        _order=[1, -1],
        _reuse_graph_input_output_buffers=True,
    )
    addresses = [slot._grad_outputs[0].data_ptr() for slot in slots]
    assert addresses[0] == addresses[1] != addresses[2]


def test_outputs_have_static_gradients_of_their_own_unless_they_are_to_share():
    slots = make_graphed_callables((mlp(), mlp()), ((device_tensor(4, 6),), (device_tensor(4, 6),)), _order=[1, -1])
    assert slots[0]._grad_outputs[0].data_ptr() != slots[1]._grad_outputs[0].data_ptr()


# ------------------------------------------------------------------------------------------------- returned memory


def gradients(graphed, params, seed):
    return torch.autograd.grad(graphed(device_tensor(4, 6, seed=seed)).square().sum(), params)


def test_parameter_gradients_survive_the_next_replay():
    module = mlp(dropout=0.0)
    graphed = make_graphed_callables(module, (device_tensor(4, 6),))
    first = gradients(graphed, list(module.parameters()), 1)
    kept = copies(first)
    gradients(graphed, list(module.parameters()), 2)
    assert_same_bits(list(first), kept)


def test_without_clones_the_next_replay_overwrites_parameter_gradients():
    module = mlp(dropout=0.0)
    graphed = make_graphed_callables(module, (device_tensor(4, 6),), clone_param_grads_on_return=False)
    first = gradients(graphed, list(module.parameters()), 1)
    second = gradients(graphed, list(module.parameters()), 2)
    assert [grad.data_ptr() for grad in first] == [grad.data_ptr() for grad in second]
    assert_same_bits(list(first), list(second))


def test_the_next_replay_overwrites_outputs_and_gradients_of_inputs():
    graphed = make_graphed_callables(lambda x: x * x, (device_tensor(3),))
    results = []
    for value in (2.0, 3.0):
        x = torch.full((3,), value, device="cuda", requires_grad=True) * 1  # the gradient of a leaf is copied
        output = graphed(x)
        results.append((output, *torch.autograd.grad(output.sum(), x)))
    assert [[tensor[0].item() for tensor in result] for result in results] == [[9.0, 6.0], [9.0, 6.0]]


def test_gradients_of_leaf_inputs_accumulate_over_replays():
    graphed = make_graphed_callables(lambda x: x * x, (device_tensor(3),))
    x = torch.full((3,), 2.0, device="cuda", requires_grad=True)
    for _ in range(3):
        graphed(x).sum().backward()
    assert x.grad.tolist() == [12.0] * 3


def test_grad_of_a_leaf_input_survives_a_replay_on_another():
    graphed = make_graphed_callables(lambda x: x * x, (device_tensor(3),))
    first, second = (torch.full((3,), value, device="cuda", requires_grad=True) for value in (2.0, 3.0))
    for x in (first, second):
        graphed(x).sum().backward()
    assert (first.grad.tolist(), second.grad.tolist()) == ([4.0] * 3, [6.0] * 3)


def test_a_backward_pass_whose_activations_were_overwritten_is_refused():
    graphed = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    first, second = (graphed(device_tensor(4, 6, seed=seed)).sum() for seed in range(2))
    second.backward()
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\): backward of a replay whose activations"):
        first.backward()


def test_a_module_that_is_used_twice_in_a_pass_is_refused_in_backward():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    with pytest.raises(RuntimeError, match="A graph serves one forward pass at a time"):
        module(module(device_tensor(4, 6))).sum().backward()


def test_forward_passes_without_backward_leave_the_next_step_alone():
    module = make_graphed_callables(mlp(dropout=0), (device_tensor(4, 6),))
    x = device_tensor(4, 6, seed=3)
    expected = torch.autograd.grad(module(x).sum(), x)
    module(device_tensor(4, 6, seed=4))
    with torch.no_grad():
        module(device_tensor(4, 6, seed=5))
    assert_same_bits(list(torch.autograd.grad(module(x).sum(), x)), list(expected))


def test_a_backward_pass_that_retains_its_graph_can_run_again():
    graphed = make_graphed_callables(lambda x: x * x, (device_tensor(3),))
    x = torch.full((3,), 2.0, device="cuda", requires_grad=True)
    loss = graphed(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad.tolist() == [8.0] * 3


def test_a_hook_of_an_unused_parameter_does_not_run_at_replay():
    case = CASES["an unused parameter"]
    module: Any = case.make()
    called: list[str] = []
    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: called.append(name))
    graphed = make_graphed_callables(module, case.args(0))
    assert called == []
    graphed(*case.args(1)).sum().backward()
    assert sorted(called) == ["used.bias", "used.weight"]
    assert len(graphed.forward.params) == 2


def test_a_hook_of_a_parameter_runs_on_the_gradient_that_a_replay_returns():
    def hooked() -> torch.nn.Module:
        module = mlp()
        for param in module.parameters():
            param.register_hook(lambda grad: grad * 3)
        return module

    case = Case(hooked)
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


class _Late(torch.nn.Module):
    """Uses its second layer from the second call on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6).cuda(), torch.nn.Linear(6, 6).cuda()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.first(x) if self.calls == 1 else self.second(self.first(x))


def test_a_parameter_that_warm_up_uses_late_gets_its_gradient():
    module = make_graphed_callables(_Late(), (device_tensor(4, 6),))
    module(device_tensor(4, 6)).sum().backward()
    assert all(param.grad is not None for param in module.parameters())


# ------------------------------------------------------------------------------------------------- how to replay


def test_a_tensor_at_the_static_address_is_copied_if_its_strides_differ():
    graphed = make_graphed_callables(lambda x: (x * 2, x), (device_tensor(4, 4, grad=False),))
    _, static = graphed(device_tensor(4, 4, seed=1, grad=False))
    expected = static.t().clone() * 2
    assert torch.equal(graphed(static.t())[0], expected)


def test_a_conjugate_of_the_static_input_is_copied():
    x = torch.full((2,), 2 + 4j, device="cuda")
    graphed = make_graphed_callables(lambda x: (x * 1, x), (x.clone(),))
    _, static = graphed(x)
    assert torch.equal(graphed(static.conj())[0], x.conj())


def test_a_gradient_at_the_static_address_is_copied_if_its_strides_differ():
    graphed = make_graphed_callables(Forward(lambda linear, x: x + linear.bias[:4]), (device_tensor(4, 4),))
    x, grad = device_tensor(4, 4), device_tensor(4, 4, seed=2, grad=False)
    (static,) = torch.autograd.grad(graphed(x), x, grad)  # what its backward pass hands on
    (transposed,) = torch.autograd.grad(graphed(x), x, static.t())
    assert torch.equal(transposed, grad.t())


def test_a_tensor_that_capture_is_given_twice_may_be_two_in_a_replay():
    x, a, b = (device_tensor(3, seed=seed) for seed in range(3))
    graphed = make_graphed_callables(lambda x, *, y: 2 * x + 3 * y, (x,), sample_kwargs={"y": x})
    output = graphed(a, y=b)
    assert torch.equal(output, 2 * a + 3 * b)
    output.sum().backward()
    assert (a.grad[0], b.grad[0]) == (2, 3)


def test_sample_inputs_that_share_memory_may_be_apart_in_a_replay():
    x, a, b = device_tensor(3, 4), device_tensor(4, seed=1), device_tensor(4, seed=2, grad=False)
    graphed = make_graphed_callables(lambda x, y: 2 * x - y, (x[0], x.detach()[0]))
    assert torch.equal(graphed(a, b), 2 * a - b)


def gated(linear, x):
    return linear(x) * x


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (2, {}),
        (2, {"_order": [1, -1]}),
        (2, {"_order": [1, -1], "_reuse_graph_input_output_buffers": True}),
        (1, {"_order": [1, 1, -1, -1]}),
        (1, {"_order": [1, 1, -1, -1], "_reuse_graph_input_output_buffers": True}),
    ],
    ids=["unordered", "layers", "layers that share", "micro-batches", "micro-batches that share"],
)
def test_one_sample_input_for_several_callables_is_no_input_in_common(layers, options):
    x, modules = device_tensor(4, 6), tuple(Forward(gated) for _ in range(layers))
    calls = [copy.deepcopy(modules[index % layers]) for index in range(2)]
    backwards = [1, 0] if layers == 2 else [0, 1]  # as in capture
    graphed = make_graphed_callables(modules, ((x,), (x,)), **options)
    assert_same_bits(run_two(graphed, backwards), run_two(calls, backwards))


def run_two(calls, backwards) -> list:
    """Outputs and gradients of two calls on inputs of their own; ``backwards`` is the order of backward passes."""
    inputs = [device_tensor(4, 6, seed=seed) for seed in (1, 2)]
    outputs = [call(x) for call, x in zip(calls, inputs, strict=True)]
    numbers = copies(outputs)
    for index in backwards:
        outputs[index].sum().backward()
    return numbers + copies([x.grad for x in inputs])


def test_inputs_without_grad_stay_shared_by_callables():
    modules = tuple(Forward(lambda linear, x, mask: linear(x) * mask) for _ in range(2))
    mask = device_tensor(4, 6, grad=False)
    slots = make_graphed_callables(modules, [(device_tensor(4, 6), mask) for _ in modules], _order=[1, -1])
    assert [slot.inputs[1] is mask for slot in slots] == [True, True]


def test_a_module_in_the_other_mode_runs_eagerly():
    module, x = mlp(dropout=0.5), device_tensor(4, 6)
    expected = module.eval()(x).detach().clone()
    graphed = make_graphed_callables(module.train(), (device_tensor(4, 6, seed=1),))
    assert torch.equal(graphed.eval()(x), expected)
    assert not torch.equal(graphed.train()(x), expected)


def test_modules_captured_in_evaluation_mode_hold_nothing_for_a_backward_pass():
    (slot,) = make_graphed_callables((mlp().eval(),), ((device_tensor(4, 6),),), _order=[1, -1])
    assert [output.grad_fn for output in slot._outputs] == [None]


def test_modules_captured_in_evaluation_mode_have_no_backward():
    module, x = mlp().eval(), device_tensor(4, 6)
    expected = module(x).detach().clone()
    output = make_graphed_callables(module, (device_tensor(4, 6, seed=1),))(x)
    assert torch.equal(output, expected)
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\) has no backward graph"):
        output.sum().backward()


@pytest.mark.parametrize("with_event", [False, True])
def test_a_replay_runs_on_the_stream_it_is_given(monkeypatch, with_event):
    graphed = make_graphed_callables(lambda x: x * 2, (device_tensor(3),))
    stream, outer = torch.cuda.Stream(), torch.cuda.current_stream()
    event = torch.cuda.Event() if with_event else None
    used = []
    replay = torch.cuda.CUDAGraph.replay

    def recorded(graph):
        used.append(torch.cuda.current_stream())
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", recorded)
    if event is not None:
        event.record(stream)
    x = device_tensor(3, seed=4)
    output = graphed(x, cuda_graph_stream=stream, cuda_graph_event=event)
    output.sum().backward()
    assert used == [stream, stream]
    assert torch.cuda.current_stream() == outer
    assert torch.equal(output, x * 2)


def test_keywords_that_were_not_captured_are_ignored():
    graphed = make_graphed_callables(lambda x: x * 2, (device_tensor(3),))
    assert torch.equal(graphed(device_tensor(3), is_first_microbatch=True), device_tensor(3) * 2)


# ------------------------------------------------------------------------------------------- errors of a replay


@pytest.fixture
def with_keywords():
    case = CASES["keywords"]
    return make_graphed_callables(case.make(), case.args(0), sample_kwargs=case.kwargs(0)), case


def test_a_missing_keyword_is_named(with_keywords):
    graphed, case = with_keywords
    with pytest.raises(TypeError, match=r"callable 0 \(Forward\) was captured with the keyword 'scale'"):
        graphed(*case.args(1), shift=case.kwargs(1)["shift"])


def test_another_number_of_tensors_is_refused(with_keywords):
    graphed, case = with_keywords
    with pytest.raises(TypeError, match="captured with 3 tensors, this call gives 4"):
        graphed(*case.args(1), device_tensor(1), **case.kwargs(1))


def test_an_input_that_is_no_tensor_is_refused(with_keywords):
    graphed, case = with_keywords
    with pytest.raises(TypeError, match=r"callable 0 \(Forward\): input 0 must be a tensor .* got None"):
        graphed(None, **case.kwargs(1))


@pytest.mark.parametrize(
    "other", [lambda: device_tensor(3, 6), lambda: device_tensor(4, 6).double()], ids=["shape", "dtype"]
)
def test_an_input_unlike_the_captured_one_is_refused(with_keywords, other):
    graphed, case = with_keywords
    with pytest.raises(ValueError, match=r"callable 0 \(Forward\) was captured with input 0 of \(4, 6\) torch.float32"):
        graphed(other(), **case.kwargs(1))


def test_an_input_that_requires_grad_and_did_not_at_capture_is_refused():
    graphed = make_graphed_callables(product, (device_tensor(4, 6), device_tensor(4, 6, grad=False)))
    x, y = device_tensor(4, 6), device_tensor(4, 6)
    with pytest.raises(ValueError, match=r"callable 0 \(product\) was captured with input 1 that requires no grad"):
        graphed(x, y)
    with torch.no_grad():
        assert torch.equal(graphed(x, y), product(x, y))


def test_a_parameter_that_was_replaced_since_capture_is_refused_by_name():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    module[0].weight = torch.nn.Parameter(torch.zeros_like(module[0].weight))
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\): parameter weight of .* was replaced"):
        module(device_tensor(4, 6))


def test_a_parameter_that_was_unfrozen_since_capture_is_refused():
    module = make_graphed_callables(frozen_mlp(), (device_tensor(4, 6),))
    module[0].weight.requires_grad_()
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(8, 6\) required no grad at capture and does now"):
        module(device_tensor(4, 6))
    with torch.no_grad():
        module(device_tensor(4, 6))


def test_a_parameter_that_was_frozen_since_capture_gets_no_gradient():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    module[0].weight.requires_grad_(False)
    module(device_tensor(4, 6)).sum().backward()
    assert [param.grad is None for param in module.parameters()] == [True, False, False, False]


# ------------------------------------------------------------------------------------- functions of a module, copies


@pytest.mark.parametrize(
    "function_of",
    [
        lambda module: module.forward,
        lambda module: functools.partial(module),
        lambda module: functools.partial(module.forward),
        lambda module: functools.partial(lambda module, x: module(x), module),
    ],
    ids=["a bound method", "a partial of a module", "a partial of a method", "a partial over a module"],
)
def test_parameters_of_the_module_of_a_function_get_gradients(function_of):
    module, x = mlp(dropout=0), device_tensor(4, 6)
    function_of(module)(x).sum().backward()
    expected = copies([param.grad for param in module.parameters()])
    module.zero_grad()
    make_graphed_callables(function_of(module), (device_tensor(4, 6, seed=1),))(x).sum().backward()
    assert_same_bits(copies([param.grad for param in module.parameters()]), expected)


def test_a_deep_copy_of_a_graphed_module_runs_eagerly_on_its_own_parameters():
    module = make_graphed_callables(mlp(dropout=0), (device_tensor(4, 6),))
    copied, x = copy.deepcopy(module), device_tensor(4, 6, seed=2)
    expected = copies([module(x)])
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    assert_same_bits(copies([copied(x)]), expected)
    assert not {"forward", "reset", "__deepcopy__"} & vars(copied).keys()
    assert not module(x).any()  # the graphs are still there


def test_a_deep_copy_of_a_model_with_a_graphed_module_can_be_captured():
    model = torch.nn.Sequential(make_graphed_callables(mlp(dropout=0), (device_tensor(4, 6),)))
    copied, x = copy.deepcopy(model), device_tensor(4, 6, seed=2)
    expected = copies([copied(x)])
    assert_same_bits(copies([make_graphed_callables(copied, (device_tensor(4, 6),))(x)]), expected)


def test_graphs_themselves_cannot_be_copied():
    (slot,) = make_graphed_callables((mlp(),), ((device_tensor(4, 6),),), _order=[1, -1])
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\): CUDA graphs cannot be copied"):
        copy.deepcopy(slot)


def test_a_module_that_is_there_twice_with_an_order_has_a_graph_for_each():
    module = mlp(dropout=0)

    def gradients(first, second):
        x = device_tensor(4, 6, seed=2)
        second(first(x)).sum().backward()
        found = copies([x.grad, *(param.grad for param in module.parameters())])
        module.zero_grad()
        return found

    samples = tuple((device_tensor(4, 6),) for _ in range(2))
    slots = make_graphed_callables((module, module), samples, _order=[1, -1])
    assert_same_bits(gradients(*slots), gradients(module, module))


def test_a_sample_input_may_be_expanded():
    x = device_tensor(1, 6, seed=4).detach().expand(4, 6).requires_grad_()
    graphed = make_graphed_callables(lambda x: x * 2, (x,))
    given = device_tensor(4, 6)
    assert torch.equal(graphed(given), given * 2)


def test_an_output_may_be_transposed():
    case = Case(lambda: Forward(lambda linear, x: linear(x).t()))
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


# ---------------------------------------------------------------------------------------------------------- reset


def test_a_function_that_was_reset_refuses_to_replay():
    graphed = make_graphed_callables(product, (device_tensor(4, 6), device_tensor(4, 6)))
    graphed.reset()
    with pytest.raises(RuntimeError, match=r"graphs of callable 0 \(product\) were reset"):
        graphed(device_tensor(4, 6), device_tensor(4, 6))


def test_a_module_that_was_reset_refuses_to_replay():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    module.reset()
    with pytest.raises(RuntimeError, match="were reset; capture them again"):
        module(device_tensor(4, 6))


def test_a_backward_pass_after_reset_is_refused():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    output = module(device_tensor(4, 6))
    module.reset()
    with pytest.raises(RuntimeError, match="has no backward graph"):
        output.sum().backward()


def test_a_module_that_was_reset_can_be_captured_again():
    def capture_twice(func, args, sample_kwargs):
        make_graphed_callables(func, args).reset()
        return make_graphed_callables(func, args)

    assert_same_bits(train(CASES["dropout"], capture_twice), train(CASES["dropout"], None))


def test_methods_that_were_set_on_a_module_are_there_again_at_the_next_capture():
    module = mlp(dropout=0)
    own = type(module).forward
    module.forward = lambda x: 3 * own(module, x)
    module.reset = lambda: "its own"
    expected = module(device_tensor(4, 6))
    for _ in range(2):
        graphed = make_graphed_callables(module, (device_tensor(4, 6, seed=1),))
        assert torch.equal(graphed(device_tensor(4, 6)), expected)
        graphed.reset()
    with pytest.raises(ZeroDivisionError):
        make_graphed_callables(module, (device_tensor(4, 6),), pre_warmup_hook=lambda: 1 / 0)
    assert module.reset() == "its own"
    assert torch.equal(module(device_tensor(4, 6)), expected)


def test_a_capture_that_is_refused_leaves_a_module_that_was_reset_as_it_was():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    module.reset()
    before = dict(vars(module))
    with pytest.raises(ValueError, match="_order"):
        make_graphed_callables((module,), ((device_tensor(4, 6),),), _order=[2])
    assert vars(module) == before


def test_reset_lets_go_of_hooks():
    def hook(module, resource):
        assert resource

    resource = torch.ones(1)
    held = StorageWeakRef(resource.untyped_storage())
    (slot,) = make_graphed_callables(
        (mlp(),),
        ((device_tensor(4, 6),),),
        _order=[1, -1],
        capture_time_hooks=[{"backward_hooks": {0: functools.partial(hook, resource=resource)}}],
    )
    slot.reset()
    del resource
    assert held.expired()


def test_a_module_with_graphs_is_not_captured_again():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\) has graphs already: call its reset\(\)"):
        make_graphed_callables(module, (device_tensor(4, 6),))


def test_reset_frees_the_static_tensors():
    x = device_tensor(4, 6)
    module = make_graphed_callables(mlp(), (x,))
    freed = weakref.ref(x)
    output = weakref.ref(module.forward._outputs[0])
    module.reset()
    del x
    gc.collect()
    assert (freed(), output()) == (None, None)


@pytest.fixture
def resets(monkeypatch):
    """The CUDA graphs that were reset."""
    graphs: list[torch.cuda.CUDAGraph] = []
    reset = torch.cuda.CUDAGraph.reset

    def recorded(graph):
        graphs.append(graph)
        reset(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "reset", recorded)
    return graphs


def test_reset_frees_both_graphs(resets):
    graphed = make_graphed_callables(lambda x: x * 2, (device_tensor(3),))
    graphs = [graphed.forward_graph, graphed.backward_graph]
    graphed.reset()
    assert resets == graphs


def test_a_failed_capture_frees_the_graphs_that_it_had_made(resets):
    def fails_in_capture(x):
        assert not torch.cuda.is_current_stream_capturing(), "capture failed"
        return x * 2

    modules = mlp(), fails_in_capture
    with pytest.raises(AssertionError, match="capture failed"):
        make_graphed_callables(modules, ((device_tensor(4, 6),), (device_tensor(3),)))
    assert len(resets) == 1


def test_one_microbatch_can_be_reset_without_the_others():
    slots = make_graphed_callables(
        (mlp(dropout=0.0),), tuple((device_tensor(4, 6),) for _ in range(2)), _order=[1, 1, -1, -1]
    )
    slots[0].reset()
    expected = slots[1].eager(device_tensor(4, 6, seed=2))
    assert torch.equal(slots[1](device_tensor(4, 6, seed=2)), expected)


# ----------------------------------------------------------------------------------------------- other precisions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_training_is_bit_equal_in(dtype):
    def inputs(seed):
        return (device_tensor(4, 6, seed=seed).detach().to(dtype).requires_grad_(),)

    case = Case(lambda: mlp().to(dtype), inputs)
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


# ------------------------------------------------------------------------------------------ recomputed activations


class _Checkpointed(torch.nn.Module):
    """Computes one layer again in its backward pass, with its parameters inside or outside of that too."""

    def __init__(self, also_outside: bool):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6).cuda()
        self.also_outside = also_outside

    def forward(self, x):
        y = checkpoint(self.inner, x, use_reentrant=True, preserve_rng_state=False)
        return y * self.inner.bias if self.also_outside else y


@pytest.mark.parametrize("also_outside", [False, True], ids=["recomputed", "recomputed and used outside"])
def test_gradients_that_a_backward_pass_inside_accumulates_are_bit_equal_to_eager(also_outside):
    case = Case(lambda: _Checkpointed(also_outside))
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


def test_gradients_that_were_there_before_capture_stay_and_are_no_part_of_what_is_captured():
    module = _Checkpointed(False)
    params = list(module.parameters())
    module(device_tensor(4, 6)).square().sum().backward()
    expected = copies([param.grad for param in params])
    kept = [param.grad for param in params]
    graphed = make_graphed_callables(module, (device_tensor(4, 6),))
    assert all(param.grad is grad for param, grad in zip(params, kept, strict=True))
    assert_same_bits(kept, expected)
    for param in params:
        param.grad = None
    graphed(device_tensor(4, 6)).square().sum().backward()
    assert_same_bits([param.grad for param in params], expected)


def test_checkpoints_outside_of_captures_are_refused_in_grad_as_ever():
    make_graphed_callables(_Checkpointed(False), (device_tensor(4, 6),))
    x = device_tensor(4, 6)
    with pytest.raises(RuntimeError, match=r"\.grad\(\)"):
        torch.autograd.grad(_Checkpointed(False)(x).sum(), x)


# ------------------------------------------------------------------------------------------------- second derivatives


def test_first_derivatives_may_be_taken_with_create_graph():
    x = device_tensor(4, 6)
    expected = torch.autograd.grad(product(x, x).square().sum(), x, create_graph=True)
    graphed = make_graphed_callables(product, (device_tensor(4, 6), device_tensor(4, 6)))
    assert_same_bits(list(torch.autograd.grad(graphed(x, x).square().sum(), x, create_graph=True)), list(expected))


@pytest.mark.parametrize("loss", [lambda y: y.square().sum(), lambda y: y.sum()], ids=["of squares", "of values"])
def test_second_derivatives_are_refused(loss):
    graphed = make_graphed_callables(lambda x: x * x * x, (device_tensor(3),))
    x = device_tensor(3)
    (grad,) = torch.autograd.grad(loss(graphed(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"callable 0 .* compute first derivatives only"):
        grad.sum().backward()


def test_second_derivatives_of_parameters_are_refused():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    grads = torch.autograd.grad(module(device_tensor(4, 6)).sum(), list(module.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="compute first derivatives only"):
        sum(grad.sum() for grad in grads).backward()


def test_transforms_of_torch_func_are_refused():
    graphed = make_graphed_callables(lambda x: x * x, (device_tensor(3),))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: graphed(x).sum())(device_tensor(3, grad=False))
