"""Test that replays of graphed callables are bit-identical to eager execution."""

import inspect

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import CASES, Case, assert_same_bits, copies, device_tensor, mlp, train

pytestmark = pytest.mark.usefixtures("cpu_backend")


def test_signature_extends_transformer_engine():
    # Parameters of TransformerEngine 2.20.2's make_graphed_callables.
    *of_transformer_engine, owners = inspect.signature(make_graphed_callables).parameters.values()
    assert (owners.name, owners.default) == ("owners", None)
    expected = """
        modules sample_args num_warmup_iters allow_unused_input sample_kwargs fp8_enabled fp8_calibrating
        fp8_recipe fp8_group fp8_weight_caching enabled calibrating recipe amax_reduction_group
        cache_quantized_params _order _num_layers_per_chunk pool retain_graph_in_backward
        _reuse_graph_input_output_buffers clone_param_grads_on_return pre_warmup_hook post_warmup_hook
        capture_time_hooks
    """
    assert [parameter.name for parameter in of_transformer_engine] == expected.split()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_is_bit_identical_to_eager(case):
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


@pytest.mark.parametrize(
    "options",
    [
        {"clone_param_grads_on_return": False},
        {"retain_graph_in_backward": True},
        {"num_warmup_iters": 0},
        {"allow_unused_input": True},
        {"_order": [1, -1]},
    ],
    ids=str,
)
def test_options_are_bit_identical_to_eager(options):
    def capture(func, args, sample_kwargs):
        return make_graphed_callables((func,), (args,), sample_kwargs=(sample_kwargs,), **options)[0]

    assert_same_bits(train(CASES["dropout"], capture), train(CASES["dropout"], None))


def test_negative_control_replay_that_does_nothing(monkeypatch):
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


def test_module_given_twice_with_order_has_two_graphs():
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


class _Checkpointed(torch.nn.Module):
    """Recomputes a layer in its backward pass, and optionally also uses the layer's bias without recomputation."""

    def __init__(self, also_outside: bool):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6).cuda()
        self.also_outside = also_outside

    def forward(self, x):
        y = checkpoint(self.inner, x, use_reentrant=True, preserve_rng_state=False)
        return y * self.inner.bias if self.also_outside else y


@pytest.mark.parametrize("also_outside", [False, True], ids=["recomputed", "recomputed and used outside"])
def test_nested_backward_is_bit_identical_to_eager(also_outside):
    case = Case(lambda: _Checkpointed(also_outside))
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


def test_capture_preserves_gradients_and_calls_no_hooks():
    module = _Checkpointed(False)
    params = list(module.parameters())
    called: list[torch.Tensor] = []
    module(device_tensor(4, 6)).square().sum().backward()
    expected = copies([param.grad for param in params])
    kept = [param.grad for param in params]
    for param in params:
        param.register_post_accumulate_grad_hook(called.append)
    graphed = make_graphed_callables(module, (device_tensor(4, 6),))
    assert called == []
    assert all(param.grad is grad for param, grad in zip(params, kept, strict=True))
    assert_same_bits(kept, expected)
    for param in params:
        param.grad = None
    graphed(device_tensor(4, 6)).square().sum().backward()
    assert_same_bits([param.grad for param in params], expected)
    assert len(called) == len(params)


def test_second_derivatives_are_refused():
    graphed = make_graphed_callables(lambda x: x * x * x, (device_tensor(3),))
    x = device_tensor(3)
    with pytest.raises(RuntimeError, match=r"callable 0 .* do not support create_graph=True"):
        torch.autograd.grad(graphed(x).sum(), x, create_graph=True)
