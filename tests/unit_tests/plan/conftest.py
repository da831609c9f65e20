"""Run ``plan`` in this process on the CPU backend."""

import argparse
import gc
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.support.ranks.on_cpu_backend import on_cpu_backend

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer "
    "--ckpt-format fsdp_dtensor --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail "
    "--no-gradient-accumulation-fusion"
)
GRAPHS = "--cuda-graph-impl transformer_engine --te-rng-tracker"
SIZES = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2"
TRAINING = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --lr 1e-3 --train-iters 10 --eval-iters 0 --bf16 "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--moe-shared-expert-intermediate-size 32 --disable-bias-linear"
)
DENSE = f"{FSDP} {GRAPHS} {SIZES} {TRAINING}"


@pytest.fixture(autouse=True, scope="module")
def _cpu_backend():
    with on_cpu_backend():
        from megatron.training import arguments

        # Building the parser is slow because megatron-core parses its own source.
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser("pretrain_gpt", allow_abbrev=False))
        with mock.patch.object(arguments, "add_megatron_arguments", return_value=parser):
            yield


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # set by the command


@pytest.fixture
def flags():
    """Yield a function that splits parts of a command line into a list of flags."""

    def split(*parts):
        return " ".join(parts).split()

    yield split
    gc.collect()  # models own their buffers
    gc.freeze()  # speeds up the next collection
