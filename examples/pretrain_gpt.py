"""Pretrain a GPT with Megatron-Core and the flags of ``megatron.training``.

Supports real data (``--data-path``, ``--train-data-path``, ...) and ``--mock-data``; dense and mixture-of-experts
layers; local and TransformerEngine layers; hybrid models (``--hybrid-layer-pattern``); multi-token prediction;
inter-document masking; tensor, pipeline, context and expert parallelism.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py FLAGS                                           # GPUs
    torchrun --nproc-per-node 2 -m megatron_fsdp_cuda_graphs.cpu_backend examples/pretrain_gpt.py FLAGS  # no GPU

Set STEP_METRICS_PATH=FILE to write exact metrics of each step (see step_metrics.py).
"""

import os
from functools import partial

import torch
from step_metrics import StepMetrics

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils.common_utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
    is_hybrid_model,
)

# Flags whose batches or losses need code that is not in megatron-core's wheel.
LEFT_TO_MEGATRON_LM = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "logits_load_dir",
)
BATCH = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
PACKED = ("cu_seqlens", "max_seqlen")
# Flags that must be 1 with --dataloader-inter-document-masking.
ONE_ROW = ("micro_batch_size", "context_parallel_size")


def has_mtp(args, vp_stage: int | None) -> bool:
    """Return whether this pipeline stage has multi-token prediction layers."""
    return mtp_on_this_rank(
        layout=args.pipeline_model_parallel_layout,
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=vp_stage is None,
        vp_stage=vp_stage,
    )


def reads_data(args, vp_stage: int | None) -> bool:
    """Return whether this pipeline stage reads micro-batches. Intermediate stages read only document offsets."""
    documents = args.dataloader_inter_document_masking
    return documents or is_first_or_last_pipeline_stage(vp_stage) or has_mtp(args, vp_stage)


def get_batch(data_iterator, vp_stage: int | None = None) -> list:
    """Return tokens, labels, loss_mask, position_ids, attention_mask and packed sequences of a micro-batch, on the GPU.

    Tokens, labels and position_ids are int64, loss_mask float32, all [micro-batch, sequence / context parallel];
    attention_mask is bool [micro-batch, 1, sequence, sequence], or None with
    ``--no-create-attention-mask-in-dataloader``. Values that the pipeline stage does not read are None. Packed
    sequences are ``PackedSeqParams`` with ``--dataloader-inter-document-masking``, otherwise None.
    """
    args = get_args()
    if not reads_data(args, vp_stage):
        return [None] * (len(BATCH) + 1)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        data = next(data_iterator)
        if args.dataloader_inter_document_masking:
            (offsets,) = data["cu_seqlens"]  # padded with the end of the sequence
            data["cu_seqlens"] = offsets[: int((offsets < args.seq_length).sum()) + 1]
        batch = {name: data[name].cuda(non_blocking=True) if name in data else None for name in BATCH + PACKED}
    first_or_last = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=args.dataloader_inter_document_masking,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(**first_or_last),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(**first_or_last),
    )
    packed = packed_sequences(args, batch) if args.dataloader_inter_document_masking else None
    if packed is None:
        group = parallel_state.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return [*(batch[name] for name in BATCH), packed]


def packed_sequences(args, batch: dict[str, torch.Tensor]) -> PackedSeqParams:
    """Return the document offsets of a micro-batch, padded if ``--cuda-graph-packed-sequences`` is set.

    Args:
        args: Megatron's arguments.
        batch: ``cu_seqlens``, int32 [documents + 1] or [1, documents + 1], and ``max_seqlen``, the length of the
            longest document in tokens.
    """
    offsets, most = batch["cu_seqlens"].view(-1), getattr(args, "cuda_graph_packed_sequences", None)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    if most is not None:
        from megatron.core.packed_seq_params import pad_packed_seq_params  # added by the patch

        return pad_packed_seq_params(params, most, args.seq_length)
    params.max_seqlen_q = params.max_seqlen_kv = int(batch["max_seqlen"])
    return params


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor):
    """Return the summed loss of a micro-batch, its number of unmasked tokens, and a dictionary of both for logging.

    Args:
        loss_mask: float32 [micro-batch, sequence], 1 for tokens that contribute to the loss.
        output: Loss of each token, with the shape of ``loss_mask`` and any floating-point dtype.
    """
    mask = loss_mask.view(-1)
    loss = torch.sum(output.view(-1).float() * mask)
    args, rerun = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejects, message in (torch.isnan, "the loss is NaN"), (torch.isinf, "the loss is infinite"):
            rerun.validate_result(loss, rejects, message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        spiky = partial(rerun.is_unexpectedly_large, threshold=10, context="loss")
        rerun.validate_result(loss, spiky, "the loss is spiky", tolerance=0.0, fatal=False)
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator, model, return_schedule_plan: bool = False):
    """Run one micro-batch; return the loss of each token and the function that reduces it.

    Args:
        data_iterator: Iterator over batches.
        model: Model chunk.
        return_schedule_plan: Whether to return a schedule plan instead of losses, for
            ``--overlap-moe-expert-parallel-comm``.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, position_ids, attention_mask, packed = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=packed)
    return output, partial(loss_func, loss_mask)


def build_datasets(num_samples, vp_stage: int | None = None):
    """Build the training, validation and test sets from the data flags.

    Args:
        num_samples: Numbers of training, validation and test samples.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        inter_document_masking=args.dataloader_inter_document_masking,
    )

    def built_here() -> bool:
        return reads_data(args, vp_stage) and parallel_state.get_tensor_model_parallel_rank() == 0

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, built_here, config).build()


# megatron.training calls it on every rank, and built_here selects the ranks that build.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Train with the flags of the command line.

    Raises:
        SystemExit: A flag is unknown, conflicts with another flag, or needs Megatron-LM's own script.
    """
    args = parse_and_validate_args()
    for name in LEFT_TO_MEGATRON_LM:
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise SystemExit(f"{flag} is not supported by this example: use Megatron-LM's own pretrain_gpt.py")
    for name in ONE_ROW if getattr(args, "dataloader_inter_document_masking", False) else ():
        if getattr(args, name) != 1:
            flag = "--" + name.replace("_", "-")
            raise SystemExit(f"--dataloader-inter-document-masking needs {flag} 1, got {getattr(args, name)}: set it")
    model_config = hybrid_config_from_args(args) if is_hybrid_model(args) else gpt_config_from_args(args)
    path = os.environ.get("STEP_METRICS_PATH")
    if path:
        metrics = StepMetrics(path)
        model_config.post_wrap_hooks.append(metrics.watch)
        metrics.record_training_log()
    config = pretrain_cfg_container_from_args(args, model_config)
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
