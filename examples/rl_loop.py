"""Train a small GPT by reinforcement learning (PPO) under Megatron-FSDP, with CUDA graphs.

    torchrun --nproc-per-node 2 examples/rl_loop.py
    torchrun --nproc-per-node 2 examples/rl_loop.py --cuda-graph-impl none     # the same numbers, without graphs

Without a GPU, run it on the CPU backend:

    torchrun --nproc-per-node 2 -m megatron_fsdp_cuda_graphs.cpu_backend examples/rl_loop.py

Each iteration first frees the graphs, moves the optimizer to the host, and generates sequences in a different engine
with the current weights. Then the policy and a frozen reference model compute log-probabilities, and the policy trains
on the sequences for several epochs. The reward of a sequence is the share of even tokens.
"""

import argparse

import torch
import torch.distributed as dist
from training_loop import build_optimizer, run, shard

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 64, 32, 4, 2
PROMPT = 4  # prompt tokens per sequence
ITERATIONS, EPOCHS = 4, 2
CLIP, KL = 0.2, 0.05


def unwrapped(impl: str, layers_per_graph: str | None = None):
    """Build a GPT without a wrapper, and its configuration. All GPTs start with the same weights.

    Args:
        impl: Value of ``cuda_graph_impl``.
        layers_per_graph: Value of ``cuda_graph_layers_per_graph``.
    """
    model_parallel_cuda_manual_seed(1234, use_cudagraphable_rng=True, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cuda_graph_impl=impl,
    )
    config.cuda_graph_layers_per_graph = layers_per_graph
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, position_embedding_type="rope")
    return model.cuda().bfloat16(), config


def losses_of(model, tokens):
    """Return the negative log-probability of each token, shape [sequences, tokens - 1]."""
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=tokens.roll(-1, 1))[:, :-1].float()


def log_probabilities(model, micro_batches):
    """Return the log-probabilities of the tokens of each micro-batch, replaying graphs if there are any."""
    model.eval()
    with torch.no_grad():
        found = [-losses_of(model, tokens) for tokens in micro_batches]
    model.train()
    return found


def engine_with_weights_of(policy):
    """Return an inference engine, here an unsharded model, with the policy's weights."""
    engine, _ = unwrapped("none")
    weights = {name.removeprefix("module."): weight for name, weight in policy.module.state_dict().items()}
    own = {name: weights[name].to_local().flatten().cpu() for name, _ in engine.named_parameters()}
    shards = [own] * dist.get_world_size()
    dist.all_gather_object(shards, own)
    with torch.no_grad():
        for name, param in engine.named_parameters():
            param.copy_(torch.cat([shard[name] for shard in shards]).view_as(param))
    return engine.eval()


def generate(engine, iteration):
    """Sample sequences; return their tokens by micro-batch."""
    generator = torch.Generator().manual_seed(iteration * dist.get_world_size() + dist.get_rank())
    tokens = torch.zeros(MICRO_BATCHES * MICRO_BATCH, SEQUENCE, dtype=torch.int64)
    tokens[:, :PROMPT] = torch.randint(VOCABULARY, (len(tokens), PROMPT), generator=generator)
    tokens = tokens.cuda()
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    for place in range(PROMPT, SEQUENCE):
        with torch.no_grad():
            logits = engine(tokens, positions, None)[:, place - 1]
        sampled = torch.multinomial(logits.float().softmax(-1).cpu(), 1, generator=generator)
        tokens[:, place] = sampled[:, 0].cuda()
    return tokens.split(MICRO_BATCH)


def train_epoch(policy, optimizer, samples):
    """Train one epoch on ``samples``: tokens, old log-probabilities and advantages of each micro-batch."""

    def forward_step(data, model):
        tokens, old, advantages = next(data)

        def loss_of(losses):
            ratio = torch.exp(-losses[:, PROMPT - 1 : -1].float() - old)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
            return loss, {"loss": loss.detach().clone()}

        positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
        return model(tokens, positions, None, labels=tokens.roll(-1, 1)), loss_of

    policy.zero_grad_buffer()
    optimizer.zero_grad()
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(samples),
        model=[policy],
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    _, grad_norm, _ = optimizer.step()
    return sum(each["loss"] for each in reduced), grad_norm


def report(phase):
    """Print the memory use of the first rank."""
    if dist.get_rank() == 0:
        allocated, reserved = torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20
        print(f"{phase}: allocated {allocated:.1f} MiB, reserved {reserved:.1f} MiB")


def train(impl: str) -> None:
    """Train, and print the reward, the loss and the gradient norm of each epoch."""
    model, config = unwrapped(impl)
    policy = shard(model, config)
    optimizer = build_optimizer(policy, config)
    # The reference model does not train, so request a whole-model graph explicitly.
    model, reference_config = unwrapped(impl, layers_per_graph="model")
    reference = shard(model.requires_grad_(False), reference_config)
    helpers = []
    if impl != "none":
        helpers.append(TECudaGraphHelper([policy], config, SEQUENCE, MICRO_BATCH, [optimizer]))
        helpers.append(TECudaGraphHelper([reference], reference_config, SEQUENCE, MICRO_BATCH))
    for iteration in range(ITERATIONS):
        for helper in helpers:
            helper.release()
        report(f"iteration {iteration}, released")
        engine = engine_with_weights_of(policy)
        optimizer.offload_to_cpu()
        report(f"iteration {iteration}, generation")
        micro_batches = generate(engine, iteration)
        del engine
        optimizer.restore_from_cpu()
        for helper in helpers:
            helper.restore()
        report(f"iteration {iteration}, log-probabilities")
        rewards = [(tokens[:, PROMPT:] % 2 == 0).float().mean(1, keepdim=True) for tokens in micro_batches]
        old = log_probabilities(policy, micro_batches)
        kept = log_probabilities(reference, micro_batches)
        samples = [
            (tokens, mine[:, PROMPT - 1 :], reward - 0.5 - KL * (mine - theirs)[:, PROMPT - 1 :])
            for tokens, mine, theirs, reward in zip(micro_batches, old, kept, rewards, strict=True)
        ]
        for epoch in range(EPOCHS):
            if helpers and (iteration, epoch) == (1, 0):  # after the steps of the first iteration
                for helper in helpers:
                    helper.create_cudagraphs()
                print(f"rank {dist.get_rank()}: graphs captured: {all(each.graphs_created() for each in helpers)}")
            if helpers:
                helpers[0].before_step()
            loss, grad_norm = train_epoch(policy, optimizer, samples)
            numbers = torch.stack([torch.cat(rewards).mean(), loss])
            dist.all_reduce(numbers, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                shown = ", ".join(float(number).hex() for number in (*numbers, grad_norm))
                print(f"iteration {iteration}, epoch {epoch}: reward, loss, norm {shown}")
        report(f"iteration {iteration}, training")
    for helper in helpers:
        helper.delete_cuda_graphs()  # before their process groups


def main() -> None:
    """Train on one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-graph-impl", choices=("none", "transformer_engine"), default="transformer_engine")
    args = parser.parse_args()
    run(lambda: train(args.cuda_graph_impl), MICRO_BATCH, MICRO_BATCHES)


if __name__ == "__main__":
    main()
