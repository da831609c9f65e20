"""layer_replay: how many calls one replay of a layer makes on the host. Each is paid by every layer in every step."""

from collections import Counter

import pytest
import torch

pytest.importorskip("megatron.core")

from benchmarks import layer_replay


@pytest.fixture(scope="module")
def calls() -> dict[str, Counter[layer_replay.Call]]:
    rotary_pos_emb = torch.ones(layer_replay.TOKENS, 1, layer_replay.HIDDEN)
    return layer_replay.calls_per_layer([layer_replay.graphed_layer(rotary_pos_emb) for _ in range(2)], rotary_pos_emb)


def python_calls(calls: Counter[layer_replay.Call]) -> Counter[str]:
    """Calls of functions in Python by the owner of the function; those of megatron-core differ between versions."""
    owners: Counter[str] = Counter()
    for (owner, _), count in calls.items():
        name = owner if owner in ("C", "other", "torch", "megatron-core") else layer_replay.PROJECT
        owners[name] += count
    return owners


def test_calls_of_a_forward_replay(calls):
    counted = python_calls(calls["forward"])
    assert counted[layer_replay.PROJECT] <= 12  # with the question whether the graph fits
    assert counted["torch"] <= 4  # of torch.nn.Module's own call
    assert counted["C"] <= 34


def test_calls_of_a_backward_replay(calls):
    looked_up = Counter({("torch", "_get_user_fn"): 1, ("C", "getattr"): 1})  # by autograd, from torch 2.13 on
    counted = python_calls(calls["backward"] - looked_up)
    assert counted[layer_replay.PROJECT] <= 3
    assert counted["torch"] <= 1
    assert counted["C"] <= 4


def test_the_hidden_states_and_their_gradient_are_all_that_a_replay_copies(calls):
    assert calls["forward"]["C", "copy_"] == 1
    assert calls["backward"]["C", "copy_"] == 1


def test_a_replay_runs_each_graph_once(calls):
    assert [calls[phase]["other", "replay"] for phase in ("forward", "backward")] == [1, 1]
