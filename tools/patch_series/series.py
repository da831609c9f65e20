"""Which changes each patch makes, in the order in which they are applied.

A patch brings definitions or whole files that are named here, and the files of ours that these import. After each of
them everything can be imported, and eager training is what it was before, but for the fault that it mends.
"""

from dataclasses import dataclass, field

FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"


@dataclass(frozen=True)
class Patch:
    """A patch.

    Attributes:
        folder: The series that it is in, a folder.
        changes: Of modules of megatron-core the definitions that it changes, ``f`` and ``Class.m``.
        roots: It also brings all that there is below these paths in ``megatron``, as far as it is not there yet.
    """

    folder: str
    title: str
    why: str
    changes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    roots: tuple[str, ...] = ()


FAULTS = (
    Patch(
        "1-faults",
        "Megatron-FSDP: each model has double buffers of its own",
        "The allocators keep their buffers in a dictionary of the process, by a name that is the same for all "
        "models: a second model gathers its parameters to the buffers of the first, or replaces them by larger "
        "ones.",
        {f"{FSDP}.param_and_grad_buffer": ("FixedPoolAllocator.__init__", "MaxPoolAllocator.__init__")},
    ),
    Patch(
        "1-faults",
        "Megatron-FSDP: a gradient bucket is not written while a reduction reads it",
        "With double buffers a bucket is released as soon as its reduction is queued, and only the reduction "
        "stream waits for its end. The current stream, which runs ahead, then writes the next unit's gradients to "
        "that bucket.",
        {f"{FSDP}.param_and_grad_buffer": ("GradReducePipeline._enforce_double_buffer_limit",)},
    ),
    Patch(
        "1-faults",
        "Megatron-FSDP: gradients that a rank has whole are scaled once in a step",
        "They are those of experts where each rank has experts of its own, and all gradients where an instance of "
        "hybrid sharding is one rank. They accumulate in place and were scaled after each micro-batch, the "
        "earlier ones again with each later; where gradients are communicated in another dtype, they were added "
        "to themselves.",
        {
            f"{FSDP}.param_and_grad_buffer": (
                "DataParallelBuffer.reset_param_main_grad",
                "_create_hfsdp_helper_buffer",
                "ParamAndGradBuffer.__init__",
                "GradReducePipeline._bucket_group_gradient_reduce",
            ),
            f"{FSDP}.megatron_fsdp": ("MegatronFSDP.attach_grad_to_optimizer_state",),
        },
    ),
    Patch(
        "1-faults",
        "Megatron-FSDP: collectives can average gradients",
        "With average_in_collective the size of the experts' group was asked of dense models, which have none, and "
        "gradients of experts, averaged over the ranks that have them, were too large by the expert-parallel size.",
        {
            f"{FSDP}.param_and_grad_buffer": ("gradient_reduce_preprocessing",),
            f"{FSDP}.megatron_fsdp": ("MegatronFSDP._init_fsdp_param_and_grad_buffer",),
        },
    ),
    Patch(
        "1-faults",
        "Megatron-FSDP: the gradients' norm counts each element once",
        "It was summed over the ranks of an instance, which have only some of the shards with the outer strategy "
        "optim; and with no_shard over ranks that lack the experts of others, so that ranks clipped the same "
        "weights by different norms.",
        {
            OPTIMIZER: tuple(
                f"DistributedOptimizer.{name}"
                for name in ("get_grad_stats_parallel_group", "_filter_grads_for_norm", "count_zeros")
            )
        },
    ),
    Patch(
        "1-faults",
        "Megatron-FSDP: checkpoints have the states of empty shards, and the loss scale",
        "Saving and loading run collectives for each state, and ranks without an element of a parameter had none: "
        "they waited for each other. Without the loss scale a resumed run began with --initial-loss-scale again.",
        {
            OPTIMIZER: tuple(
                f"DistributedOptimizer.{name}" for name in ("sharded_param_state_fsdp_dtensor", "load_state_dict")
            )
        },
    ),
    Patch(
        "1-faults",
        "Megatron-FSDP: checkpoints load without the optimizer's states",
        "--finetune and --no-load-optim ended with a NotImplementedError if --bf16 or --fp16 was set: the optimizer's "
        "parameters were to be copied from the model's. They are what a checkpoint was read into.",
        {OPTIMIZER: ("DistributedOptimizer._copy_model_params_to_main_params",)},
    ),
    Patch(
        "1-faults",
        "Megatron-FSDP: meshes have the ranks of a pipeline stage",
        "They were laid over all ranks of the job, of which a pipeline stage has only some.",
        {
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter": ("_get_dp_tp_mesh", "_get_hsdp_tp_mesh"),
            f"{FSDP}.param_and_grad_buffer": ("make_fsdp_dtensor",),
        },
    ),
    Patch(
        "1-faults",
        "Megatron-FSDP: checkpoints name a pipeline stage's layers as the whole model does",
        "Each stage counted its layers from 0, and stages saved theirs over each other's. A checkpoint saved before "
        "the first optimizer step loads too.",
        {
            "megatron.training.checkpointing": (
                "get_rng_state",
                "generate_state_dict",
                "preprocess_fsdp_dtensor_state_dict",
                "_load_base_checkpoint",
            ),
            OPTIMIZER: ("DistributedOptimizer._param_name",),
        },
    ),
    Patch(
        "1-faults",
        "Megatron-FSDP: two pipeline stages can have the embedding",
        "Tied embeddings and multi-token prediction put it in the first and the last stage, which shard it alike. "
        "Their gradients were added up, and the sum, a plain tensor, took the place of the sharded gradient, where "
        "clipping ended with an error.",
        {"megatron.core.distributed.finalize_model_grads": ("_allreduce_embedding_grad",)},
    ),
    Patch(
        "1-faults",
        "Fused rotary kernels of multi-latent attention have fixed block sizes",
        "Autotuning picks the number of heads per program by time. Some choices race in place, some rotate heads of "
        "the next token, and each sums gradients of key positions in another order.",
        {
            "megatron.core.fusions.fused_mla_yarn_rope_apply": (
                "rotary_fwd_q_kernel",
                "rotary_bwd_q_kernel",
                "rotary_fwd_kv_kernel",
                "rotary_bwd_kv_kernel",
            )
        },
    ),
    Patch(
        "1-faults",
        "Attention without TransformerEngine takes the sizes of multi-latent attention",
        "MultiLatentAttention gives sizes of keys and values that DotProductAttention did not take: a TypeError.",
        {"megatron.core.transformer.dot_product_attention": ("DotProductAttention.__init__",)},
    ),
    Patch(
        "1-faults",
        "Reruns draw the same random numbers from generators that CUDA graphs use",
        "A rerun started from the generators, which had gone on, and not from their states.",
        {"megatron.core.rerun_state_machine": ("RerunStateMachine._save_state", "RerunStateMachine._restore_state")},
    ),
    Patch(
        "1-faults",
        "Dataset helpers that are compiled are not compiled again",
        "Wheels have the compiled helper and not the Makefile: without a check the process ended although there "
        "was nothing to build.",
        {"megatron.core.datasets.utils": ("compile_helpers",)},
    ),
)

