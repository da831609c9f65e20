"""Test plans against captures on the CPU backend, and sizes of graph pools against GPU runs."""

import gc
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from _step_time.configurations import configuration
from _step_time.variants import variant

from megatron.core.transformer._cuda_graphs.engine.captured import GraphedCallable
from megatron.core.transformer._cuda_graphs.te.capture_state import Holds
from megatron.core.transformer._cuda_graphs.te.layers import fsdp_of
from megatron.core.transformer._cuda_graphs.te.training_calls import OPTIONAL
from megatron_fsdp_cuda_graphs.plan import dry_stage, graphs, memory
from megatron_fsdp_cuda_graphs.plan.flags import read_flags
from megatron_fsdp_cuda_graphs.plan.pools import why_unknown

from .conftest import DENSE, EXPERTS

pytestmark = pytest.mark.sampled

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PIPELINE = "--untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 --global-batch-size 16"
LAYERS = "--cuda-graph-layers-per-graph 1"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
CASES = {
    "dense": (f"{DENSE} --num-layers 3 --cuda-graph-layers-per-graph 1", 2, 0),
    "parts of MoE layers": (f"{DENSE} {EXPERTS} --num-layers 2 --cuda-graph-modules attn moe_router", 2, 0),
    "multi-token prediction": (f"{DENSE} --num-layers 2 --mtp-num-layers 1 --cuda-graph-layers-per-graph 1", 2, 0),
    "last pipeline stage": (f"{DENSE} --num-layers 4 {PIPELINE} {LAYERS}", 4, 1),
    "interleaved stages": (f"{DENSE} --num-layers 4 {PIPELINE} {LAYERS} {VIRTUAL}", 4, 0),
}
WHOLE = {
    "the whole model": (f"{DENSE} --num-layers 2", 2, 0),
    "last pipeline stage": (f"{DENSE} --num-layers 4 {PIPELINE}", 4, 1),
    "interleaved stages": (f"{DENSE} --num-layers 4 {PIPELINE} {VIRTUAL}", 4, 1),
}


@pytest.fixture
def recorded(monkeypatch):
    """Return a list to which captures append the kind and callable index of each pass."""
    found: list[tuple[str, int]] = []

    def watch(kind):
        original = getattr(GraphedCallable, kind)

        def run(slot, capture, *args):
            if capture.phase == "capture" and slot.name.startswith("callable "):  # not a whole pass
                found.append((kind, int(slot.name.split()[1])))
            return original(slot, capture, *args)

        monkeypatch.setattr(GraphedCallable, kind, run)

    watch("forward")
    watch("backward")
    return found


def shards(buffers):
    """Return the bytes of weights, main weights and gradients in Megatron-FSDP's own buffers."""
    names = {"weights": "model_weight_buffer", "main_weights": "main_weight_buffer", "gradients": "main_grad_buffer"}
    groups = [group for buffer in buffers for group in buffer.parameter_groups]
    return {kind: sum(getattr(group, name).data.nbytes for group in groups) for kind, name in names.items()}


def train(model, args):
    """Run a step with Adam, and return the bytes of the optimizer's states and gradients."""
    tokens = torch.zeros(args.micro_batch_size, args.seq_length, dtype=torch.int64, device="cuda")
    model(tokens, tokens, None, labels=tokens).mean().backward()
    model.finish_grad_sync()
    fsdp: Any = fsdp_of(model)
    params = [param for _, param in fsdp.param_and_grad_buffer.optimizer_named_parameters]
    optimizer = torch.optim.Adam(params, foreach=False)
    optimizer.step()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "optimizer_states": sum(state._local_tensor.nbytes for state in states),
        "optimizer_gradients": sum(param.grad._local_tensor.nbytes for param in params if param.grad is not None),
    }


@pytest.mark.parametrize(("command", "ranks", "stage"), CASES.values(), ids=CASES)
def test_graphs_and_buffers_of_layers_match_a_capture(command, ranks, stage, recorded, monkeypatch):
    flags = read_flags(command.split(), ranks)
    assert not flags.refused
    with dry_stage.dry_stage(flags.args, stage) as helper:
        planned = graphs.planned(helper, graphs.scope_of(helper, ""), OPTIONAL)
        found = memory.fsdp_memory(helper, flags.args)
    del helper
    gc.collect()

    monkeypatch.setattr(dry_stage, "without_memory", nullcontext)
    monkeypatch.setattr(dry_stage, "_as_transformer_engine", nullcontext)
    with dry_stage.dry_stage(flags.args, stage) as helper, torch.cuda.stream(torch.cuda.Stream()):
        buffers = memory.fsdp_buffers(helper)
        for group in (group for buffer in buffers for group in buffer.parameter_groups):
            group.model_weight_buffer.data.fill_(0.01)
        alone = flags.args.pipeline_model_parallel_size == 1
        real = shards(buffers) | (train(helper.model[0], flags.args) if alone else {})
        helper.create_cudagraphs()
        for buffer in buffers:
            for kind, size in memory.temporary_buffers(buffer).items():
                real[kind] = real.get(kind, 0) + size
        if not alone:
            del real["persistent_buffers"]  # no pass of the embedding or the output layer has run
        numbers = [layer.layer_number for layer in helper.flattened_callables]
        attached = [graph for layer in helper.flattened_callables for graph in layer.cuda_graphs]
        helper.delete_cuda_graphs()

    expected = [f"{kind} of layer {numbers[index]}" for kind, index in recorded]
    assert [graph.replace("MTP ", "") for graph in planned.graphs] == expected
    assert len(attached) == len([kind for kind, _ in recorded if kind == "forward"])
    assert {kind: found[kind] for kind in real} == real
    assert len(real) == (7 if alone else 4)


