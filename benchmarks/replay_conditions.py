"""Host time of ``ReplayConditions``: what is compared before a replay, of a whole model and of each layer.

    python -m megatron_fsdp_cuda_graphs.cpu_backend benchmarks/replay_conditions.py

A ``GPTModel`` of Megatron's own layers runs forward once, eagerly; what it reads is compared as it is before replays.
Needs no GPU. Times are processor time of this host, medians of several rounds; layers of TransformerEngine have fewer
attributes that are compared.
"""

import argparse
import statistics
import time

import torch

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer._cuda_graphs.attribute_reads import AttributeReads
from megatron.core.transformer._cuda_graphs.replay_conditions import ReplayConditions

ROUNDS, CALLS = 5, 1000


def gpt(layers: int) -> torch.nn.Module:
    """A small model on the CPU; a process group of one rank is made for it."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(num_layers=layers, hidden_size=16, num_attention_heads=2, masked_softmax_fusion=False)
    return GPTModel(config, get_gpt_layer_local_spec(), 32, 8, position_embedding_type="none")


def conditions_of(model: torch.nn.Module) -> tuple[ReplayConditions, list[ReplayConditions]]:
    """Return the conditions of the model's graphs, and those of a graph for each layer."""
    reads, tokens = AttributeReads(), torch.zeros(1, 8, dtype=torch.int64)
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    with reads.noted([model]):
        model(tokens, tokens, mask, labels=tokens)
    layers = [ReplayConditions(layer, reads) for layer in model.decoder.layers]
    return ReplayConditions(model, reads, buffers=True), layers


def microseconds(conditions: list[ReplayConditions]) -> float:
    """How long one comparison of all of ``conditions`` takes; none may have changed."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(CALLS):
            for each in conditions:
                if each.have_changed():
                    raise RuntimeError(each.changes())
        times.append((time.process_time() - start) / CALLS * 1e6)
    return statistics.median(times)


def main() -> None:
    """Print a line for each number of layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16])
    for layers in parser.parse_args().layers:
        model, each = conditions_of(gpt(layers))
        whole, apart = microseconds([model]), microseconds(each)
        print(f"{layers} layers: the whole model {whole:.0f} us, a graph for each layer {apart:.0f} us")


if __name__ == "__main__":
    main()
