"""Four ranks: the gradient norms of a model without instances of hybrid sharding, and with two that shard gradients.

Run by test_gradient_norms.py, which reads the JSON lines that the first rank prints.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.trainings.training import train
from tests.unit_tests.core.distributed.fsdp_variants import Variant, small

# With each layout the arguments of its process groups, and its case.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data parallel": ({}, {}),
    "tensor parallel": ({"tensor_model_parallel_size": 2}, {}),
    "expert parallel": ({"expert_model_parallel_size": 2}, {"experts": 4}),
}


def norms(groups: dict[str, int], changes: dict[str, Any], instances: int) -> list[list[float]]:
    """Train with so many instances, and return the norms of each rank."""
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances, **groups)
    outer = "optim" if instances > 1 else "no_shard"
    sharding = {"num_distributed_optimizer_instances": instances, "outer_dp_sharding_strategy": outer}
    with Variant(sharding=sharding).in_place(upstream=False):
        trace = train(small(double_buffer=False, steps=2, **changes), graphs=False)
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, trace.grad_norms)
    parallel_state.destroy_model_parallel()
    return of_ranks


def main() -> None:
    """Train in every layout."""
    dist.init_process_group("nccl")
    gc.freeze()  # building a model collects garbage: spare it what the imports left
    for name, (groups, changes) in LAYOUTS.items():
        found = {"layout": name, "alone": norms(groups, changes, 1), "instances": norms(groups, changes, 2)}
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
