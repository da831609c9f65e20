"""Train a small GPT under Megatron-FSDP with CUDA graphs in a custom training loop.

    torchrun --nproc-per-node 2 examples/training_loop.py
    torchrun --nproc-per-node 2 examples/training_loop.py --eager     # the same losses, without graphs

Without a GPU, run it on the CPU backend:

    torchrun --nproc-per-node 2 -m megatron_fsdp_cuda_graphs.cpu_backend examples/training_loop.py
"""

import argparse
import os

import torch
import torch.distributed as dist

from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 256, 128, 2, 2
STEPS, WARMUP = 8, 3


def build(eager: bool):
    """Build the wrapped model, its optimizer and its configuration."""
    torch.manual_seed(1234)  # local routers draw their weights on the host
    model_parallel_cuda_manual_seed(1234, use_cudagraphable_rng=True)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.1,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cuda_graph_impl="none" if eager else "transformer_engine",
        cuda_graph_warmup_steps=WARMUP,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, position_embedding_type="rope")
    wrapped = shard(model.cuda().bfloat16(), config)
    return wrapped, build_optimizer(wrapped, config), config


def shard(model, config):
    """Wrap a model with Megatron-FSDP."""
    sharding = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        fsdp_double_buffer=True,  # graphs read and write fixed addresses
        fsdp_db_use_persist_buf_on_alloc_fail=True,
        megatron_fsdp_cuda_graph_mode=config.cuda_graph_impl != "none",
    )
    return FullyShardedDataParallel(config, sharding, model)


def build_optimizer(wrapped, config):
    """Build the optimizer of a wrapped model, and set the callbacks of Megatron's schedules in ``config``."""
    adam = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(adam, [wrapped])
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def batches(step: int):
    """Yield the micro-batches of one step: token IDs of shape [micro-batch, sequence]."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    for _ in range(MICRO_BATCHES):
        yield torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=generator).cuda()


def forward_step(data, model):
    """Run one micro-batch; return the loss of each token and the function that averages them."""
    tokens = next(data)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    losses = model(tokens, positions, None, labels=tokens.roll(-1, 1))

    def loss_of(losses):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return losses, loss_of


def train(eager: bool) -> None:
    """Train and print the loss of each step; graphs are captured after the warm-up steps."""
    model, optimizer, config = build(eager)
    helper = None if eager else TECudaGraphHelper([model], config, SEQUENCE, MICRO_BATCH, [optimizer])
    for step in range(STEPS):
        if helper and step == WARMUP:
            helper.create_cudagraphs()
            print(f"rank {dist.get_rank()}: graphs captured: {helper.graphs_created()}")
        if helper:
            helper.before_step()  # recaptures if a pipeline's number of micro-batches has changed
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()
        loss = torch.stack([each["loss"] for each in reduced]).mean()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {(loss / dist.get_world_size()).item().hex()}")
    if helper:
        helper.delete_cuda_graphs()  # before their process groups


def run(train, micro_batch: int, micro_batches: int) -> None:
    """Initialize this rank, call ``train``, and shut down. A micro-batch has ``micro_batch`` sequences."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    parallel_state.initialize_model_parallel()
    ranks = dist.get_world_size()
    num_microbatches_calculator.init_num_microbatches_calculator(
        0, None, micro_batch * micro_batches * ranks, micro_batch, ranks
    )
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        train()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def main() -> None:
    """Train on one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="train without graphs")
    args = parser.parse_args()
    run(lambda: train(args.eager), MICRO_BATCH, MICRO_BATCHES)


if __name__ == "__main__":
    main()
