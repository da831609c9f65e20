"""Define the variants to train with megatron-core's ``MegatronFSDP`` and with ours."""

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
