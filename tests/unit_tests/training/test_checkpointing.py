"""Checkpoints: what is loaded into, and what is said where it does not fit."""

import types

import pytest
import torch

pytest.importorskip("megatron.training")

from torch.distributed.checkpoint import CheckpointException

from megatron.training import checkpointing


@pytest.fixture
def loads(monkeypatch):
    """A function that loads a state dict, by a function in the place of megatron-core's own."""

    def load(read, state_dict):
        monkeypatch.setattr(checkpointing._upstream, "_load_base_checkpoint", read)
        return checkpointing._load_base_checkpoint("folder", types.SimpleNamespace(), False, state_dict)

    return load


def fails_with(message):
    def fail(*args, **kwargs):
        raise CheckpointException("", {0: (ValueError(message), "")})

    return fail


@pytest.mark.parametrize("of_ranks", [lambda ranks: ranks, lambda ranks: {"(0, 0)": ranks}])
def test_states_of_generators_are_read_into_tensors(loads, of_ranks):
    generator = torch.Generator().manual_seed(5)
    tensor = torch.zeros(3)
    states = {"rng_tracker_states": {"a": generator, "b": tensor}, "torch_rng_state": tensor}
    found = loads(lambda folder, args, rank0, state_dict: state_dict, {"rng_state": of_ranks([states])})
    (ranks,) = found["rng_state"].values() if isinstance(found["rng_state"], dict) else [found["rng_state"]]
    assert torch.equal(ranks[0]["rng_tracker_states"]["a"], generator.get_state())
    assert ranks[0]["rng_tracker_states"]["b"] is tensor


def test_nothing_is_changed_of_a_state_dict_without_such_states(loads):
    class Sharded:
        """Stands for megatron-core's ``ShardedObject``, which is saved as one object whatever is in it."""

    for state_dict in (None, {}, {"rng_state": None}, {"rng_state": Sharded()}):
        before = dict(state_dict or {})
        assert loads(lambda folder, args, rank0, state_dict: state_dict, state_dict) is state_dict
        assert (state_dict or {}) == before


def test_states_of_another_device_are_refused_by_the_flag(loads):
    with pytest.raises(ValueError, match=r"--load folder: .*--no-load-rng"):
        loads(fails_with("Size mismatch between saved [5056] and current: [16] for rng_state.(0, 0).0"), {})


def test_other_failures_are_as_they_were(loads):
    with pytest.raises(CheckpointException, match=r"model\.decoder"):
        loads(fails_with("Missing key in checkpoint state_dict: model.decoder"), {})
