"""Test that runs with and without graphs resume from each other's checkpoints bit-identically.

Dropout makes results depend on RNG states.
"""

import re
from itertools import product

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from tests.support.pretraining.pretrain import SCRIPT, numbers, pretrain

STEPS, SAVED = 5, 2
COMMON = f"--train-iters {STEPS} --cuda-graph-warmup-steps 1"  # captures before and after the checkpoint
UNTIED = "--untie-embeddings-and-output-weights"
STAGES = f"--pipeline-model-parallel-size 2 --num-layers 4 {UNTIED}"
EXPERTS = """
    --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear
    --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0
"""
INSTANCES = "--num-distributed-optimizer-instances 2 --overlap-grad-reduce --overlap-param-gather"
GROUPED = "--moe-use-grouped-tensor"
LAYOUTS = {
    "dense": "--swiglu --no-bias-swiglu-fusion",
    "experts": EXPERTS,
    "dropless": f"""
        --num-experts 4 --moe-token-dispatcher-type alltoall --disable-bias-linear --swiglu --no-bias-swiglu-fusion
        {GROUPED}
    """,
    "tensor_parallel": "--tensor-model-parallel-size 2",
    "stages": STAGES,
    "tied_stages": STAGES.replace(UNTIED, ""),
    "predicting_stages": f"{STAGES} --mtp-num-layers 1",
    "predicting_tied_stages": f"{STAGES} --mtp-num-layers 1".replace(UNTIED, ""),
    "virtual_stages": f"{STAGES} --num-layers-per-virtual-pipeline-stage 1 --swiglu --no-bias-swiglu-fusion",
    "hybrid_sharding": INSTANCES,
    "hybrid_sharding_of_all": f"{INSTANCES} --outer-dp-sharding-strategy optim",
    # The scale doubles every two steps and at the checkpoint differs from the initial scale.
    "fp16": "--fp16 --initial-loss-scale 256 --loss-scale-window 2",
    "adapters": "--swiglu --no-bias-swiglu-fusion",
}
WITH_USER_CODE = SCRIPT.parents[1] / "tests" / "support" / "pretraining" / "pretrain_with_user_code.py"
EAGER = "eager"
KINDS = {EAGER: "", "layers": "--cuda-graph-layers-per-graph 1", "parts": "--cuda-graph-modules attn", "model": ""}

pytestmark = pytest.mark.long


def run(folder, flags, kind, ranks=2, layout=""):
    """Train, and return the metrics of each step, the result of ``numbers``, and the logged loss scales."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("USER_CODE", "adapters" * (layout == "adapters"))
        patches.setenv("SCALARS_PATH", f"{folder}.scalars")
        steps = pretrain(
            folder, flags, graphs=kind != EAGER, ranks=ranks, script=WITH_USER_CODE if layout == "adapters" else SCRIPT
        )
    return steps, numbers(steps), re.findall(r"loss scale: (\S+)", (folder / "log").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that trains a layout with a kind of graphs and caches the checkpoint and results."""
    done = {}

    def train(layout, kind):
        if (layout, kind) not in done:
            folder = tmp_path_factory.mktemp(f"{layout}-{kind}")
            flags = f"{COMMON} {LAYOUTS[layout]} {KINDS[kind]} --save {folder / 'saved'} --save-interval {SAVED}"
            done[layout, kind] = folder / "saved", run(folder / "run", flags, kind, layout=layout)
        return done[layout, kind]

    return train


@pytest.mark.parametrize(("layout", "saver", "loader"), product(LAYOUTS, KINDS, KINDS))
def test_resumed_run_equals_an_uninterrupted_one(saved, tmp_path, layout, saver, loader):
    checkpoint, (_, *before) = saved(layout, saver)
    _, (_, expected, scales) = saved(layout, EAGER)
    assert len(expected) == len(scales) == STEPS
    assert before == [expected, scales]
    flags = f"{COMMON} {LAYOUTS[layout]} {KINDS[loader]} --load {checkpoint} --ckpt-step {SAVED}"
    steps, *resumed = run(tmp_path / "resumed", flags, loader, layout=layout)
    assert resumed == [expected[SAVED:], scales[SAVED:]]
    assert [bool(step["graphs"]) for step in steps] == [False] + [loader != EAGER] * (STEPS - SAVED - 1)


def test_dynamic_loss_scale_loads_a_checkpoint_with_a_constant(saved, tmp_path):
    flags, place = f"{COMMON} {LAYOUTS['dense']}", tmp_path / "saved"
    run(tmp_path / "first", f"{flags} --fp16 --loss-scale 128 --save {place} --save-interval {SAVED}", EAGER)
    flags += f" {LAYOUTS['fp16']} --load {place} --ckpt-step {SAVED}"
    (_, *eager), (_, *graphed) = (run(tmp_path / kind, flags, kind) for kind in (EAGER, "model"))
    assert graphed == eager
    assert [float(scale) for scale in eager[1]] == [256.0, 512.0, 512.0]


