"""Checkpoints: what is loaded into, and what is said where it does not fit."""

import types

import pytest
import torch

pytest.importorskip("megatron.training")

from torch.distributed.checkpoint import CheckpointException, load, save

from megatron.core import parallel_state
from megatron.training import checkpointing


@pytest.fixture
def loads(monkeypatch):
    """A function that loads a state dict, by a function in the place of megatron-core's own."""

    def load(read, state_dict, finetune=False, **others):
        monkeypatch.setattr(checkpointing._upstream, "_load_base_checkpoint", read)
        args = types.SimpleNamespace(finetune=finetune)
        return checkpointing._load_base_checkpoint("folder", args, False, state_dict, **others)

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
    found, *_ = loads(
        lambda folder, args, rank0, state_dict: (state_dict, None, None), {"rng_state": of_ranks([states])}
    )
    (ranks,) = found["rng_state"].values() if isinstance(found["rng_state"], dict) else [found["rng_state"]]
    assert torch.equal(ranks[0]["rng_tracker_states"]["a"], generator.get_state())
    assert ranks[0]["rng_tracker_states"]["b"] is tensor


def test_nothing_is_changed_of_a_state_dict_without_such_states(loads):
    class Sharded:
        """Stands for megatron-core's ``ShardedObject``, which is saved as one object whatever is in it."""

    for state_dict in (None, {}, {"rng_state": None}, {"rng_state": Sharded()}):
        before = dict(state_dict or {})
        loaded, *_ = loads(lambda folder, args, rank0, state_dict: (state_dict, None, None), state_dict)
        assert loaded is state_dict
        assert (state_dict or {}) == before


def test_states_of_another_device_are_refused_by_the_flag(loads):
    with pytest.raises(ValueError, match=r"--load folder: .*--no-load-rng"):
        loads(fails_with("Size mismatch between saved [5056] and current: [16] for rng_state.(0, 0).0"), {})


def test_missing_states_of_the_optimizer_are_refused_by_the_flag(loads):
    with pytest.raises(
        ValueError, match=r"--load folder: it lacks optimizer.state.module.weight.step\. .*--no-load-optim"
    ):
        loads(fails_with("Missing key in checkpoint state_dict: optimizer.state.module.weight.step."), {})


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("model.module.embedding.word_embeddings.weight", ", 64"),
        ("optimizer.state.module.module.module.output_layer.weight.exp_avg", ", 64"),
        ("model.module.output_layer.bias", ""),
    ],
)
def test_an_error_names_the_vocabulary_size_to_set(loads, name, row):
    sizes = f"Size mismatch between saved torch.Size([288{row}]) and current: torch.Size([384{row}])"
    with pytest.raises(ValueError, match=r"--load folder: .*288 .*384.*--padded-vocab-size 288\."):
        loads(fails_with(f"{sizes} for {name}"), {})


class Chunk(torch.nn.Module):
    """A chunk of a model with one layer, of this number from 1; ``module.`` is in front of its names."""

    config = types.SimpleNamespace(num_moe_experts=None)

    def __init__(self, number):
        super().__init__()
        self.module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])})
        self.module["layers"][0].layer_number = number


@pytest.fixture
def loads_optimizer(loads, monkeypatch, tmp_path):
    """A function that saves an optimizer's state dict, None for none, and loads the checkpoint into another."""

    def run(saved, into):
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


