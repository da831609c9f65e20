"""Train small models under Megatron-FSDP eagerly on two ranks, and print the results.

`patched_checkout.py` compares the output with and without the patch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.trainings.case import Case
from tests.support.trainings.training import train

SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "sequence": 16, "steps": 3, "microbatches": 2}
CASES = {
    "double buffer": Case(**SMALL),
    "dropout": Case(**SMALL, dropout=0.1),
    "gradients sharded": Case.of(
        SMALL | {"data_parallel_sharding_strategy": "optim_grads", "fsdp_double_buffer": False}
    ),
    "experts": Case(**SMALL, experts=4, modules=("attn",)),
}


def main() -> None:
    """Train each case and print the losses, norms and weight checksums."""
    from megatron.core import parallel_state

    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    for name, case in CASES.items():
        trace = train(case, graphs=False)
        bits = [shard.detach().float().cpu().view(torch.int32).sum(dtype=torch.int64).item() for shard in trace.shards]
        of_ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (trace.losses, trace.grad_norms, bits))
        if dist.get_rank() == 0:
            print(f"{name}: {of_ranks}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
