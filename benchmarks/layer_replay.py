"""Host cost in Python of one layer's replay: calls and microseconds, forward and backward, by file.

    python benchmarks/layer_replay.py

A ``TransformerLayer`` with the keywords that megatron-core's ``TransformerBlock`` gives it, its graphs replaced by ones
that do nothing: what remains is this project's, megatron-core's and torch's work on the host.
Needs no GPU. Counts are exact. Times are those of this host, for layers in a row; they contain a copy of the hidden
states and one of their gradient, on the CPU.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.transformer import transformer_layer
from megatron.core.transformer._cuda_graphs.engine.graphed_slot import GraphedSlot
from megatron.core.transformer._cuda_graphs.engine.slot import WarmupRecord
from megatron.core.transformer._cuda_graphs.layer_graph import LayerGraph, LayerGraphs
from megatron_fsdp_cuda_graphs import overlay

HIDDEN, TOKENS, PARAMETERS = 8, 4, 12
Call = tuple[str, str]  # who owns the function, and its name
PROJECT = "this project"
_OWNERS = {
    PROJECT: Path(overlay.__file__).resolve().parent,
    "torch": Path(torch.__file__).resolve().parent,
    "megatron-core": Path(transformer_layer.__file__).resolve().parents[1],
}


class Layer(transformer_layer.TransformerLayer):
    """A ``TransformerLayer`` without its modules, which a replay does not run."""

    def __init__(self, parameters: int) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(
            cuda_graph_impl="transformer_engine",
            cuda_graph_modules=[],
            delay_offload_until_cuda_graph=False,
            fine_grained_activation_offloading=False,
            overlap_moe_expert_parallel_comm=False,
        )
        self.is_moe_layer = False
        self.cuda_graphs: list[Any] = []
        self.cuda_graph_manual_hooks: list[Any] = []
        self.current_microbatch = 0
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(HIDDEN)) for _ in range(parameters))

    def _te_cuda_graph_capture(self, hidden_states: torch.Tensor, rotary_pos_emb: torch.Tensor) -> Any:
        hidden_states = hidden_states + rotary_pos_emb
        for weight in self.weights:
            hidden_states = hidden_states * weight
        return (hidden_states,)


class _NoGraph:
    """A graph that does nothing."""

    def replay(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


def _no_hook(module: torch.nn.Module, args: tuple) -> None:
    pass


def graphed_layer(rotary_pos_emb: torch.Tensor, parameters: int = PARAMETERS) -> Layer:
    """A layer that replays graphs which do nothing, captured with the position embedding that all layers get."""
    layer = Layer(parameters)
    hidden_states = torch.ones(TOKENS, 1, HIDDEN, requires_grad=True)
    kwargs = {"rotary_pos_emb": rotary_pos_emb}
    slot = GraphedSlot(
        "layer",
        layer._te_cuda_graph_capture,
        (hidden_states,),
        kwargs,
        clone_param_grads=False,
        warmup_record=WarmupRecord(ran=(), backward_ran=True),
    )
    slot.forward(lambda graph: nullcontext())
    slot.backward(lambda graph: nullcontext(), lambda outputs: tuple(map(torch.ones_like, outputs)))
    slot.forward_graph = slot.backward_graph = _NoGraph()
    slot.finish()
    layer.register_forward_pre_hook(_no_hook)  # as under Megatron-FSDP, torch has hooks to run
    layer.cuda_graphs = LayerGraphs([LayerGraph("layer", slot, (hidden_states,), kwargs, has_attention=True)])
    return layer


def call(layer: Layer, hidden_states: torch.Tensor, rotary_pos_emb: torch.Tensor) -> torch.Tensor:
    """Call ``layer`` as ``TransformerBlock`` does."""
    output, _ = layer(
        hidden_states=hidden_states,
        attention_mask=None,
        context=None,
        context_mask=None,
        rotary_pos_emb=rotary_pos_emb,
        rotary_pos_cos=None,
        rotary_pos_sin=None,
        rotary_pos_cos_sin=None,
        attention_bias=None,
        inference_context=None,
        packed_seq_params=None,
        sequence_len_offset=None,
        padding_mask=None,
    )
    return output


def calls_per_layer(layers: Sequence[Layer], rotary_pos_emb: torch.Tensor) -> dict[str, Counter[Call]]:
    """Count the calls that one more layer adds to a forward and to a backward pass, without what starts a pass.

    Args:
        layers: Two layers.
        rotary_pos_emb: The position embedding with which they were captured.

    Returns:
        For ``forward`` and ``backward`` the functions that are called: those of Python as (owner, name), the owner a
        file of this project, "torch", "megatron-core" or "other"; those of C as ("C", name).
    """
    passes = [_calls_of_passes(layers[:count], rotary_pos_emb) for count in (1, 2)]
    return {phase: passes[1][phase] - passes[0][phase] for phase in ("forward", "backward")}


def _calls_of_passes(layers: Sequence[Layer], rotary_pos_emb: torch.Tensor) -> dict[str, Counter[Call]]:
    leaf = torch.ones(TOKENS, 1, HIDDEN, requires_grad=True)

    def forward() -> torch.Tensor:
        hidden_states = leaf * 1
        for layer in layers:
            hidden_states = call(layer, hidden_states, rotary_pos_emb)
        return hidden_states

    gradient = torch.ones_like(leaf)
    forward().backward(gradient, inputs=[leaf])  # what is done once is done
    output, forward_calls = _calls_of(forward)
    _, backward_calls = _calls_of(lambda: output.backward(gradient, inputs=[leaf]))
    return {"forward": forward_calls, "backward": backward_calls}


def _calls_of(run: Callable[[], Any]) -> tuple[Any, Counter[Call]]:
    calls: Counter[Call] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[_owner(frame.f_code.co_filename), frame.f_code.co_name] += 1
        elif event == "c_call":
            calls["C", argument.__name__] += 1

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, calls


def _owner(file: str) -> str:
    path = Path(file).resolve()
    for name, root in _OWNERS.items():
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix() if name == PROJECT else name
    return "other"


def main() -> None:
    """Print the calls by file and function, then the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="how many layers in a row")
    parser.add_argument("--parameters", type=int, default=PARAMETERS, help="that get their gradient through autograd")
    parser.add_argument("--repeats", type=int, default=400, help="timed passes over all layers")
    args = parser.parse_args()

    rotary_pos_emb = torch.ones(TOKENS, 1, HIDDEN)
    layers = [graphed_layer(rotary_pos_emb, args.parameters) for _ in range(max(2, args.layers))]
    for phase, calls in calls_per_layer(layers, rotary_pos_emb).items():
        in_c = {name: count for (owner, name), count in calls.items() if owner == "C"}
        print(f"{phase}: {calls.total() - sum(in_c.values())} calls in Python, {sum(in_c.values())} in C")
        for (owner, name), count in calls.items():
            if owner != "C":
                print(f"    {count:>3} {owner} {name}")
        print(f"    C: {', '.join(f'{count} {name}' for name, count in in_c.items())}")

    leaf = torch.ones(TOKENS, 1, HIDDEN, requires_grad=True)
    gradient = torch.ones_like(leaf)
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(args.repeats):
        hidden_states = leaf * 1
        start = time.perf_counter()
        for layer in layers:
            hidden_states = call(layer, hidden_states, rotary_pos_emb)
        middle = time.perf_counter()
        hidden_states.backward(gradient, inputs=[leaf])
        times["forward"].append(middle - start)
        times["backward"].append(time.perf_counter() - middle)
    for phase, seconds in times.items():
        median, least = (each / len(layers) * 1e6 for each in (statistics.median(seconds), min(seconds)))
        print(f"{phase}: median {median:.1f} us, least {least:.1f} us a layer")


if __name__ == "__main__":
    main()