GRAPHS = "core/transformer/_cuda_graphs/"
SERIES = (
    *FAULTS,
    Patch(
        "2-engine",
        "Capture engine with hooks that run outside capture",
        "make_graphed_callables with TransformerEngine's signature: hooks are taken away for capture, run around "
        "each pass and are restored; passes may be recorded in one graph. Nothing is captured with it yet.",
        roots=(f"{GRAPHS}engine/",),
    ),
    Patch(
        "3-fsdp",
        "Megatron-FSDP with named hooks, which run around graphs",
        "Its hooks are methods of one object, found by sentinels. Units whose passes are graphs have planned "
        "collectives; eager passes are what they were.",
        roots=("core/distributed/fsdp/",),
    ),
    Patch(
        "4-layers",
        "Flags of CUDA graphs that do not fit are named before anything runs",
        "One table says of each flag what does not fit it and what to do. Training reads it with its arguments.",
        roots=(f"{GRAPHS}flags/", "training/arg"),
    ),
    Patch(
        "4-layers",
        "--moe-use-grouped-tensor: dropless experts of which the host knows no number of tokens",
        "All experts of a layer are computed at once, with offsets that stay on the device, so that a graph can hold "
        "them. Parameters keep their names and shapes.",
        roots=("core/transformer/moe/", "core/pipeline_parallel/", "core/token_bounds.py"),
    ),
    Patch(
        "4-layers",
        "What a replay would not notice is compared before it",
        "Modes, hooks, parameters and the attributes that a forward pass reads are noted at capture. A layer calls its "
        "graphs if they are what they were, and runs eagerly if not.",
        roots=("core/transformer/module.py", "core/packed_seq_params.py"),
    ),
    Patch(
        "4-layers",
        "A report on a capture: log, page, JSON",
        "It has the time and memory of each captured pass, and what runs eagerly.",
        roots=(f"{GRAPHS}report/",),
    ),
    Patch(
        "4-layers",
        "--cuda-graph-impl transformer_engine: graphs of layers and of the model, also under Megatron-FSDP",
        "A replay goes through the layer's own call, so that its hooks run around it.",
        roots=(
            f"{GRAPHS}te/",
            "core/models/",
            "core/transformer/multi_token_prediction.py",
            "core/transformer/transformer_config.py",
        ),
    ),
    Patch(
        "5-local-graphs",
        "--cuda-graph-impl local by the same engine",
        "Layers run eagerly in the first step, which notes the order of passes; their graphs are captured in it.",
        roots=(GRAPHS, "core/transformer/"),
    ),
    Patch(
        "6-step",
        "The rest of the step costs the host less",
        "Batches, statistics and agreements that need no collective or no copy do without; the optimizer steps on "
        "local shards, and what it looks up in every step is looked up once.",
        roots=("core/", "training/"),
    ),
)