def test_an_optimizer_that_took_no_step_is_loaded_without_states(loads_optimizer):
    saved = {"state": {}, "param_to_group_meta": groups(0.25)}
    into = {"state": {"a.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.5, step=1)}
    assert loads_optimizer(saved, into) == saved
    assert into["param_to_group_meta"] == groups(0.5, step=1)


def test_each_of_several_optimizers_is_loaded_as_it_was_saved(loads_optimizer):
    stepped = {"state": {"a.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.25)}
    fresh = {"state": {}, "param_to_group_meta": groups(0.25)}
    asked = {"state": {"a.weight": {"exp_avg": torch.zeros(1)}}, "param_to_group_meta": groups(0.5)}
    saved = {"0": stepped, "1": fresh}
    assert loads_optimizer(saved, {"0": dict(asked), "1": dict(asked)}) == saved


def test_states_are_loaded_where_a_step_was_taken(loads_optimizer):
    saved = {"state": {"a.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.25, step=3)}
    into = {"state": {"a.weight": {"exp_avg": torch.zeros(1)}}, "param_to_group_meta": groups(0.5, step=1)}
    assert loads_optimizer(saved, into) == saved


def test_one_missing_state_is_an_error(loads_optimizer):
    saved = {"state": {"b.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.25)}
    into = {"state": {"a.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.25)}
    with pytest.raises(ValueError, match=r"lacks optimizer\.state\.a\.weight\.exp_avg"):
        loads_optimizer(saved, into)


def test_a_checkpoint_without_the_optimizer_is_an_error(loads_optimizer):
    """Its parameters may have been trained: --no-save-optim."""
    into = {"state": {"a.weight": {"exp_avg": torch.ones(1)}}, "param_to_group_meta": groups(0.5)}
    with pytest.raises(ValueError, match="--no-load-optim"):
        loads_optimizer({}, into)


def test_an_optimizer_starts_without_a_checkpoint(loads_optimizer):
    assert loads_optimizer(None, {"state": {}, "param_to_group_meta": groups(0.5)}) is None


@pytest.mark.parametrize("scale", [{}, {"grad_scaler": {"scale": 2.0}}])
def test_a_checkpoint_without_a_loss_scale_is_read_without(loads_optimizer, caplog, scale):
    """As those of another precision, of a constant scale, or of megatron-core alone."""
    saved = {"state": {"a.weight": {"step": 1.0}}, "param_to_group_meta": groups(0.25)} | scale
    into = {"state": {"a.weight": {"step": 0.0}}, "param_to_group_meta": groups(0.5), "grad_scaler": {"scale": 1.0}}
    with caplog.at_level("WARNING"):
        assert loads_optimizer(saved, into) == saved
    assert ("--initial-loss-scale" in caplog.text) == (not scale)


def test_learning_rates_that_were_saved_as_tensors_are_read_as_such(loads_optimizer):
    """As megatron-core saves them where the optimizer's step is captured."""
    state = {"a.weight": {"step": 1.0}}
    asked = groups(0.5, eps=1.0)
    saved = {"state": state, "param_to_group_meta": groups(torch.tensor(0.25), eps=1e-8)}
    found = loads_optimizer(saved, {"state": state, "param_to_group_meta": asked})
    assert found["param_to_group_meta"] == groups(0.25, eps=1e-8)
    assert asked["a.weight"]["lr"] == 0.5


@pytest.fixture
def prepared(monkeypatch):
    """A function that makes the state dict of a stage's chunks; returns what is saved and the model with its names."""

    def prepare(chunks, stages=2, bf16=True, **others):
        keys = ["model"] if len(chunks) == 1 else ["model0", "model1"]
        models = {
            key: {"layers.0.weight": chunk.module["layers"][0].weight} for key, chunk in zip(keys, chunks, strict=True)
        }
        monkeypatch.setattr(checkpointing._upstream, "generate_state_dict", lambda *given: {"iteration": 1, **models})
        seen = []

        def preprocess(args, state_dict, model):
            seen.append(model)
            return state_dict

        monkeypatch.setattr(checkpointing._upstream, "preprocess_fsdp_dtensor_state_dict", preprocess)
        args = types.SimpleNamespace(
            ckpt_format="fsdp_dtensor", pipeline_model_parallel_size=stages, bf16=bf16, fp16=False
        )
        state_dict = checkpointing.generate_state_dict(args, chunks) | others
        return checkpointing.preprocess_fsdp_dtensor_state_dict(args, state_dict, chunks[0]), *seen

    return prepare


def test_the_chunks_of_a_stage_are_saved_by_their_layers_numbers(prepared):
    chunks = [Chunk(2), Chunk(4)]
    weights = [chunk.module["layers"][0].weight for chunk in chunks]
    saved, model = prepared(chunks)
    assert saved == {"iteration": 1, "model": {"layers.1.weight": weights[0], "layers.3.weight": weights[1]}}
    for wrappers in ("module.", "module.module.", "module.module.module."):
        assert model.get_parameter(f"{wrappers}layers.3.weight") is weights[1]
    assert dict(model.named_modules())["module.layers.1"] is chunks[0].module["layers"][0]
    assert model.config is Chunk.config


def test_weights_that_no_pass_reads_are_not_saved(prepared):
    chunk = Chunk(2)
    chunk.module.share_embeddings_and_output_weights, chunk.module.pre_process = True, False
    chunk.module.embedding = torch.nn.Identity()
    scaler = {"scale": 1}
    by_name = {"module.output_layer.weight": 1, "module.layers.1.weight": 2}
    optimizer = {"state": by_name, "param_to_group_meta": by_name, "grad_scaler": scaler}
    saved, _ = prepared([chunk], optimizer=optimizer)
    left = {"module.layers.1.weight": 2}
    assert saved["optimizer"] == {"state": left, "param_to_group_meta": left, "grad_scaler": scaler}
    assert saved["optimizer"]["grad_scaler"] is scaler  # what is read is put there
    saved, _ = prepared([Chunk(2)], optimizer=optimizer)
    assert saved["optimizer"] == optimizer
    assert prepared([Chunk(2)], optimizer={})[0]["optimizer"] == {}


@pytest.fixture
def reads_layers(loads, tmp_path):
    """A function that loads chunks with the layers 1 and 3, counted from 0, of a checkpoint with others."""

    def load(saved, **others):
        def read(folder, args, rank0, state_dict, **more):
            return {"model": {}, "iteration": 1}, tmp_path, False, None

        save({"model": {f"{place}.weight": torch.ones(1) for place in saved}}, checkpoint_id=tmp_path, no_dist=True)
        asked = {"model0": {"module.layers.0.weight": 1}, "model1": {"module.layers.0.weight": 2}}
        return asked, loads(read, {checkpointing._CHUNKS: [Chunk(2), Chunk(4)], **asked}, **others)

    return load


def test_chunks_that_were_read_are_returned_by_megatron_cores_keys(reads_layers):
    asked, (loaded, *_) = reads_layers(["module.layers.1", "module.layers.3", "module.layers.5"])
    assert (loaded["model0"], loaded["model1"], loaded["iteration"]) == (*asked.values(), 1)


def test_a_checkpoint_without_some_of_the_layers_is_refused(reads_layers):
    with pytest.raises(ValueError, match=r"--load: .* lacks layers \[3\] of layers, .*earlier version.*--finetune"):
        reads_layers(["module.layers.0", "module.layers.1"])


@pytest.mark.parametrize(
    ("saved", "others"),
    [
        (["module.layers.0"], {"finetune": True}),
        (["module.layers.0"], {"gpt_compat_layer_maps": {}}),
        (["module.encoder.layers.0"], {}),
    ],
)
def test_layers_may_be_missing_where_others_are_asked_for(reads_layers, saved, others):
    asked, (loaded, *_) = reads_layers(saved, **others)
    assert asked.items() <= loaded.items()


def test_the_states_of_generators_are_those_of_the_ranks_own_place(monkeypatch):
    groups = {"get_tensor_model_parallel_group": object(), "get_pipeline_model_parallel_group": object()}
    for name, group in groups.items():
        monkeypatch.setattr(parallel_state, name, lambda group=group: group)
    monkeypatch.setattr(checkpointing._upstream, "get_rng_state", lambda *given, **others: (given, others))
    found = checkpointing.get_rng_state("fsdp_dtensor", None, None, dp_group=1)
    assert found == (("fsdp_dtensor", *groups.values()), {"dp_group": 1})
    theirs = object(), object()
    assert checkpointing.get_rng_state("fsdp_dtensor", *theirs) == (("fsdp_dtensor", *theirs), {})
