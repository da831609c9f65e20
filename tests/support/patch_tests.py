"""The tests of each patch of the series, by its title.

Files below ``tests/unit_tests``, and folders, of which those tests are meant that need no more than there is; and which
of these tests, as pytest's ``-k``, empty for all.
"""

GRAPHS = "core/transformer/_cuda_graphs/"
TESTS: dict[str, tuple[tuple[str, ...], str]] = {
    "Megatron-FSDP: each model has double buffers of its own": (
        ("core/distributed/test_buffer_names.py",),
        "two_models",
    ),
    "Megatron-FSDP: a gradient bucket is not written while a reduction reads it": (
        ("core/distributed/test_grad_reduce_pipeline.py",),
        "",
    ),
    "Megatron-FSDP: gradients that a rank has whole are scaled once in a step": (
        ("core/distributed/test_unsharded_gradients.py",),
        "scaled or dtype",
    ),
    "Megatron-FSDP: collectives can average gradients": (
        ("core/distributed/test_averaging_collectives.py",),
        "",
    ),
    "Megatron-FSDP: the gradients' norm counts each element once": (
        ("core/distributed/test_counted_ranks.py",),
        "not norms_are",
    ),
    "Megatron-FSDP: checkpoints have the states of empty shards, and the loss scale": (
        ("core/optimizer/test_empty_shards.py",),
        "",
    ),
    "Megatron-FSDP: checkpoints load without the optimizer's states": (
        ("core/optimizer/test_distrib_optimizer.py",),
        "taken_over or takes_over",
    ),
    "Megatron-FSDP: meshes have the ranks of a pipeline stage": (
        ("core/distributed/test_mcore_fsdp_adapter.py",),
        "not megatron_cores",
    ),
    "Megatron-FSDP: checkpoints name a pipeline stage's layers as the whole model does": (
        ("core/distributed/test_global_names.py",),
        "",
    ),
    "Megatron-FSDP: two pipeline stages can have the embedding": (
        ("core/distributed/test_finalize_model_grads.py",),
        "embedding",
    ),
    "Fused rotary kernels of multi-latent attention have fixed block sizes": (
        ("core/fusions/test_fused_mla_yarn_rope_apply.py",),
        "",
    ),
    "Attention without TransformerEngine takes the sizes of multi-latent attention": (
        ("core/transformer/test_dot_product_attention.py",),
        "",
    ),
    "Reruns draw the same random numbers from generators that CUDA graphs use": (
        ("core/test_rerun_state_machine.py",),
        "draws or runs_again",
    ),
    "Dataset helpers that are compiled are not compiled again": (
        ("core/datasets/test_compile_helpers.py",),
        "",
    ),
    "Capture engine with hooks that run outside capture": (
        (f"{GRAPHS}engine", f"{GRAPHS}test_hooks.py"),
        "",
    ),
    "Megatron-FSDP with named hooks, which run around graphs": (
        tuple(f"core/distributed/test_{name}.py" for name in ("fsdp_hooks", "gradient_storages", "sharded_parameters")),
        "",
    ),
    "Flags of CUDA graphs that do not fit are named before anything runs": (
        (f"{GRAPHS}test_flags.py",),
        "",
    ),
    "--moe-use-grouped-tensor: dropless experts of which the host knows no number of tokens": (
        ("core/transformer/moe",),
        "",
    ),
    "What a replay would not notice is compared before it": (
        (
            "core/transformer/test_module.py",
            *(f"{GRAPHS}test_{name}.py" for name in ("attribute_reads", "layer_graph", "packed_sequences")),
            f"{GRAPHS}test_replay_conditions.py",
        ),
        "",
    ),
    "A report on a capture: log, page, JSON": (
        (f"{GRAPHS}report",),
        "",
    ),
    "--cuda-graph-impl transformer_engine: graphs of layers and of the model, also under Megatron-FSDP": (
        (
            f"{GRAPHS}te",
            "core/models",
            *(
                f"core/transformer/test_{name}.py"
                for name in ("module", "multi_token_prediction", "transformer_config")
            ),
        ),
        "",
    ),
    "--cuda-graph-impl local by the same engine": (
        ("core/transformer/test_cuda_graphs.py", f"{GRAPHS}local"),
        "",
    ),
    "The rest of the step costs the host less": (
        ("core/optimizer/test_local_shards.py", "core/test_host_agreement.py"),
        "",
    ),
}
