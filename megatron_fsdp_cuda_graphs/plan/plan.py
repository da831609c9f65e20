"""``python -m megatron_fsdp_cuda_graphs plan``: what flags of ``pretrain_gpt`` would capture and keep in memory."""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from megatron.core.transformer._cuda_graphs.flags.options import LAYERS_FLAG, WHOLE_MODEL, layers_per_graph

from . import changes
from .capture import Captured, captured_by
from .dry_stage import blocker_elsewhere, dry_stage, fsdp_buffers, parts_of_stages, whole_model_blocker
from .flags import Flags, bulleted, read_flags
from .memory import KINDS, activation_bytes, distinct_bytes, fsdp_memory, rows_of_experts
from .quiet import quietly

SHOWN = 12  # graphs of a stage, unless all are asked for
MIB = 2**20
NOT_COUNTED = (
    "Not counted: activations outside of graphs, outputs of graphs, what kernels and NCCL take, fragmentation, and the "
    "CUDA context. Estimates are marked so; all else is the size of tensors that Megatron-FSDP makes for these flags."
)


def lines(own: argparse.Namespace, given: list[str], flags: Flags) -> Iterator[str]:
    """Yield the plan of each pipeline stage, and advice; see ``command``."""
    yield from flags.verdict()
    yield from _stages(flags.args, own.every_graph)
    yield from ("", "Flags to add or drop:", *bulleted(list(_advice(given, flags.args)) or ["none"]))


def captures_layers(args: argparse.Namespace) -> bool:
    """Whether the graphs are those that these commands are about."""
    return bool(args.cuda_graph_impl == "transformer_engine")


def other_graphs(args: argparse.Namespace) -> str:
    """Say that these commands know nothing of the graphs that a job captures; empty if it captures none, or layers."""
    if args.cuda_graph_impl in ("none", "transformer_engine"):
        return ""
    return f"These commands know only graphs of --cuda-graph-impl transformer_engine, not of {args.cuda_graph_impl}."


def _stages(args: argparse.Namespace, every_graph: bool) -> Iterator[str]:
    if not captures_layers(args):
        yield other_graphs(args) or f"No layer would be captured: --cuda-graph-impl is {args.cuda_graph_impl}."
        return
    elsewhere = blocker_elsewhere(args)
    for stage in range(args.pipeline_model_parallel_size):
        with quietly(), dry_stage(args, stage) as helper:
            captured = captured_by(helper, elsewhere)
            found = fsdp_memory(fsdp_buffers(helper), args)
            found["static_inputs"] = distinct_bytes(captured.static_inputs)
            sizes = helper.config, helper.seq_length, helper.micro_batch_size
            kept, room = activation_bytes(*sizes, captured.most_in_flight), rows_of_experts(*sizes)
        pool = kept if not args.cuda_graph_modules and captured.graphs else None
        yield ""
        yield f"Pipeline stage {stage + 1} of {args.pipeline_model_parallel_size}"
        yield from _graphs(captured, every_graph)
        yield from _memory(found, pool, room, args)
    yield ""
    yield NOT_COUNTED


def _graphs(captured: Captured, every_graph: bool) -> Iterator[str]:
    count = len(captured.graphs)
    if not count:
        yield f"  Nothing would be captured: {captured.why_nothing}."
        return
    yield f"  Order of passes: {' '.join(f'{step:g}' for step in captured.order)} (chunk, minus for backward)"
    yield f"  Graphs: {count}, captured in this order:"
    shown = count if every_graph else SHOWN
    yield from (f"    {graph}" for graph in captured.graphs[:shown])
    if count > shown:
        yield f"    and {count - shown} more (--every-graph lists them)"


def _memory(found: Counter[str], pool: int | None, room: Counter[str], args: argparse.Namespace) -> Iterator[str]:
    yield "  Memory of a rank, MiB:"
    yield from (f"    {found[kind] / MIB:10.1f}  {words}" for kind, words in KINDS.items() if found[kind])
    yield f"    {sum(found.values()) / MIB:10.1f}  in all"
    if args.optimizer != "adam":
        yield f"    the states of --optimizer {args.optimizer} are not known, and not counted"
    if args.fp8_param_gather or args.fp4_param_gather:
        yield "    quantized parameters are counted as if they were not quantized"
    if not args.use_megatron_fsdp:
        yield "    without --use-megatron-fsdp only static inputs are counted"
    if room:
        yield f"    {room['bytes'] / MIB:10.1f}  not counted: {room['rows']} rows of tokens that experts have room for"
        yield "                in each MoE layer, as often as activations of experts are kept"
    if pool is None:
        yield "    the graphs' pool is not estimated for these layers"
        return
    yield f"    {pool / MIB:10.1f}  estimated: activations in the graphs' pool. Where one graph holds all layers, the"
    yield "                optimizer's gradients lie in the same memory, as activations are dead by then"


def _advice(given: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    """Yield changes of flags that put more into graphs, or into fewer."""
    if other_graphs(args):
        return
    if not captures_layers(args):
        yield f"{' '.join(changes.PER_LAYER)}: layers as graphs"
        changed = [*changes.without(given, "--cuda-graph-impl"), *changes.PER_LAYER]
        yield from read_flags(changed, args.world_size).refused
        return
    wanted = layers_per_graph(args)
    blocker = whole_model_blocker(args)
    if wanted == WHOLE_MODEL and blocker:
        yield f"drop {LAYERS_FLAG} {wanted}: layers are captured instead, because {blocker}"
        return
    dropped = changes.Change(f"drop {changes.MODULES}", changes.without(given, changes.MODULES))
    if args.cuda_graph_modules and changes.accepted(dropped, args) is not None:
        yield f"{dropped.words}: whole layers are captured, consecutive ones in one graph"
        return
    if args.cuda_graph_modules:
        yield from _parts_to_add(given, args)
        return
    if not blocker and wanted is None and not args.cuda_graph_warmup_steps:
        yield f"{LAYERS_FLAG} {WHOLE_MODEL}: the embedding, the output layer and losses are captured too"
    elif not blocker and wanted not in (None, WHOLE_MODEL):
        yield f"drop {LAYERS_FLAG}: the embedding, the output layer and losses are captured too"
    elif wanted == 1:
        yield f"drop {LAYERS_FLAG}: all consecutive layers are captured in one graph"


def _parts_to_add(given: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    """Yield what ``explain`` says of the parts of layers that run eagerly."""
    names: dict[str, str] = {}  # a part is in several stages; those of one layer have one change
    for part in chain.from_iterable(parts_of_stages(args)):
        if not part.graphed and part.module is not None:
            names.setdefault(part.module, part.name)
    for module, name in names.items():
        change = changes.to_graph(module, given, args)
        if change is not None:
            yield f"{change.words}: graphs then hold {name}"
