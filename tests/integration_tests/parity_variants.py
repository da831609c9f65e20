"""The variants that are trained with megatron-core's own ``MegatronFSDP`` and with ours."""

from itertools import product

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
            small(strategy=strategy, dtype=dtype, microbatches=microbatches)
        )
        for strategy, (dtype, microbatches) in product(STRATEGIES, (("fp32", 1), ("bf16", 2)))
    },
    **{
        f"{strategy}, fine-grained hooks": Variant(small(strategy=strategy, microbatches=2), fsdp=FINE_FORWARD)
        for strategy in ("optim_grads", "optim_grads_params")
    },
    **{
        f"{strategy}, layers are units": Variant(small(strategy=strategy, microbatches=2), fsdp=LAYERS_ARE_UNITS)
        for strategy in STRATEGIES[:-1]
    },
    "full recompute": Variant(small(dropout=0.1), config=FULL_RECOMPUTE),
    "full recompute, fine-grained hooks, both": Variant(small(dropout=0.1), config=FULL_RECOMPUTE, fsdp=FINE_BOTH),
    "many layers, gradients checked for NaN": Variant(
        small(layers=5, microbatches=2), fsdp={"report_nan_in_param_grad": True}
    ),
    "experts": Variant(small(experts=4, shared_experts=32)),
    "frozen parameters": Variant(change=freeze_embedding),
    "shared parameters": Variant(small(microbatches=2), **SHARED),
    "delayed weight gradients": Variant(change=delay_weight_gradients),
    "synchronized after every backward": Variant(fsdp={"sync_model_each_microbatch": True}),
    "hybrid, optim": Variant(small(strategy="optim", microbatches=2), sharding=HYBRID),
    "hybrid, optim_grads_params": Variant(small(double_buffer=False, microbatches=2), sharding=HYBRID),
    "hybrid, sharded outside too": Variant(
        small(double_buffer=False, microbatches=2), sharding=HYBRID | {"outer_dp_sharding_strategy": "optim"}
    ),
}
