"""Train on two ranks with one micro-batch per step, and with the same micro-batch several times per step.

Run by test_unsharded_gradients.py with the layout's name as JSON; the first rank prints the result as JSON.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.layers.fused_gradients import fused_kernels
from tests.support.trainings import training
from tests.support.trainings.case import Case
from tests.support.trainings.training import Trace, train
from tests.unit_tests.core.distributed.fsdp_variants import Variant, small

MICROBATCHES = 4  # the mean of four equal losses is exact
EXPERTS: dict[str, Any] = {"experts": 4, "modules": ("attn",)}
IN_BF16: dict[str, Any] = {"megatron_fsdp_grad_comm_dtype": torch.bfloat16}
AVERAGED: dict[str, Any] = {"average_in_collective": True}
OVERWRITTEN = "nothing sharded, fused"  # does not accumulate micro-batches
REFUSED_WITH_GRAPHS = ("optimizer states sharded, fused", OVERWRITTEN)
# Arguments of the process groups, of the case, and of `DistributedDataParallelConfig`
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "two shards": ({}, {}, {}),
    "experts of each rank": ({"expert_model_parallel_size": 2}, EXPERTS, {}),
    "experts of each rank, gradients sharded": (
        {"expert_model_parallel_size": 2},
        EXPERTS | {"data_parallel_sharding_strategy": "optim_grads"},
        {},
    ),
    "experts of each rank, gradients sent in bf16": (
        {"expert_model_parallel_size": 2},
        EXPERTS,
        IN_BF16,
    ),
    "experts of each rank, fused": (
        {"expert_model_parallel_size": 2},
        EXPERTS | {"gradient_accumulation_fusion": True},
        {},
    ),
    "optimizer states sharded, fused": (
        {},
        {"data_parallel_sharding_strategy": "optim", "gradient_accumulation_fusion": True},
        {},
    ),
    OVERWRITTEN: ({}, {"data_parallel_sharding_strategy": "no_shard", "gradient_accumulation_fusion": True}, {}),
    "experts of each rank, nothing sharded": (
        {"expert_model_parallel_size": 2},
        EXPERTS | {"data_parallel_sharding_strategy": "no_shard"},
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
AVERAGING = (
    "two shards",
    "experts of each rank",
    "experts of each rank, nothing sharded",
    "two instances, no_shard",
)
for _name in AVERAGING:
    _groups, _case, _sharding = LAYOUTS[_name]
    LAYOUTS[f"{_name}, averaged"] = _groups, _case, _sharding | AVERAGED


def equal_batches(case: Case, step: int) -> Iterator[Any]:
    """Yield the first micro-batch of ``step``, ``case.microbatches`` times."""
    return repeat(next(batches(replace(case, microbatches=1), step)), case.microbatches)


batches = training._batches


def results(case: Case, sharding: dict[str, Any], graphs: bool) -> dict:
    """Train with one micro-batch, then with equal micro-batches, then with equal micro-batches and ``graphs``.

    Return the differences between consecutive runs, or the traceback of a failure.
    """

    def trained(case: Case, graphs: bool = False) -> Trace:
        with_equal_batches = mock.patch.object(training, "_batches", equal_batches)
        with_megatrons_kernels = mock.patch.object(training, "fused_kernels", partial(fused_kernels, False))
        with Variant(sharding=sharding).in_place(upstream=False), with_equal_batches, with_megatrons_kernels:
            return train(case, graphs=graphs)

    try:
        once, often = trained(case), trained(replace(case, microbatches=MICROBATCHES))
        graphed = trained(replace(case, microbatches=MICROBATCHES), graphs=graphs)
    except Exception:
        return {"error": traceback.format_exc()}
    return {
        # MoE metrics are sums over micro-batches.
        "differences": once.differences(replace(often, logged=once.logged)),
        "of graphs": often.differences(graphed),
        "replays": graphed.replays,
        "grad_norms": once.grad_norms,
    }


def main() -> None:
    """Train in the layout given on the command line."""
    dist.init_process_group("nccl")
    name = json.loads(sys.argv[1])
    groups, changes, sharding = LAYOUTS[name]
    parallel_state.initialize_model_parallel(**groups)
    of_ranks: list = [None] * dist.get_world_size()
    case = small(fsdp_double_buffer=True, warmup=2, steps=4, **changes)
    dist.all_gather_object(of_ranks, results(case, sharding, name not in REFUSED_WITH_GRAPHS))
    if dist.get_rank() == 0:
        print(json.dumps({"ranks": of_ranks}), flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
