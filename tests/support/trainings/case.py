"""What a training run of a small model is: its model, what is captured, and how its steps change."""

import dataclasses
from dataclasses import dataclass

import torch

VOCABULARY = 128
EVALUATION = 10_000  # the batches of evaluations are those of this step and the ones after it


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        vision: Whether the model is a vision encoder (``vision_training``) rather than a GPT.
        captions: Whether the GPT reads the features of a vision encoder too, and both have graphs.
        pattern: ``--hybrid-layer-pattern`` of a hybrid model (``hybrid_training``) rather than a GPT; says ``layers``
            and ``mtp`` too.
        dtype: ``fp32``, ``bf16`` or ``fp16``; the last with a dynamic loss scale that is too great at first.
        dropout: Probability of hidden and attention dropout.
        microbatches: Micro-batches in a step.
        passes: Forward passes of a micro-batch before their backward passes.
        microbatches_later: Micro-batches from the second step after capture on; 0 for no change.
        modules: ``cuda_graph_modules``; empty for whole layers.
        holds: What a graph holds at most: the whole ``model``, all layers of its ``decoder``, or each ``layer``;
            None for the default.
        experts: MoE experts; 0 for a dense model.
        moe_layer_freq: 1 for experts in every layer, or 1 and 0 for layers with and without.
        shared_experts: Hidden size of the shared experts; 0 for none.
        shared_overlap: Whether shared experts run beside the dispatch of tokens.
        ep_overlap: Whether the tokens of one micro-batch travel between experts while another one is computed.
        delay_wgrad: Whether weight gradients are computed in passes of their own; with ``ep_overlap``.
        capacity: Tokens of an expert relative to an even share; tokens beyond it are dropped, missing ones padded. None
            for as many as the router sends.
        grouped_tensor: Whether only the device knows how many (--moe-use-grouped-tensor).
        dispatcher: ``moe_token_dispatcher_type``.
        unbalanced: Whether the bias of experts sends all tokens to the first ones and none to the others.
        config: Further values of the configuration, each as ``name=value``.
        transformer_engine: Whether layers are TransformerEngine's rather than Megatron's own.
        fsdp: Whether the model is under Megatron-FSDP rather than DistributedDataParallel.
        torch_fsdp: Whether it is under torch's FSDP2 rather than either.
        reshard: Whether FSDP2 frees gathered parameters between forward and backward.
        overlap_param_gather: Whether parameters are gathered where forward needs them, rather than by the optimizer.
        mtp: Layers of multi-token prediction.
        virtual: Model chunks of each pipeline stage; None where the pipeline does not interleave chunks.
        bucket: Parameters in a gradient bucket of DistributedDataParallel; few, so that a model has several.
        positions: ``position_embedding_type``.
        masked_step: The only step whose calls give an attention mask, which hides more than the causal one; None for
            the causal mask in every call.
        packed: Sequences of random lengths that are packed in a micro-batch, at most; 0 for one row for each.
        latent_attention: Whether attention is multi-latent.
        tied: Whether the output layer has the embedding's weights.
        strategy: Megatron-FSDP's sharding strategy.
        instances: Groups of ranks that shard, as many as ``--instances`` of ``compare_runs`` says.
        outer: How these shard further among them (--outer-dp-sharding-strategy).
        double_buffer: Whether parameters are gathered to, and gradients reduced from, fixed buffers.
        max_pool: Whether units of any size have those (megatron_fsdp_max_pool_double_buffer), not only equal ones.
        unchecked: Whether graphs are attempted without what Megatron-FSDP needs for them.
        fp8_params: Whether parameters are kept, and gathered, in FP8; with ``fp8``.
        nccl_ub: Whether Megatron-FSDP's buffers are registered with NCCL.
        averaged: Whether reductions average gradients (--ddp-average-in-collective).
        layers, hidden, sequence, micro_batch: Sizes.
        sequences_later: Sequence lengths that take turns from the second step after capture on; empty for no change.
        evaluates: Whether an evaluation follows the step after capture.
        evaluates_often: Whether evaluations come right before capture, right after it, and after each step.
        evaluated_sequence: How many tokens the sequences of evaluation have; 0 for as many as in training.
        micro_batches_later: The same for sequences in a micro-batch.
        turn: Steps that each of these lasts.
        later_on_one_rank: Whether they are those of the last data-parallel rank only.
        max_captures: How many times graphs are captured, as shapes or numbers of micro-batches change.
        optimizer_graph: Whether the optimizer's step is captured too; eager runs get the same optimizer.
        norm_on_device: Whether the host does not wait for the gradients' norm, as with TransformerEngine's functions.
        local: Whether graphs are those of ``cuda_graph_impl="local"``: the first step is recorded.
        steps: Optimizer steps.
        warmup: Steps before capture; with ``local`` how often each layer runs before its capture.
    """

    vision: bool = False
    captions: bool = False
    pattern: str = ""
    dtype: str = "fp32"
    dropout: float = 0.0
    microbatches: int = 1
    passes: int = 1
    microbatches_later: int = 0
    modules: tuple[str, ...] = ()
    holds: str | None = "decoder"
    experts: int = 0
    moe_layer_freq: int | tuple[int, ...] = 1
    shared_experts: int = 0
    shared_overlap: bool = False
    ep_overlap: bool = False
    delay_wgrad: bool = False
    capacity: float | None = None
    grouped_tensor: bool = False
    dispatcher: str = "alltoall"
    unbalanced: bool = False
    config: tuple[str, ...] = ()
    transformer_engine: bool = False
    fsdp: bool = True
    torch_fsdp: bool = False
    reshard: bool = True
    overlap_param_gather: bool = True
    mtp: int = 0
    virtual: int | None = None
    bucket: int = 10_000
    positions: str = "rope"
    masked_step: int | None = None
    packed: int = 0
    latent_attention: bool = False
    tied: bool = True
    strategy: str = "optim_grads_params"
    instances: int = 1
    outer: str = "no_shard"
    double_buffer: bool = True
    max_pool: bool = False
    unchecked: bool = False
    sequence_parallel: bool = False
    recompute: tuple[str, ...] = ()
    fused_wgrad: bool = False
    fp8: str | None = None
    fp8_params: bool = False
    nccl_ub: bool = False
    averaged: bool = False
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    sequence: int = 32
    micro_batch: int = 2
    sequences_later: tuple[int, ...] = ()
    micro_batches_later: tuple[int, ...] = ()
    turn: int = 1
    later_on_one_rank: bool = False
    max_captures: int = 8
    evaluates: bool = False
    evaluates_often: bool = False
    evaluated_sequence: int = 0
    optimizer_graph: bool = False
    norm_on_device: bool = False
    local: bool = False
    steps: int = 12
    warmup: int = 3

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]

    def microbatches_of(self, step: int) -> int:
        """How many micro-batches ``step`` has."""
        return self.microbatches_later or self.microbatches if step > self.warmup else self.microbatches

    @property
    def cuda_graph_layers_per_graph(self) -> str | int | None:
        """The configuration's attribute of this name."""
        return {"model": "model", "decoder": "all", "layer": 1, None: None}[self.holds]

    def sequence_of(self, step: int) -> int:
        """How many tokens the sequences of ``step`` have."""
        if step >= EVALUATION:
            return self.evaluated_sequence or self.sequence
        return self._taking_turns(self.sequences_later, step) or self.sequence

    def micro_batch_of(self, step: int) -> int:
        """How many sequences the micro-batches of ``step`` have."""
        return self._taking_turns(self.micro_batches_later, step) or self.micro_batch

    def _taking_turns(self, later: tuple[int, ...], step: int) -> int:
        since = step - self.warmup - 1
        return later[since // self.turn % len(later)] if later and since >= 0 else 0

    def __str__(self) -> str:
        changed = [
            f"{each.name}={getattr(self, each.name)}"
            for each in dataclasses.fields(self)
            if getattr(self, each.name) != each.default
        ]
        return " ".join(changed) or "default"