@pytest.mark.parametrize(("command", "ranks", "stage"), WHOLE.values(), ids=WHOLE)
def test_graphs_and_inputs_of_whole_chunks_match_a_capture(command, ranks, stage, monkeypatch):
    flags = read_flags(f"{command} --cuda-graph-layers-per-graph model".split(), ranks)
    assert not flags.refused
    elsewhere = dry_stage.blocker_of_pipeline(flags.args)
    with dry_stage.dry_stage(flags.args, stage) as helper:
        planned = graphs.planned(helper, graphs.scope_of(helper, elsewhere), OPTIONAL)
        static = memory.distinct_bytes(planned.static_inputs)
    del helper
    gc.collect()

    recorded: list[tuple[str, GraphedCallable]] = []

    def watch(kind):
        original = getattr(GraphedCallable, kind)

        def run(passes, capture, *args):
            if capture.phase == "capture":
                recorded.append((kind, passes))
            return original(passes, capture, *args)

        monkeypatch.setattr(GraphedCallable, kind, run)

    watch("forward")
    watch("backward")
    monkeypatch.setattr(dry_stage, "without_memory", nullcontext)
    monkeypatch.setattr(dry_stage, "_as_transformer_engine", nullcontext)
    with dry_stage.dry_stage(flags.args, stage) as helper, torch.cuda.stream(torch.cuda.Stream()):
        for group in (group for buffer in memory.fsdp_buffers(helper) for group in buffer.parameter_groups):
            group.model_weight_buffer.data.fill_(0.01)
        helper.create_cudagraphs()
        models = helper._state.models
        chunk_of = {passes: number for number, own in enumerate(models, start=1) for passes in own.slots}
        chunks = [(kind, chunk_of[passes]) for kind, passes in recorded]
        assert memory.distinct_bytes([passes.inputs for passes in chunk_of]) == static
        helper.delete_cuda_graphs()
    assert planned.graphs == [
        f"{kind} of {'the whole model' if '--pipeline' not in command else f'chunk {chunk} as a whole'}"
        for kind, chunk in chunks
    ]
    assert [chunk if kind == "forward" else -chunk for kind, chunk in chunks] == planned.order


@pytest.mark.parametrize(
    "run",
    [
        "earlier/recomputation_1gpu",
        "earlier/step_time_2gpu",
        "earlier/step_time_c_4gpu",
        "earlier/step_time_limit_4gpu",
        "release/step_time_b_2gpu",
        "release/step_time_dense_2gpu",
        "release/step_time_experts_2gpu",
        "release/step_time_llama_2gpu",
        "release/step_time_moe_2gpu",
    ],
)
def test_graph_pools_are_close_to_gpu_runs(run, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # as in the benchmark
    results = json.loads((RESULTS / f"{run}.json").read_text())
    ranks = int(run[-4])
    earlier = re.search(r"--expert-parallel (\d)", results["command"])
    size = f"--expert-model-parallel-size {earlier[1]}" if earlier else ""
    compared = 0
    for name, rows in results["configurations"].items():
        job = configuration(f"{name}{' ' if ':' in name else ':'}{size}", ranks=ranks, steps=30, on_cpu=False)
        for row in rows:
            # Pools include the states of a captured optimizer, and buffers registered with NCCL. Graphs of all layers
            # were removed.
            if not row["variant"].startswith("native") or re.search("optimizer|nccl-ub|graph all", row["variant"]):
                continue
            rerun = ["--rerun-mode", "validate_results"] * ("capacity-factor" in row["variant"])
            flags = read_flags([*variant(row["variant"]).flags_for(job), *rerun], ranks)
            assert not flags.refused
            with dry_stage.dry_stage(flags.args, 0) as helper:
                scope = graphs.scope_of(helper, "")
                if why_unknown(helper, flags.args, of_layers=scope.holds is Holds.LAYER):
                    continue
                memory.fsdp_memory(helper, flags.args)
                pool = memory.graph_pool(helper, graphs.planned(helper, scope, {"labels"}), flags.args)
            assert pool / 2**20 == pytest.approx(row["graph_pools_mib"], rel=0.05), (name, row["variant"])
            compared += 1
    assert compared
