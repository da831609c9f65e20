"""Test that ranks of two torchrun agents train like ranks of one agent, and resume after a rank is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.documents import write_documents
from tests.support.pretraining.pretrain import BATCH, FLAGS, GRAPHS, SCRIPT, numbers, pretrain, steps_in
from tests.support.ranks.forked_ranks import OWN

LAUNCH_NODES = Path(__file__).resolve().parents[2] / "examples" / "launch_nodes.sh"
STEPS = "--train-iters 8 --cuda-graph-warmup-steps 1"
TIMEOUT = 1200  # seconds

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="agents of the CPU backend"),
]


class Agents:
    """Two agents on this host, each with one rank of ``examples/pretrain_gpt.py``."""

    def __init__(self, folder: Path, flags: str, data: Path, **variables: str) -> None:
        folder.mkdir()
        script = folder / "train.sh"
        command = (
            f"-m torch.distributed.run $LAUNCHER --nproc-per-node 1 -m megatron_fsdp_cuda_graphs.cpu_backend {SCRIPT}"
        )
        given = f"{FLAGS} {BATCH} {GRAPHS[True]} --data-path {data} {flags}"
        script.write_text(f"#!/bin/sh\nexec {sys.executable} {command} {' '.join(given.split())}\n")
        script.chmod(0o755)
        self.metrics, self.logs = folder / "metrics.jsonl", [folder / "log0", folder / "log1"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        common |= {"STEP_METRICS_PATH": str(self.metrics), **OWN, **variables}
        self._agents = [
            subprocess.Popen(
                ["bash", LAUNCH_NODES, script],
                env=os.environ | common | {"NODE_RANK": str(rank)},
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(self.logs)
        ]

    def kill_a_rank_after(self, step: int) -> None:
        """Kill the first agent's rank after ``step`` steps."""
        end = time.monotonic() + TIMEOUT
        while len(steps_in(self.metrics)) < step and self._agents[0].poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        children = Path(f"/proc/{self._agents[0].pid}/task/{self._agents[0].pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)

    def ended(self) -> list[dict]:
        """Wait for the agents and return the metrics of each step of the last attempt."""
        statuses = [agent.wait(TIMEOUT) for agent in self._agents]
        assert statuses == [0, 0], "\n".join(log.read_text(errors="replace")[-3000:] for log in self.logs)
        return steps_in(self.metrics)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


@pytest.fixture(scope="module")
def of_one_agent(tmp_path_factory, data):
    return numbers(pretrain(tmp_path_factory.mktemp("one") / "run", STEPS, graphs=True, data=data))


def test_two_agents_train_like_one(tmp_path, data, of_one_agent):
    steps = Agents(tmp_path / "run", STEPS, data).ended()
    assert numbers(steps) == of_one_agent
    assert steps[-1]["graphs"]


def test_job_resumes_after_a_rank_is_killed(tmp_path, data):
    def checkpoints(folder):  # --load rounds the initial weights even without a checkpoint.
        return f"{STEPS} --save {tmp_path / folder} --load {tmp_path / folder} --save-interval 2"

    whole = numbers(pretrain(tmp_path / "one", checkpoints("of_one"), graphs=True, data=data))
    agents = Agents(tmp_path / "two", checkpoints("of_two"), data, MAX_RESTARTS="1")
    agents.kill_a_rank_after(5)
    rest = numbers(agents.ended())  # the second attempt overwrites the metrics
    assert 1 < len(rest) < len(whole)
    assert rest == whole[-len(rest) :]


def test_hsdp_on_eight_ranks_resumes_from_a_checkpoint(tmp_path, data):
    instances = "--num-distributed-optimizer-instances 2 --overlap-grad-reduce --overlap-param-gather"
    flags = f"{STEPS} --micro-batch-size 1 {instances}"
    saved = f"--save {tmp_path / 'saved'} --save-interval 4"
    eager = pretrain(tmp_path / "eager", flags, graphs=False, data=data, ranks=8)
    first = pretrain(tmp_path / "first", f"{flags} {saved} --exit-interval 4", graphs=True, data=data, ranks=8)
    rest = pretrain(tmp_path / "rest", f"{flags} --load {tmp_path / 'saved'}", graphs=True, data=data, ranks=8)
    assert numbers([*first, *rest]) == numbers(eager)
    assert first[-1]["graphs"]
    assert rest[-1]["graphs"]
