"""Print a plan. Import this module after installing the CPU backend."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from megatron.core.transformer._cuda_graphs.te.capture_report import eager_parts

from .command import quietly
from .dry_stage import blocker_of_pipeline, dry_stage
from .flags import Flags, message_of, read_flags
from .graphs import planned, scope_of
from .memory import stage_memory

SHOWN = 12  # graphs per stage without --every-graph
NOT_COUNTED = "Not counted: activations of eager passes, workspaces of kernels and NCCL, and the CUDA context."


def show(own: argparse.Namespace, given: list[str]) -> int:
    """Print the plan for the flags ``given`` and return the exit code.

    Args:
        own: Arguments of the command.
        given: Training flags.

    Raises:
        SystemExit: With code 2 if a flag is unknown or its value has the wrong type.
    """
    flags = read_flags(given, own.world_size)
    args = flags.args
    lines = [*_verdict(flags)]
    if not flags.refused and args.cuda_graph_impl != "transformer_engine":
        lines.append(f"No plan: --cuda-graph-impl is {args.cuda_graph_impl}, not transformer_engine.")
    elif not flags.refused:
        if args.padded_vocab_size is None and args.vocab_size is None:
            print("Add --padded-vocab-size N: this command loads no tokenizer.", file=sys.stderr)
            return 2
        try:
            lines += _stages(args, sys.maxsize if own.every_graph else SHOWN)
        except Exception as error:
            print(f"megatron-core cannot build the model here: {message_of(error)}", file=sys.stderr)
            return 1
    print("\n".join(lines))
    return int(bool(flags.refused))


def _stages(args: argparse.Namespace, shown: int) -> Iterator[str]:
    elsewhere = blocker_of_pipeline(args)
    masked = args.create_attention_mask_in_dataloader or not args.cuda_graph_warmup_steps
    given = {"labels", *(["attention_mask"] if masked else [])}
    for stage in range(args.pipeline_model_parallel_size):
        with quietly(), dry_stage(args, stage) as helper:
            scope = scope_of(helper, elsewhere)
            graphs = planned(helper, scope, given)
            eager = list(eager_parts(helper.stage, scope))
            memory = list(stage_memory(helper, scope, graphs, args))
        yield from ("", f"Pipeline stage {stage + 1} of {args.pipeline_model_parallel_size}")
        if graphs.why_nothing:
            yield f"  No graphs: {graphs.why_nothing}."
        else:
            count = len(graphs.graphs)
            yield f"  Order of passes: {' '.join(f'{step:g}' for step in graphs.order)} (chunk, minus for backward)"
            yield f"  Graphs: {count}, captured in this order:"
            yield from (f"    {graph}" for graph in graphs.graphs[:shown])
            if count > shown:
                yield f"    and {count - shown} more (--every-graph lists them)"
            yield from (f"  eager: {what}, because {why}" for what, why in eager)
        yield from ("  Memory per rank, MiB:", *memory)
    yield from ("", NOT_COUNTED)


def _verdict(flags: Flags) -> Iterator[str]:
    if flags.refused:
        yield "The flags do not work together:"
    else:
        args = flags.args
        names = ("tensor_model", "pipeline_model", "context", "expert_model")
        sizes = {name.removesuffix("_model"): getattr(args, f"{name}_parallel_size") for name in ("data", *names)}
        parallel = ", ".join(f"{name} {size}" for name, size in sizes.items())
        yield "The flags work together."
        yield f"Ranks: {args.world_size} (--world-size); parallel: {parallel}"
    yield from _bulleted(flags.refused)
    if flags.remarks:
        yield from ("", "Remarks:", *_bulleted(flags.remarks))


def _bulleted(texts: Sequence[str]) -> list[str]:
    return [f"- {text}" for text in texts]
