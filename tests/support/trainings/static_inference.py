"""Generate tokens with a small GPT and static batching, eagerly and with local graphs, and print both results as JSON.

Without a GPU, it runs on the CPU backend with torch operators in place of flash-attn's decoding kernel.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

on_cpu = not torch.cuda.is_available()
if on_cpu:
    from megatron_fsdp_cuda_graphs import cpu_backend

    cpu_backend.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.inference.contexts.static_context import StaticInferenceContext  # noqa: E402
from megatron.core.inference.utils import InferenceMode  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig, attention  # noqa: E402
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord, delete_cuda_graphs  # noqa: E402

VOCABULARY, LENGTH, PROMPT, LAYERS = 64, 24, 6, 3


def decode(q, k_cache, v_cache, k, v, cache_seqlens, **options: Any) -> torch.Tensor:
    """Replace flash-attn's ``flash_attn_with_kvcache`` for one new token per sequence, ``[batch, 1, heads, size]``.

    Writes ``k`` and ``v`` to the caches, ``[batch, length, heads, size]``, at positions ``cache_seqlens``, ``[batch]``.
    """
    place = cache_seqlens.long().view(-1, 1, 1, 1).expand_as(k)
    k_cache.scatter_(1, place, k)
    v_cache.scatter_(1, place, v)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k_cache) / q.shape[-1] ** 0.5
    beyond = torch.arange(k_cache.shape[1], device=q.device) > cache_seqlens.view(-1, 1)
    weights = scores.masked_fill(beyond[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v_cache.masked_fill(beyond[:, :, None, None], 0))


def new_model(graphs: bool) -> torch.nn.Module:
    """Return a seeded GPT."""
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, use_cudagraphable_rng=True, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        cuda_graph_impl="local" if graphs else "none",
        cuda_graph_modules=[],
        cuda_graph_warmup_steps=1,
        flash_decode=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.float32 if on_cpu else torch.bfloat16,
        bf16=not on_cpu,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    model = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="learned_absolute")
    return model.to("cuda", config.params_dtype).eval()


def generate(graphs: bool, batches: tuple[int, ...] = (2, 3, 2)) -> tuple[list, int, int]:
    """Generate tokens for one batch of each size.

    Returns:
        The tokens and the sum of all logits per generated position, the number of graphs, and the number of graph
        inputs that alias a graph output.
    """
    model = new_model(graphs)
    found = []
    contexts = {size: StaticInferenceContext(size, LENGTH) for size in set(batches)}
    mask = torch.triu(torch.ones(PROMPT, PROMPT, dtype=torch.bool), 1).expand(1, 1, -1, -1).contiguous().cuda()
    with torch.inference_mode(), InferenceMode.active():
        for size in batches:
            context = contexts[size]
            context.reset()
            tokens = torch.arange(size * PROMPT).view(size, PROMPT).remainder(VOCABULARY).cuda()
            positions = torch.arange(LENGTH).expand(size, -1).contiguous().cuda()
            logits = model(tokens, positions[:, :PROMPT], mask, inference_context=context, runtime_gather_output=True)
            while True:
                tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
                found.append([tokens[:, -1].tolist(), logits[:, -1].double().sum().item()])
                context.sequence_len_offset = place = tokens.shape[1] - 1
                if tokens.shape[1] == LENGTH:
                    break
                context.enable_decode_mode()
                logits = model(
                    tokens[:, -1:].contiguous(),
                    positions[:, place : place + 1].contiguous(),
                    None,
                    inference_context=context,
                    runtime_gather_output=True,
                )
    runners = [entry[0] for entry in _CudagraphGlobalRecord.cudagraph_inference_record]
    shared = len(
        {runner.graphs.inputs[0].data_ptr() for runner in runners} & _CudagraphGlobalRecord.inference.output_addresses
    )
    delete_cuda_graphs()
    return found, len(runners), shared


def main() -> None:
    """Print JSON with the lists ``eager`` and ``graphed`` and the numbers ``graphs`` and ``shared_inputs``."""
    os.environ.setdefault("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo" if on_cpu else "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        if attention.flash_attn_with_kvcache is None:
            attention.flash_attn_with_kvcache = decode
        eager, none, _ = generate(graphs=False)
        assert none == 0
        graphed, graphs, shared = generate(graphs=True)
        print(json.dumps({"eager": eager, "graphed": graphed, "graphs": graphs, "shared_inputs": shared}), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    if on_cpu:
        cpu_backend.leave()
