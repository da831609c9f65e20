"""Test that megatron.training accepts the flags of the launch scripts."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

import torch

from megatron.training.arguments import parse_args, validate_args

pytestmark = pytest.mark.sampled

ROOT = Path(__file__).resolve().parents[3]
# Graph modes of each script, and their --cuda-graph-impl.
SCRIPTS = {
    "launch_gpt.sh": (["graphed"], "transformer_engine"),
    "launch_moe.sh": (["graphed", "whole"], "transformer_engine"),
}
MODES = [(script, mode) for script, (modes, _) in SCRIPTS.items() for mode in modes]


def run(script, *arguments: str, tmp_path, **environment: str) -> subprocess.CompletedProcess:
    """Run a script with a fake torchrun that prints one argument per line."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
    command = ["bash", script, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def launched(examples, tmp_path):
    def launch(name: str, *arguments: str, **environment: str):
        """Run a script; return the arguments of torchrun, and the arguments of pretrain_gpt.py."""
        given = run(examples / name, *arguments, tmp_path=tmp_path, **environment).stdout.splitlines()
        at = given.index(str(examples / "pretrain_gpt.py"))
        return given[:at], given[at + 1 :]

    return launch


@pytest.fixture
def validated(monkeypatch):
    def validate(flags: list[str], gpus: int):
        """Parse and validate ``flags`` as rank 0 of ``gpus`` Hopper GPUs would."""
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        for name, value in (("RANK", "0"), ("WORLD_SIZE", str(gpus))):
            monkeypatch.setenv(name, value)
        return validate_args(parse_args())

    return validate


@pytest.mark.parametrize(("script", "mode"), [*((script, "eager") for script in SCRIPTS), *MODES])
def test_megatron_accepts_the_flags(launched, validated, script, mode):
    impl = SCRIPTS[script][1]
    launcher, flags = launched(script, mode, GPUS="4")
    assert launcher == ["--standalone", "--nproc-per-node", "4"]
    args = validated(flags, gpus=4)
    assert args.cuda_graph_impl == ("none" if mode == "eager" else impl)
    assert args.mock_data
    if impl == "transformer_engine":
        assert args.use_megatron_fsdp
        assert args.data_parallel_sharding_strategy == "optim_grads_params"


@pytest.mark.parametrize(("script", "mode"), MODES)
def test_modes_differ_in_graphs_only(launched, validated, script, mode):
    flags = ["--moe-use-grouped-tensor"] if mode == "whole" else []
    modes = ("eager", *flags), (mode,)
    eager, graphed = (vars(validated(launched(script, *mode)[1], gpus=2)) for mode in modes)
    differing = {name for name in eager if eager[name] != graphed[name]}
    allowed = {"cuda_graph_impl", "cuda_graph_warmup_steps", "cuda_graph_modules", "inference_cuda_graph_scope"}
    assert differing <= allowed
    assert "cuda_graph_impl" in differing


@pytest.mark.parametrize(("script", "mode"), MODES)
def test_data_and_further_flags_are_forwarded(launched, validated, script, mode):
    flags = launched(script, mode, "--train-iters", "7", DATA="data/my set")[1]
    args = validated(flags, gpus=2)
    assert args.data_path == ["data/my set"]
    assert args.train_iters == 7


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_several_hosts_form_one_job(examples, launched, tmp_path, script, rank):
    hosts = {"NNODES": "2", "NODE_RANK": rank, "MASTER_ADDR": "host0", "GPUS": "4"}
    launcher, flags = launched("launch_nodes.sh", script, "eager", "--seed", "7", **hosts)
    is_host = {"0": "true", "1": "false"}[rank]
    rendezvous = f"--rdzv-backend c10d --rdzv-endpoint host0:29500 --rdzv-id train --rdzv-conf is_host={is_host}"
    assert launcher == f"--nnodes 2 {rendezvous} --max-restarts 0 --nproc-per-node 4".split()
    alone = launched(script, "eager", "--seed", "7", GPUS="4")[1]
    batch = alone.index("--global-batch-size") + 1
    assert flags == [*alone[:batch], str(2 * int(alone[batch])), *alone[batch + 1 :]]


@pytest.mark.parametrize("missing", ["NNODES", "NODE_RANK", "MASTER_ADDR"])
def test_missing_variable_of_a_host_is_named(examples, tmp_path, missing):
    hosts = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "host0"} | {missing: ""}
    done = run(examples / "launch_nodes.sh", "launch_gpt.sh", "eager", tmp_path=tmp_path, **hosts)
    assert done.returncode
    assert f"{missing}: set it to" in done.stderr


def test_slurm_starts_every_host(examples, tmp_path):
    # More names than fit in a pipe: scontrol is still writing after its first line is read.
    for name, text in {"scontrol": "seq --format host%.0f 0 20000", "srun": 'SLURM_NODEID=1 "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "17",
        "SLURM_GPUS_ON_NODE": "8",
    }
    done = run("examples/launch.sbatch", "launch_gpt.sh", "graphed", "--seed", "7", tmp_path=tmp_path, **slurm)
    assert done.returncode == 0, done.stderr
    given = done.stdout.split()
    assert given[given.index("--rdzv-endpoint") + 1] == "host0:29500"
    assert given[given.index("--rdzv-id") + 1] == "17"
    assert given[given.index("--nproc-per-node") + 1] == "8"
    assert "is_host=false" in given
    assert given[-2:] == ["--seed", "7"]
