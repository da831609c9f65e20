"""Two ranks: a small GPT trains eagerly under Megatron-FSDP. Run by test_cpu_ranks.py."""

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, SEQUENCE, STEPS = 64, 16, 8


def build() -> tuple[FullyShardedDataParallel, object]:
    """The sharded model and its optimizer."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, position_embedding_type="rope").cuda()
    sharding = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        fsdp_double_buffer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    sharded = FullyShardedDataParallel(config, sharding, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=5e-3, clip_grad=1.0, use_distributed_optimizer=True), [sharded]
    )
    return sharded, optimizer


def step(model: FullyShardedDataParallel, optimizer) -> float:
    """One step on this rank's share of the batch; returns the mean loss of both ranks."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    tokens = (torch.arange(2 * (SEQUENCE + 1), device="cuda").view(2, -1) * (3 + 2 * dist.get_rank())) % VOCABULARY
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda"), 1)[None, None]
    positions = torch.arange(SEQUENCE, device="cuda").expand(2, -1)
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


if __name__ == "__main__":
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    trained = build()
    for _ in range(STEPS):
        loss = step(*trained)
        if dist.get_rank() == 0:
            print("loss", loss, flush=True)
    dist.destroy_process_group()
