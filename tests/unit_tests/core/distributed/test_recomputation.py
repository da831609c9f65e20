"""Test activation recomputation in graphs of the whole model, and its memory savings."""

import logging
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import memory

from .captured_training import CapturedTraining, compared, graphed, trained
from .fsdp_variants import FINE_BOTH, Variant, hook_layers

pytestmark = pytest.mark.sampled

MODEL = "model"


def full(method, layers):
    """Return a variant with full recomputation."""
    recompute = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    return Variant(graphed(MODEL), config=recompute)


NOTHING = Variant(graphed(MODEL))
SELECTIVE = Variant(graphed(MODEL), config={"recompute_granularity": "selective", "recompute_modules": ["core_attn"]})
BLOCK = full("block", 2)
EACH, PAIRS, AT_ONCE = (full("uniform", layers) for layers in (1, 2, 3))


@contextmanager
def noted_bytes():
    """Collect the bytes in use in the graph pool at the beginning of each capture in this context."""
    found: list[int] = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def note(graph, pool=None, **mode):
        if pool is not None:
            owned = memory.pool_of(pool)._owned
            held = [wholes[-1] for key, wholes in owned.items() if not memory._is_abandoned(key, wholes)]
            found.append(sum(whole.numel() for whole in held))
        begin(graph, pool=pool, **mode)

    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", note):
        yield found


def kept(variant):
    """Return the bytes in use in the graph pool between the captures of the forward and backward pass."""
    with noted_bytes() as found:
        CapturedTraining(variant.case, variant=variant).delete()
    return max(found)


@pytest.mark.parametrize(
    "variant",
    [SELECTIVE, BLOCK, EACH, PAIRS, replace(PAIRS, fsdp=FINE_BOTH)],
    ids=["selective", "block", "each", "pairs", "fine-grained hooks"],
)
def test_recomputation_trains_bit_identically(one_rank, variant):
    case = replace(variant.case, microbatches=2)
    assert compared(case, variant=variant).replays == 4


def test_pool_keeps_no_recomputed_activations(one_rank):
    nothing, selective, block, each, pairs, at_once = map(kept, (NOTHING, SELECTIVE, BLOCK, EACH, PAIRS, AT_ONCE))
    case = NOTHING.case
    hidden_states = case.micro_batch * case.sequence * case.hidden * 4
    assert each - pairs == pairs - at_once == hidden_states  # the input of each recomputed group of layers
    of_a_layer = block - each
    assert nothing - block == 2 * of_a_layer
    scores = case.micro_batch * 4 * case.sequence**2 * 4
    assert nothing - selective >= 3 * scores
    assert of_a_layer > 10 * hidden_states


@pytest.mark.parametrize(
    ("changes", "change", "reason"),
    [
        ({}, hook_layers, "decoder.layers.0 has hooks, which do not run in replays"),
        ({"holds": "layer", "unchecked": True}, lambda model: None, "--cuda-graph-layers-per-graph is 1"),
    ],
    ids=["hooks", "a layer in a graph"],
)
def test_recomputing_training_is_eager_without_a_model_graph(one_rank, caplog, changes, change, reason):
    case = replace(graphed(MODEL), **changes)
    variant = replace(EACH, case=case, change=change)
    eager = trained(case, False, variant=variant)
    with caplog.at_level(logging.WARNING):
        training = CapturedTraining(case, variant=variant)
    (line,) = (record.message for record in caplog.records if "no CUDA graphs are captured" in record.message)
    assert "training continues eagerly, because layers are recomputed in their backward pass, and " in line
    assert reason in line
    for _ in range(2):
        training.step()
    graphs = training.trace()
    assert not training.helper.graphs_created()
    assert graphs.replays == 0
    assert eager.differences(graphs) == []
