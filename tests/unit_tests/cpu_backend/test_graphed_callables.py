"""torch's ``make_graphed_callables`` on the CPU backend."""

import pytest
import torch


def train(graphed: bool, dropout: float) -> list[float]:
    """Return the losses of five steps of a small MLP of two callables."""
    torch.manual_seed(1)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 8))
        for _ in range(2)
    ]
    layers = [layer.cuda() for layer in layers]
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=0.01)
    if graphed:
        state = torch.cuda.get_rng_state()
        samples = tuple((torch.randn(4, 8, device="cuda", requires_grad=True),) for _ in layers)
        layers = torch.cuda.make_graphed_callables(tuple(layers), samples)
        torch.cuda.set_rng_state(state)
    losses = []
    for step in range(5):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(4, 8, generator=generator, device="cuda").requires_grad_()
        optimizer.zero_grad()
        loss = layers[1](layers[0](x)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_is_bit_identical_to_eager(dropout):
    assert train(graphed=True, dropout=dropout) == train(graphed=False, dropout=dropout)


def test_negative_control(monkeypatch):
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: None)
    assert train(graphed=True, dropout=0.0) != train(graphed=False, dropout=0.0)
