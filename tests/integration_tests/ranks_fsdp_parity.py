"""Train variants with megatron-core's ``MegatronFSDP`` and ours on two ranks, and print the differences as JSON.

Run by test_fsdp_parity.py. The first argument lists the variants as JSON.
"""

import gc
import json
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.trainings.training import Trace, train
from tests.unit_tests.core.distributed.fsdp_variants import (
    FINE_BOTH,
    FINE_FORWARD,
    FULL_RECOMPUTE,
    LAYERS_ARE_UNITS,
    SHARED,
    STRATEGIES,
    Variant,
    delay_weight_gradients,
    freeze_embedding,
    small,
)

HYBRID = {"num_distributed_optimizer_instances": 2}

VARIANTS = {
    **{
        f"{strategy}, {dtype}, {microbatches} micro-batches": Variant(
            small(data_parallel_sharding_strategy=strategy, dtype=dtype, microbatches=microbatches)
        )
        for strategy, (dtype, microbatches) in zip(STRATEGIES, [("bf16", 2)] * 3 + [("fp32", 1)], strict=True)
    },
    "fine-grained hooks": Variant(small(microbatches=2), fsdp=FINE_FORWARD),
    "layers are units": Variant(
        small(data_parallel_sharding_strategy="optim_grads", microbatches=2), fsdp=LAYERS_ARE_UNITS
    ),
    "full recompute, fine-grained hooks, both": Variant(small(dropout=0.1), config=FULL_RECOMPUTE, fsdp=FINE_BOTH),
    "many layers, gradients checked for NaN": Variant(
        small(layers=5, microbatches=2), fsdp={"report_nan_in_param_grad": True}
    ),
    "experts": Variant(small(experts=4, moe_shared_expert_intermediate_size=32)),
    "frozen parameters": Variant(change=freeze_embedding),
    "shared parameters": Variant(small(microbatches=2), **SHARED),
    "delayed weight gradients": Variant(change=delay_weight_gradients),
    "synchronized after every backward": Variant(fsdp={"sync_model_each_microbatch": True}),
    "hybrid, optim": Variant(small(data_parallel_sharding_strategy="optim", microbatches=2), sharding=HYBRID),
    "hybrid, sharded outside too": Variant(
        small(fsdp_double_buffer=False, microbatches=2), sharding=HYBRID | {"outer_dp_sharding_strategy": "optim"}
    ),
}


def trained(variant: Variant, *, upstream: bool) -> Trace:
    """Train the variant with megatron-core's class or ours."""
    with variant.in_place(upstream=upstream):
        return train(variant.case, graphs=False)


def compare(variant: Variant) -> dict:
    """Return the differences and losses of this rank, or the traceback of a failure."""
    try:
        theirs, ours = trained(variant, upstream=True), trained(variant, upstream=False)
    except Exception:
        return {"error": traceback.format_exc()}
    return {"differences": theirs.differences(ours), "losses": ours.losses}


def main() -> None:
    """Compare all variants without HSDP, then all variants with HSDP."""
    dist.init_process_group("nccl")
    gc.freeze()  # exclude imported objects from garbage collection during model building
    for instances in (1, 2):
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        for name in json.loads(sys.argv[1]):
            variant = VARIANTS[name]
            if variant.sharding.get("num_distributed_optimizer_instances", 1) != instances:
                continue
            results: list = [None] * dist.get_world_size()
            dist.all_gather_object(results, compare(variant))
            if dist.get_rank() == 0:
                print(json.dumps({"variant": name, "ranks": results}), flush=True)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
