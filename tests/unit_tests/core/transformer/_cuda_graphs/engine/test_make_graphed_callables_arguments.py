"""make_graphed_callables: what it refuses to capture, and how it says so."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import Forward, device_tensor, mlp

pytestmark = pytest.mark.usefixtures("cpu_backend")


def double(x):
    return x * 2


def capture(func=double, args=None, **options):
    return make_graphed_callables(func, (device_tensor(3),) if args is None else args, **options)


# ---------------------------------------------------------------------------------------------------- not tensors


@pytest.mark.parametrize("value", [None, 2, "text", [1.0]], ids=str)
def test_a_keyword_that_is_no_tensor_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"sample_kwargs of callable 0 \(double\): 'mask' holds .*not a tensor"):
        capture(sample_kwargs={"mask": value})


def test_a_positional_input_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"sample_args of callable 0 \(double\) hold None, which is not a tensor"):
        capture(args=(device_tensor(3), None))


def test_an_output_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"callable 0 \(<lambda>\) returned 3, which is neither a tensor nor None"):
        capture(lambda x: (x * 2, 3))


# --------------------------------------------------------------------------------------------------- quantization


@pytest.mark.parametrize(
    "arguments",
    [
        {"enabled": False, "calibrating": False, "cache_quantized_params": None},
        {"enabled": (False,)},
        {"enabled": [False]},
        {"recipe": "recipe", "amax_reduction_group": "group", "cache_quantized_params": True},
    ],
    ids=["off", "off for every callable", "a list", "how, but not that"],
)
def test_arguments_that_do_not_ask_for_quantization_are_accepted(arguments):
    assert torch.equal(capture(**arguments)(device_tensor(3)), device_tensor(3) * 2)


# -------------------------------------------------------------------------------------------------- numbers of inputs


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_sample_args_than_callables_is_refused(count):
    with pytest.raises(ValueError, match=f"sample_args must have 2 entries, got {count}"):
        capture((double, double), tuple((device_tensor(3),) for _ in range(count)))


def test_another_number_of_sample_args_than_slots_is_refused():
    with pytest.raises(ValueError, match="sample_args must have 4 entries, got 2"):
        capture((double, double), ((device_tensor(3),), (device_tensor(3),)), _order=[1, 1, -1, -1])


def test_another_number_of_sample_kwargs_is_refused():
    with pytest.raises(ValueError, match="sample_kwargs must have 2 entries, got 1"):
        capture((double, double), ((device_tensor(3),), (device_tensor(3),)), sample_kwargs=[{}])


def test_an_order_that_contradicts_the_callables_is_refused():
    with pytest.raises(ValueError, match="_num_layers_per_chunk is"):
        capture((double,), ((device_tensor(3),),), _order=[1, -1], _num_layers_per_chunk=[2])


def test_shared_gradients_need_an_order():
    with pytest.raises(ValueError, match="_reuse_graph_input_output_buffers needs _order"):
        capture(_reuse_graph_input_output_buffers=True)


def test_a_negative_number_of_warm_up_iterations_is_refused():
    with pytest.raises(ValueError, match="num_warmup_iters must not be negative, got -1"):
        capture(num_warmup_iters=-1)


@pytest.mark.parametrize("modules", [[double], "double"], ids=["a list", "a string"])
def test_what_is_neither_callable_nor_a_tuple_is_refused(modules):
    with pytest.raises(TypeError, match=f"a tuple of callables, got {type(modules).__name__}"):
        capture(modules)


def test_a_module_that_is_there_twice_is_refused():
    module = torch.nn.Linear(3, 3).cuda()
    inputs = tuple((device_tensor(2, 3),) for _ in range(3))
    with pytest.raises(ValueError, match=r"callable 2 \(Linear\) is callable 0 too.*with _order"):
        capture((module, torch.nn.Linear(3, 3).cuda(), module), inputs)


def test_a_module_that_contains_a_graphed_one_is_refused_by_name():
    parent = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).cuda()
    capture(parent[1], (device_tensor(2, 3),))
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\) contains 1, which has graphs already"):
        capture(parent, (device_tensor(2, 3),))
    parent[1].reset()


# --------------------------------------------------------------------------------------------------- unused inputs


def uses_the_first(x, y):
    return x * 2


def test_an_input_that_gets_no_gradient_is_refused_by_its_place():
    with pytest.raises(RuntimeError, match=r"callable 0 \(uses_the_first\) does not use input 1 .*allow_unused_input"):
        capture(uses_the_first, (device_tensor(3), device_tensor(3)))


def test_an_unused_input_gets_none_where_it_is_allowed():
    graphed = capture(uses_the_first, (device_tensor(3), device_tensor(3)), allow_unused_input=True)
    x, y = device_tensor(3), device_tensor(3)
    graphed(x, y).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert y.grad is None


# ------------------------------------------------------------------------------------------------------- modules


def test_modules_in_different_modes_are_refused():
    with pytest.raises(RuntimeError, match="all in training or all in evaluation mode"):
        capture((mlp(), mlp().eval()), ((device_tensor(4, 6),), (device_tensor(4, 6),)))


def test_a_buffer_that_requires_grad_is_refused():
    module = mlp()
    module.register_buffer("scale", device_tensor(1))
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\) has a buffer that requires grad"):
        capture(module, (device_tensor(4, 6),))


def test_autocast_that_caches_weights_is_refused():
    with (
        torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=True),
        pytest.raises(RuntimeError, match=r"needs torch\.autocast\(\.\.\., cache_enabled=False\)"),
    ):
        capture()


# ------------------------------------------------------------------------------------------------------ other nesting


def test_sample_kwargs_of_several_callables_must_be_several():
    with pytest.raises(TypeError, match="sample_kwargs must hold a dict for each entry of sample_args"):
        capture((double, double), ((device_tensor(3),), (device_tensor(3),)), sample_kwargs={"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (lambda a, b: {"b": b, "a": a}, "{'b': 0, 'a': 1}"),
        (lambda a, b: [a, b], "[0, 1]"),
        (lambda a, b: {"a": [a], "b": b}, "{'a': [0], 'b': 1}"),
    ],
    ids=["another order of keys", "a list", "one level more"],
)
def test_inputs_that_are_nested_otherwise_are_refused(other, shown):
    a, b = device_tensor(3, seed=1), device_tensor(3, seed=2)
    graphed = capture(lambda pair: pair["a"] - pair["b"], ({"a": a, "b": b},))
    assert torch.equal(graphed({"a": b, "b": a}), b - a)
    with pytest.raises(TypeError) as error:
        graphed(other(a, b))
    assert str(error.value) == (
        f"callable 0 (<lambda>) was captured with inputs nested as ({{'a': 0, 'b': 1}},), this call gives ({shown},)"
    )


# ------------------------------------------------------------------------------------------- what cannot be captured


@pytest.mark.parametrize("grad", [True, False], ids=["beside an input", "alone"])
def test_a_function_over_a_parameter_outside_is_refused(grad):
    linear = torch.nn.Linear(3, 3, bias=False).cuda()
    with pytest.raises(RuntimeError, match=r"callable 0 \(<lambda>\) uses a tensor of shape \(3, 3\)"):
        capture(lambda x: linear(x) * x, (device_tensor(2, 3, grad=grad),))


def test_a_function_that_returns_a_tensor_outside_is_refused():
    outside = device_tensor(3)
    with pytest.raises(RuntimeError, match=r"uses a tensor of shape \(3,\) that requires grad"):
        capture(lambda x: (x * 2, outside), (device_tensor(3),))


def test_a_module_over_a_parameter_of_another_is_refused():
    other = torch.nn.Linear(6, 6, bias=False).cuda()
    with pytest.raises(RuntimeError, match=r"callable 0 \(Forward\) uses a tensor of shape \(6, 6\)"):
        capture(Forward(lambda linear, x: other(linear(x))), (device_tensor(4, 6),))


def test_a_leaf_that_a_module_makes_in_forward_is_captured():
    def with_leaf(linear, x):
        return linear(x) + torch.zeros(6, device="cuda", requires_grad=True)

    module, x = Forward(with_leaf), device_tensor(4, 6)
    expected = module(x)
    assert torch.equal(capture(module, (device_tensor(4, 6, seed=1),))(x), expected)


def test_a_capture_inside_a_capture_is_refused():
    graph, args = torch.cuda.CUDAGraph(), (device_tensor(3),)
    with (
        pytest.raises(RuntimeError, match="cannot be called while the current stream is capturing"),
        torch.cuda.graph(graph),
    ):
        capture(double, args)
