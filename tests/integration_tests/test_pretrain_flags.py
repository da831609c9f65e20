"""Flags that build another model: ``examples/pretrain_gpt.py`` under Megatron-FSDP, on two CPU ranks.

With a graph per layer, losses and gradient norms are those of eager training, bit for bit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import OWN

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
STEPS = 6
FLAGS = """
    --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-workers 0
    --eval-iters 0 --eval-interval 1000 --log-interval 1 --distributed-backend gloo --te-rng-tracker
    --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-reduce-div-fusion
    --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer
    --ckpt-format fsdp_dtensor --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
"""
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 2"


def train(flags: str, metrics: Path) -> list[dict]:
    """Train and return the metrics of each step, without times."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "megatron_fsdp_cuda_graphs.cpu_backend", str(EXAMPLE)),
            *f"{FLAGS} --train-iters {STEPS} {flags}".split(),
        ],
        env=os.environ | OWN | {"CUDA_VISIBLE_DEVICES": "", "STEP_METRICS_PATH": str(metrics)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def heterogeneous(tmp_path_factory):
    """Flags of a model of four layers: the second has no attention, the third no MLP."""

    def layer(attention: bool, multiple: float | None) -> dict:
        return {
            "attention": {"n_heads_in_group": 2 if attention else None, "no_op": not attention},
            "ffn": {"ffn_mult": multiple, "no_op": multiple is None},
        }

    path = tmp_path_factory.mktemp("heterogeneous") / "layers.json"
    path.write_text(
        json.dumps(
            {
                "hidden_act": "silu",
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "tie_word_embeddings": False,
                "rope_theta": 10000,
                "rope_scaling": {"factor": 8.0},
                "block_configs": [layer(True, 1.0), layer(False, 2.0), layer(True, None), layer(True, 1.0)],
            }
        )
    )
    return f"""
        --heterogeneous-layers-config-path {path} --num-layers 4 --swiglu --normalization RMSNorm
        --group-query-attention --num-query-groups 2 --position-embedding-type rope --use-rotary-position-embeddings
        --use-rope-scaling --rope-scaling-factor 8.0 --untie-embeddings-and-output-weights --disable-bias-linear
    """


@pytest.fixture(scope="module")
def eager(heterogeneous, tmp_path_factory):
    return train(f"{heterogeneous} --cuda-graph-impl none", tmp_path_factory.mktemp("eager") / "metrics")


@pytest.mark.parametrize(("modules", "graphs"), [("", 4), ("--cuda-graph-modules attn", 3)], ids=["whole", "attn"])
def test_layers_of_several_kinds_train_bit_for_bit_as_eager(heterogeneous, eager, tmp_path, modules, graphs):
    found = train(f"{heterogeneous} {GRAPHS} {modules}", tmp_path / "metrics")
    assert len(eager) == STEPS
    for key in ("loss_hex", "grad_norm_hex", "skipped"):
        assert [step[key] for step in found] == [step[key] for step in eager]
    assert [step["graphs"] for step in found] == [0] * 2 + [graphs] * (STEPS - 2)