@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune"])
def test_checkpoint_loads_without_optimizer_states(saved, tmp_path, flag):
    _, (_, expected, _) = saved("dense", EAGER)
    flags, place = f"{COMMON} {LAYOUTS['dense']}", tmp_path / "saved"
    run(tmp_path / "first", f"{flags} --save {place} --save-interval {SAVED} --no-save-optim", EAGER)
    flags += f" --load {place} --ckpt-step {SAVED} {flag}"
    (_, eager, _), (_, graphed, _) = (run(tmp_path / kind, flags, kind) for kind in (EAGER, "model"))
    assert graphed == eager
    assert (eager[0][:2] == expected[SAVED][:2]) == (flag == "--no-load-optim")
    assert eager[0] != expected[0]


def tensors(checkpoint):
    """Return the parameters and optimizer states in a checkpoint, by name."""
    reader = FileSystemReader(checkpoint)
    described = reader.read_metadata().state_dict_metadata
    sizes = {key: value.size for key, value in described.items() if key.startswith(("model.", "optimizer.state."))}
    types = {key: described[key].properties.dtype for key in sizes}
    read = {key: torch.empty(size, dtype=types[key]) for key, size in sizes.items()}
    load(read, storage_reader=reader)
    return read


def assert_saved_as_loaded(checkpoint, place, folder, flags, ranks=2):
    """Assert that loading ``checkpoint`` and saving to ``place`` keeps all tensors, and return the tensors."""
    again = f"--train-iters {SAVED} --override-opt-param-scheduler --save {place} --save-interval {STEPS} {flags}"
    assert pretrain(folder, f"{again} --load {checkpoint} --ckpt-step {SAVED}", graphs=False, ranks=ranks) == []
    first, second = (tensors(each / f"iter_{SAVED:07}") for each in (checkpoint, place))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    return first


def test_dropless_experts_load_without_the_flag_and_back(saved, tmp_path):
    checkpoint, _ = saved("dropless", EAGER)
    with_flag = LAYOUTS["dropless"]
    for number, flags in enumerate([with_flag.replace(GROUPED, ""), with_flag], 1):
        place = tmp_path / str(number)
        assert assert_saved_as_loaded(checkpoint, place, tmp_path / f"run{number}", flags)
        checkpoint = place


@pytest.mark.parametrize(
    ("layout", "ranks", "flags"),
    [
        ("dense", 1, "--data-parallel-sharding-strategy optim_grads"),
        ("dense", 2, "--tensor-model-parallel-size 2 --no-load-rng"),
        ("dense", 4, INSTANCES),
        ("dropless", 2, "--data-parallel-sharding-strategy optim"),
        ("dropless", 4, "--expert-model-parallel-size 2"),
    ],
)
def test_checkpoint_loads_with_another_sharding(saved, tmp_path, layout, ranks, flags):
    checkpoint, _ = saved(layout, EAGER)
    assert assert_saved_as_loaded(
        checkpoint, tmp_path / "saved", tmp_path / "run", f"{LAYOUTS[layout]} {flags}", ranks=ranks
    )


@pytest.mark.parametrize(
    ("layout", "ranks", "flags"),
    [
        ("experts", 4, ""),
        ("experts", 1, "--expert-model-parallel-size 1"),
        ("dropless", 4, "--expert-model-parallel-size 4"),
    ],
)
def test_experts_resume_on_other_numbers_of_ranks(saved, tmp_path, layout, ranks, flags):
    checkpoint, _ = saved(layout, "model")
    flags = f"{COMMON} {LAYOUTS[layout]} {flags} --load {checkpoint} --ckpt-step {SAVED}"
    (_, *eager), (steps, *graphed) = (run(tmp_path / kind, flags, kind, ranks) for kind in (EAGER, "model"))
    assert len(steps) == STEPS - SAVED and steps[-1]["graphs"]
    assert graphed == eager


@pytest.mark.parametrize(
    "stages", ["stages", "tied_stages", "predicting_stages", "predicting_tied_stages", "virtual_stages"]
)
def test_checkpoint_of_stages_loads_without_stages_and_back(saved, tmp_path, stages):
    checkpoint, _ = saved(stages, EAGER)
    layout = LAYOUTS[stages]
    without = layout.replace("--pipeline-model-parallel-size 2", "").replace(
        "--num-layers-per-virtual-pipeline-stage 1", ""
    )
    # A checkpoint of one stage has no RNG states for a second stage.
    for number, flags in enumerate([without, f"{layout} --no-load-rng"], 1):
        place = tmp_path / str(number)
        read = assert_saved_as_loaded(checkpoint, place, tmp_path / f"run{number}", flags)
        assert len({key for key in read if "model.module.decoder" in key and "linear_proj.weight" in key}) == 4
        checkpoint = place
