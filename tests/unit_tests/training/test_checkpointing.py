"""Test Megatron-FSDP checkpoints: layer names, contents and errors."""

import re
import types

import pytest
import torch

pytest.importorskip("megatron.training")

from torch.distributed.checkpoint import CheckpointException, load, save

from megatron.training import checkpointing


@pytest.fixture
def loads(monkeypatch):
    def load(read, state_dict, finetune=False, **others):
        """Load ``state_dict`` with ``read`` in place of megatron-core's reader."""
        monkeypatch.setattr(checkpointing._upstream, "_load_base_checkpoint", read)
        args = types.SimpleNamespace(finetune=finetune)
        return checkpointing._load_base_checkpoint("folder", args, False, state_dict, **others)

    return load


def fails_with(message):
    def fail(*args, **kwargs):
        raise CheckpointException("", {0: (ValueError(message), "")})

    return fail


@pytest.mark.parametrize("of_ranks", [lambda ranks: ranks, lambda ranks: {"(0, 0)": ranks}])
def test_generator_states_are_read_into_tensors(loads, of_ranks):
    generator = torch.Generator().manual_seed(5)
    tensor = torch.zeros(3)
    states = {"rng_tracker_states": {"a": generator, "b": tensor}, "torch_rng_state": tensor}
    found, *_ = loads(
        lambda folder, args, rank0, state_dict: (state_dict, None, None), {"rng_state": of_ranks([states])}
    )
    (ranks,) = found["rng_state"].values() if isinstance(found["rng_state"], dict) else [found["rng_state"]]
    assert torch.equal(ranks[0]["rng_tracker_states"]["a"], generator.get_state())
    assert ranks[0]["rng_tracker_states"]["b"] is tensor


def test_other_state_dicts_are_left_alone(loads):
    class Sharded:
        """A stand-in for megatron-core's ``ShardedObject``."""

    for state_dict in (None, {}, {"rng_state": None}, {"rng_state": Sharded()}):
        before = dict(state_dict or {})
        loaded, *_ = loads(lambda folder, args, rank0, state_dict: (state_dict, None, None), state_dict)
        assert loaded is state_dict
        assert (state_dict or {}) == before


@pytest.mark.parametrize("flag", ["--no-load-rng", "--no-load-optim", "--padded-vocab-size"])
def test_error_names_the_flags_to_add(loads, flag):
    message = "Size mismatch between saved [5056] and current: [16] for rng_state.(0, 0).0"
    with pytest.raises(ValueError, match=rf"(?s)--load folder .*{re.escape(message)}.*{flag}"):
        loads(fails_with(message), {})


class Chunk(torch.nn.Module):
    """A wrapped model chunk with one layer, whose global number (from 1) is ``number``."""

    config = types.SimpleNamespace(num_moe_experts=None)

    def __init__(self, number):
        super().__init__()
        self.module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])})
        self.module["layers"][0].layer_number = number


@pytest.fixture
def loads_optimizer(loads, monkeypatch, tmp_path):
    def run(saved, into):
        """Save the optimizer state dict ``saved`` (None: no checkpoint), and load it into ``into``."""
        if saved is not None:
            save({"optimizer": saved, "iteration": 1}, checkpoint_id=tmp_path / "folder")
        monkeypatch.setattr(
            checkpointing._upstream, "get_load_checkpoint_path_by_args", lambda args: tmp_path / args.load
        )

        def read(folder, args, rank0, state_dict):
            if saved is None:
                return None, "", False
            load({"optimizer": state_dict["optimizer"]}, checkpoint_id=tmp_path / folder)
            return state_dict, tmp_path / folder, False

        loaded, *_ = loads(read, {"_model": [Chunk(1)], "model": {}, "optimizer": into})
        return loaded and loaded["optimizer"]

    return run


def groups(lr, **others):
    return {"a.weight": {"lr": lr, **others}}


def test_checkpoint_before_the_first_step_loads(loads_optimizer):
    saved = {"state": {}, "param_to_group_meta": groups(0.25)}
    into = {"state": {"a.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.5, step=1)}
    assert loads_optimizer(saved, into) == saved
    assert into["param_to_group_meta"] == groups(0.5, step=1)


def test_states_are_loaded_after_a_step(loads_optimizer):
    saved = {"state": {"a.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.25, step=3)}
    into = {"state": {"a.weight": {"exp_avg": torch.zeros(1)}}, "param_to_group_meta": groups(0.5, step=1)}
    assert loads_optimizer(saved, into) == saved


def test_one_missing_state_is_an_error(loads_optimizer):
    saved = {"state": {"b.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.25)}
    into = {"state": {"a.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.25)}
    with pytest.raises(ValueError, match=r"Missing key .*optimizer\.state\.a\.weight\.exp_avg"):
        loads_optimizer(saved, into)


def test_checkpoint_without_the_optimizer_is_an_error(loads_optimizer):
    into = {"state": {"a.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.5)}
    with pytest.raises(ValueError, match="--no-load-optim"):
        loads_optimizer({}, into)


def test_training_starts_without_a_checkpoint(loads_optimizer):
    assert loads_optimizer(None, {"state": {}, "param_to_group_meta": groups(0.5)}) is None


@pytest.mark.parametrize("scale", [{}, {"grad_scaler": {"scale": 2.0}}])
def test_checkpoint_without_a_loss_scale_loads(loads_optimizer, caplog, scale):
    saved = {"state": {"a.weight": {"step": 1.0}}, "param_to_group_meta": groups(0.25)} | scale
    into = {"state": {"a.weight": {"step": 0.0}}, "param_to_group_meta": groups(0.5), "grad_scaler": {"scale": 1.0}}
    with caplog.at_level("WARNING"):
        assert loads_optimizer(saved, into) == saved
    assert ("--initial-loss-scale" in caplog.text) == (not scale)
