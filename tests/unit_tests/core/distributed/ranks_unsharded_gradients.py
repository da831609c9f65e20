"""Two ranks: trains in layouts of ranks with one micro-batch in a step, and with the same one several times.

Run by test_unsharded_gradients.py, which reads the JSON lines that the first rank prints.
"""

import gc
import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from tests.support import training
from tests.support.case import Case
from tests.support.training import Trace, train
from tests.unit_tests.core.distributed.fsdp_variants import Variant, small

MICROBATCHES = 4  # the mean of four equal losses is exactly each of them
EXPERTS: dict[str, Any] = {"experts": 4, "modules": ("attn",)}
IN_BF16: dict[str, Any] = {"megatron_fsdp_grad_comm_dtype": torch.bfloat16}
# With each layout the arguments of its process groups, its case, and how gradients are sharded.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "two shards": ({}, {}, {}),
    "experts of each rank": ({"expert_model_parallel_size": 2}, EXPERTS, {}),
    "experts of each rank, gradients sharded": (
        {"expert_model_parallel_size": 2},
        EXPERTS | {"strategy": "optim_grads"},
        {},
    ),
    "experts of each rank, gradients sent in bf16": (
        {"expert_model_parallel_size": 2},
        EXPERTS,
        IN_BF16,
    ),
    "experts of each rank, nothing sharded": (
        {"expert_model_parallel_size": 2},
        EXPERTS | {"strategy": "no_shard"},
        {},
    ),
    **{
        f"two instances, {outer}{sent}": (
            {"num_distributed_optimizer_instances": 2},
            {},
            {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer} | dtype,
        )
        for outer in ("no_shard", "optim")
        for sent, dtype in (("", {}), (", gradients sent in bf16", IN_BF16))
    },
}


def equal_batches(case: Case, step: int) -> Iterator[Any]:
    """The first micro-batch of ``step`` as often as it has micro-batches."""
    return repeat(next(batches(replace(case, microbatches=1), step)), case.microbatches)


batches = training._batches


def results(case: Case, sharding: dict[str, Any]) -> dict:
    """The numbers of this rank, and where runs differ that should not; or the error."""

    def trained(case: Case, graphs: bool = False) -> Trace:
        with_equal_batches = mock.patch.object(training, "_batches", equal_batches)
        with Variant(sharding=sharding).in_place(upstream=False), with_equal_batches:
            return train(case, graphs=graphs)

    try:
        once, often = trained(case), trained(replace(case, microbatches=MICROBATCHES))
        graphed = trained(replace(case, microbatches=MICROBATCHES), graphs=True)
    except Exception:
        return {"error": traceback.format_exc()}
    return {
        "differences": once.differences(often),
        "of graphs": often.differences(graphed),
        "replays": graphed.replays,
        "grad_norms": once.grad_norms,
    }


def main() -> None:
    """Train in every layout."""
    dist.init_process_group("nccl")
    gc.freeze()  # building a model collects garbage: spare it what the imports left
    for name, (groups, changes, sharding) in LAYOUTS.items():
        parallel_state.initialize_model_parallel(**groups)
        of_ranks: list = [None] * dist.get_world_size()
        case = small(double_buffer=True, warmup=2, steps=4, **changes)
        dist.all_gather_object(of_ranks, results(case, sharding))
        if dist.get_rank() == 0:
            print(json.dumps({"layout": name, "ranks": of_ranks}), flush=True)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
