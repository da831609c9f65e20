"""Test grouped experts: results equal to one matrix product per expert, memory, and unused rows."""

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

import torch
from torch.nn.functional import gelu, silu

from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer._cuda_graphs.errors import UnsupportedError
from megatron.core.transformer._cuda_graphs.hooks import runs_outside_graphs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.grouped_tensor import (
    Linears,
    as_one,
    compute_experts,
    grouped_linear,
    linears,
    run_pre_hooks,
)


@pytest.fixture(autouse=True, scope="module")
def _fused_activations_are_not_compiled():
    with torch.compiler.set_stance("force_eager"):
        yield


EXPERTS, HIDDEN, FFN = 4, 16, 24
COUNTS = [[10, 10, 10, 10], [0, 25, 0, 15], [40, 0, 0, 0]]


def offsets_of(counts):
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def leaves(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(output, *inputs):
    return torch.autograd.grad(output, inputs, torch.ones_like(output) * output.detach().sign(), allow_unused=True)


def one_by_one(rows, weights, counts):
    return torch.cat([part @ weight.t() for part, weight in zip(rows.split(counts), weights, strict=True)])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_is_bit_identical_to_single_ones(counts, dtype):
    rows, *weights = leaves((40, HIDDEN), *[(FFN, HIDDEN)] * EXPERTS, dtype=dtype)
    grouped = grouped_linear(rows, weights, offsets_of(counts))
    single = one_by_one(rows, weights, counts)
    assert torch.equal(grouped, single)
    for mine, theirs in zip(gradients(grouped, rows, *weights), gradients(single, rows, *weights), strict=True):
        assert torch.equal(mine, theirs)


def test_unused_rows_are_zero_and_change_nothing():
    rows, *weights = leaves((40, HIDDEN), *[(FFN, HIDDEN)] * EXPERTS)
    used = rows.detach()[:30].clone().requires_grad_()
    with torch.no_grad():
        rows[30:] = torch.nan
    counts = [10, 0, 15, 5]
    grouped = grouped_linear(rows, weights, offsets_of(counts), unused_rows=True)
    alone = grouped_linear(used, weights, offsets_of(counts))
    assert torch.equal(grouped[:30], alone)
    assert not grouped[30:].any()
    of_rows, *of_weights = gradients(grouped, rows, *weights)
    of_used, *of_others = gradients(alone, used, *weights)
    assert torch.equal(of_rows[:30], of_used)
    assert not of_rows[30:].any()
    assert all(map(torch.equal, of_weights, of_others))


@pytest.mark.parametrize("between", [0, 8])
def test_weights_at_equal_distances_are_not_copied(between):
    size = FFN * HIDDEN
    bucket = torch.randn(7 + EXPERTS * (size + between))
    weights = [bucket[7 + i * (size + between) :][:size].view(FFN, HIDDEN) for i in range(EXPERTS)]
    together = as_one(weights)
    assert together.data_ptr() == weights[0].data_ptr()
    assert all(map(torch.equal, together, weights))


def test_frozen_weight_changes_no_other_gradient():
    rows, *weights = leaves((40, HIDDEN), *[(FFN, HIDDEN)] * EXPERTS)
    expected = gradients(grouped_linear(rows, weights, offsets_of(COUNTS[1])), *weights)
    weights[1].requires_grad_(False)
    output = grouped_linear(rows, weights, offsets_of(COUNTS[1]))
    trained = [0, 2, 3]
    found = gradients(output, *(weights[index] for index in trained))
    assert all(torch.equal(mine, expected[index]) for mine, index in zip(found, trained, strict=True))


def config(**changes):
    """Return the attributes of a ``TransformerConfig`` that experts read."""
    found = {
        "activation_func": silu,
        "gated_linear_unit": False,
        "bias_activation_fusion": False,
        "use_te_activation_func": False,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "activation_func_fp8_input_store": False,
        "moe_apply_probs_on_input": False,
        "expert_model_parallel_size": 1,
    }
    return SimpleNamespace(**found | changes)


GATED = {"gated_linear_unit": True}
ACTIVATIONS = {
    "gelu": {"activation_func": gelu},
    "squared relu": {"activation_func": squared_relu},
    "swiglu": GATED,
    "fused swiglu": {**GATED, "bias_activation_fusion": True},
    "clamped swiglu": {**GATED, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "fused clamped geglu": {
        **GATED,
        "activation_func": quick_gelu,
        "bias_activation_fusion": True,
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    },
    "probabilities on the input": {**GATED, "moe_apply_probs_on_input": True},
}


def parameters(gated, bias, dtype):
    width = FFN * (2 if gated else 1)
    shapes = {"fc1": ((width, HIDDEN), (width,)), "fc2": ((HIDDEN, FFN), (HIDDEN,))}
    made = {}
    for seed, (name, (weight, of_bias)) in enumerate(shapes.items()):
        weights = leaves(*[weight] * EXPERTS, dtype=dtype, seed=seed)
        made[name] = Linears(weights, leaves(*[of_bias] * EXPERTS, dtype=dtype, seed=seed + 2) if bias else [])
    return made["fc1"], made["fc2"]


def as_double(layers):
    return Linears(*([each.detach().double().requires_grad_() for each in kind] for kind in layers))


def expert_by_expert(options, fc1, fc2, rows, counts, probs):
    """Run one MLP per expert, like megatron-core's ``SequentialMLP``."""

    class Linear(torch.nn.Module):
        def __init__(self, layers, index):
            super().__init__()
            self.parts = layers.weights[index], layers.biases[index] if layers.biases else None

        def forward(self, inputs):
            return inputs @ self.parts[0].t(), self.parts[1]

    outputs = []
    for index, (part, scale) in enumerate(zip(rows.split(counts), probs.split(counts), strict=True)):
        if options.moe_apply_probs_on_input:
            part, scale = part * scale.unsqueeze(1), torch.ones_like(scale)
        mlp = SimpleNamespace(config=options, activation_func=options.activation_func)
        mlp.linear_fc1, mlp.linear_fc2 = Linear(fc1, index), Linear(fc2, index)
        outputs.append(MLP.forward(mlp, part, scale)[0])
    return torch.cat(outputs)


CASES = [(name, False) for name in ACTIVATIONS] + [("gelu", True), ("swiglu", True), ("clamped swiglu", True)]


@pytest.mark.parametrize(("activation", "bias"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_as_accurate_as_single_mlps(activation, bias, dtype):
    options, counts = config(**ACTIVATIONS[activation]), COUNTS[1]
    fc1, fc2 = parameters(options.gated_linear_unit, bias, dtype)
    rows, probs = leaves((40, HIDDEN), (40,), dtype=dtype, seed=7)
    leaves_of = [rows, probs, *fc1.weights, *fc1.biases, *fc2.weights, *fc2.biases]

    exact = [each.detach().double().requires_grad_() for each in (rows, probs)]
    exact_fc1, exact_fc2 = as_double(fc1), as_double(fc2)
    # Fused activations do not support fp64.
    plain = config(**ACTIVATIONS[activation] | {"bias_activation_fusion": False})
    true = expert_by_expert(plain, exact_fc1, exact_fc2, exact[0], counts, exact[1])
    grad = torch.randn(true.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    true_leaves = [*exact, *exact_fc1.weights, *exact_fc1.biases, *exact_fc2.weights, *exact_fc2.biases]
    true_grads = torch.autograd.grad(true, true_leaves, grad)

    def errors(output):
        found = torch.autograd.grad(output, leaves_of, grad.to(dtype))
        compared = zip([output, *found], [true, *true_grads], strict=True)
        return [(mine.double() - theirs).norm() / max(theirs.norm(), 1e-9) for mine, theirs in compared]

    grouped, _ = compute_experts(options, options.activation_func, fc1, fc2, rows, torch.tensor(counts), probs)
    single = expert_by_expert(options, fc1, fc2, rows, counts, probs)
    assert grouped.dtype == dtype
    for mine, theirs in zip(errors(grouped), errors(single), strict=True):
        assert mine <= 1.5 * theirs + torch.finfo(dtype).eps


def test_parameters_of_both_kinds_of_experts_are_found():
    many = torch.nn.ModuleList(torch.nn.Linear(2, 3) for _ in range(2))
    assert [id(each) for each in linears(many).weights] == [id(each.weight) for each in many]
    assert [id(each) for each in linears(many).biases] == [id(each.bias) for each in many]
    grouped = torch.nn.Module()
    for index in range(2):
        grouped.register_parameter(f"weight{index}", torch.nn.Parameter(torch.ones(3, 2)))
        grouped.register_parameter(f"bias{index}", torch.nn.Parameter(torch.ones(0)))  # TransformerEngine has no biases
    assert [id(each) for each in linears([grouped], range(2)).weights] == [id(grouped.weight0), id(grouped.weight1)]
    assert linears([grouped], range(2)).biases == []


class TELinear(torch.nn.Linear):
    """Stand-in for a layer of TransformerEngine."""

    __module__ = "transformer_engine.pytorch"


class Adapter(TELinear):
    """A third-party layer with its own ``forward``."""

    __module__ = "someone.elses"

    def forward(self, x):
        return 2 * super().forward(x)


class Activation(torch.nn.Module):
    """A third-party activation function."""

    def forward(self, x):
        return x.relu()


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.register_forward_pre_hook(print),
        lambda layer: layer.register_forward_hook(print),
        lambda layer: layer.register_full_backward_hook(print),
        lambda layer: setattr(layer, "forward", layer.forward),
        lambda layer: setattr(layer, "__class__", Adapter),
    ],
    ids=["forward pre-hook", "forward hook", "backward hook", "forward", "class"],
)
def test_hooks_and_adapters_in_experts_are_refused(change):
    experts, ran = torch.nn.Sequential(TELinear(2, 2), Activation()), []
    experts.register_forward_hook(print)  # the experts module itself is called
    experts[0].register_forward_pre_hook(runs_outside_graphs(lambda *call: ran.append(call)))
    experts[1].register_forward_pre_hook(lambda *call: ran.append(call))  # called by compute_experts
    run_pre_hooks(experts, experts[1])
    assert ran == [(experts[0], ())]
    change(experts[0])
    with pytest.raises(
        UnsupportedError, match=r"does not run the third-party hook or forward of (TELinear|Adapter) in experts"
    ):
        run_pre_hooks(experts, experts[1])


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "fused swiglu"])
def test_unused_rows_reach_no_parameter(activation):
    counts = torch.tensor([10, 0, 15, 5])
    fc1, fc2 = parameters("swiglu" in activation, bias=activation != "fused swiglu", dtype=torch.float32)
    leaves_of = [*fc1.weights, *fc1.biases, *fc2.weights, *fc2.biases]

    def run(ranks, rows, probs, grad):
        options = config(**ACTIVATIONS[activation], expert_model_parallel_size=ranks)
        output, _ = compute_experts(options, options.activation_func, fc1, fc2, rows, counts, probs)
        return output, torch.autograd.grad(output, leaves_of, grad)

    used = leaves((30, HIDDEN), (30,), (30, HIDDEN), seed=7)
    with_room = [torch.cat([each.detach(), torch.full_like(each[:10], torch.nan)]) for each in used]
    expected, expected_grads = run(1, *used)
    found, found_grads = run(2, *with_room)
    assert torch.equal(found[:30], expected)
    for mine, theirs in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, theirs)
