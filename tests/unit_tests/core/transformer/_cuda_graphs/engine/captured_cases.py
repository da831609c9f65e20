"""Define callables to capture, and a training loop that returns all results for comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def device_tensor(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    """Return a tensor of normally distributed numbers without advancing the global generators."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").requires_grad_(grad)


def mlp(dropout: float = 0.3) -> torch.nn.Module:
    """Return an MLP with inputs and outputs of shape ``[4, 6]``."""
    layers = torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 6)
    return torch.nn.Sequential(*layers).cuda()


class Forward(torch.nn.Module):
    """Calls ``body`` with a linear layer and the module's inputs."""

    def __init__(self, body: Callable[..., Any]):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6).cuda()
        self._body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._body(self.linear, *args, **kwargs)


def nested_outputs(linear, x):
    y = linear(x)
    return {"double": (y * 2, [y.sum()]), "alone": y.tanh()}


def none_outputs(linear, x):
    return None, linear(x), None


def alias_of_the_input(linear, x):
    return linear(x), x.view(-1), x


def same_tensor_twice(linear, x):
    y = linear(x)
    return y, y


def same_storage_twice(linear, x):
    y = linear(x)
    return y.view(2, 12), y.t()


def outputs_without_grad(linear, x):
    y = linear(x)
    return y, y.argmax(dim=1), y.detach() * 2


def keywords(linear, x, *, scale, shift):
    return linear(x) * scale + shift


def nested_inputs(linear, pair, *, masks):
    x, (y,) = pair
    return linear(x) * y + masks["padding"]


def frozen_mlp() -> torch.nn.Module:
    module = mlp()
    module[0].weight.requires_grad_(False)
    return module


class UnusedParameter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(6, 6).cuda()
        self.used = torch.nn.Linear(6, 6).cuda()

    def forward(self, x):
        return self.used(x)


def product(x, y):
    return (x @ y.t()).softmax(dim=-1)


@dataclass
class Case:
    """A callable and its inputs.

    Attributes:
        make: Returns the callable, a module or function.
        args: Returns the positional inputs for a seed.
        kwargs: Returns the keyword inputs for a seed.
    """

    make: Callable[[], Callable]
    args: Callable[[int], tuple] = field(default=lambda seed: (device_tensor(4, 6, seed=seed),))
    kwargs: Callable[[int], dict[str, Any]] = field(default=lambda seed: {})


def embedding_inputs(seed: int) -> tuple:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randint(0, 10, (4, 3), generator=generator, device="cuda"),)


CASES = {
    "dropout": Case(mlp),
    "nested outputs": Case(lambda: Forward(nested_outputs)),
    "None outputs": Case(lambda: Forward(none_outputs)),
    "outputs that alias the input": Case(lambda: Forward(alias_of_the_input)),
    "the same tensor twice": Case(lambda: Forward(same_tensor_twice)),
    "the same storage twice": Case(lambda: Forward(same_storage_twice)),
    "outputs without grad": Case(lambda: Forward(outputs_without_grad)),
    "keywords": Case(
        lambda: Forward(keywords),
        kwargs=lambda seed: {
            "shift": device_tensor(6, seed=seed + 50),
            "scale": device_tensor(4, 6, seed=seed + 99, grad=False),
        },
    ),
    "nested inputs": Case(
        lambda: Forward(nested_inputs),
        args=lambda seed: ((device_tensor(4, 6, seed=seed), [device_tensor(4, 6, seed=seed + 50)]),),
        kwargs=lambda seed: {"masks": {"padding": device_tensor(6, seed=seed + 99, grad=False)}},
    ),
    "inputs without grad": Case(lambda: torch.nn.Embedding(10, 6).cuda(), args=embedding_inputs),
    "an unused parameter": Case(UnusedParameter),
    "a frozen parameter": Case(frozen_mlp),
    "a function": Case(
        lambda: product, args=lambda seed: (device_tensor(4, 6, seed=seed), device_tensor(4, 6, seed=seed + 50))
    ),
}

Numbers = list[torch.Tensor | None]


def loss_of(output: Any) -> torch.Tensor:
    """Return a loss that depends on every output that requires grad."""
    leaves = [leaf for leaf in tree_leaves(output) if leaf is not None and leaf.requires_grad]
    return sum((i + 1) * leaf.square().sum() for i, leaf in enumerate(leaves))


def copies(tensors: Sequence[torch.Tensor | None]) -> Numbers:
    """Return copies that replays cannot overwrite."""
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def parameters_of(func: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of a module, or an empty list for a function."""
    return list(func.parameters()) if isinstance(func, torch.nn.Module) else []


def descend(params: Sequence[torch.Tensor]) -> None:
    """Run one step of gradient descent and clear the gradients."""
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param -= 0.05 * param.grad
                param.grad = None


def train(case: Case, capture: Callable[..., Callable] | None, steps: int = 4) -> Numbers:
    """Train, eagerly if ``capture`` is None; return all outputs, losses, gradients, parameters and the RNG state."""
    torch.manual_seed(3)
    func = case.make()
    params = parameters_of(func)
    called = func
    if capture is not None:
        called = capture(func, case.args(1000), sample_kwargs=case.kwargs(1000))
    numbers: Numbers = []
    for step in range(steps):
        args, kwargs = case.args(step), case.kwargs(step)
        output = called(*args, **kwargs)
        numbers += copies(tree_leaves(output))
        loss = loss_of(output)
        loss.backward()
        numbers += copies([loss, *(leaf.grad for leaf in tree_leaves((args, kwargs))), *(p.grad for p in params)])
        descend(params)
    return numbers + copies(params) + [torch.cuda.get_rng_state()]


def assert_same_bits(got: Numbers, expected: Numbers) -> None:
    """Assert that both lists are bit-identical, with None at the same positions."""
    assert len(got) == len(expected)
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one is None or other is None:
            assert one is other, f"number {i}: {one} and {other}"
        else:
            assert torch.equal(one, other), f"number {i} differs by {(one.double() - other.double()).abs().max()}"
