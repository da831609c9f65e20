"""List, by hardware, the flags with which benchmark results show training to be bit-identical to eager.

A fact is a flag, or a flag and one value: ``--fp16``, ``--fp8-recipe delayed``, ``--cuda-graph-modules not given``.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks._step_time.variants import ADDITIONS, parts
from benchmarks._tables.checks import FLAG, MUST_DIFFER

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# Flags of a case's attributes, under present and earlier names; other attributes are named after their flags.
FLAGS: dict[str, tuple[str, ...]] = {
    "average_in_collective": ("--ddp-average-in-collective",),
    "averaged": ("--ddp-average-in-collective",),
    "capacity": ("--moe-pad-expert-input-to-capacity",),
    "dropout": ("--hidden-dropout", "--attention-dropout"),
    "experts": ("--num-experts",),
    "fp8": ("--fp8-format", "--fp8-recipe"),
    "fp8_param": ("--fp8-param-gather",),
    "fp8_params": ("--fp8-param-gather",),
    "fused_wgrad": ("--no-gradient-accumulation-fusion not given",),
    "gradient_accumulation_fusion": ("--no-gradient-accumulation-fusion not given",),
    "grouped_tensor": ("--moe-use-grouped-tensor",),
    "instances": ("--num-distributed-optimizer-instances",),
    "latent_attention": ("--multi-latent-attention",),
    "modules": ("--cuda-graph-modules",),
    "moe_expert_capacity_factor": ("--moe-pad-expert-input-to-capacity",),
    "mtp": ("--mtp-num-layers",),
    "nccl_ub": ("--use-nccl-ub",),
    "outer": ("--outer-dp-sharding-strategy",),
    "packed": ("--cuda-graph-packed-sequences",),
    "pattern": ("--hybrid-layer-pattern",),
    "positions": ("--position-embedding-type",),
    "recompute": ("--recompute-modules",),
    "shared_overlap": ("--moe-shared-expert-overlap",),
    "strategy": ("--data-parallel-sharding-strategy",),
    "virtual": ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
}
# Earlier cases without the attribute, or with ``decoder`` or 0, had graphs of all layers, which were removed.
GRAPHS = {"model": "model", "layer": "1", "-1": "model", "1": "1"}
LAYOUTS = {
    "CP": ("--context-parallel-size",),
    "EP": ("--expert-model-parallel-size",),
    "ETP": ("--expert-tensor-parallel-size",),
    "PP": ("--pipeline-model-parallel-size",),
    "TP": ("--tensor-model-parallel-size", "--sequence-parallel"),
}


def facts_on(card: str) -> set[str]:
    """Return the facts that benchmark results verify on GPUs whose name contains ``card``."""
    files = map(json.loads, (file.read_text() for file in sorted(RESULTS.glob("*/*.json"))))
    return {fact for found in files if card in found.get("hardware", "") for fact in _facts(found)}


def _facts(found: Mapping[str, Any]) -> Iterator[str]:
    for case in found.get("results", ()):
        if "tests" in case and not (case["error"] or case["differences"] or MUST_DIFFER in case["case"]):
            yield from of_case(case["case"], case.get("layout", ""))
    for row in found.get("rows", ()):
        if "equal" in row and row["equal"] == row["runs"]:  # other rows record no comparison
            yield from of_variant(row["configuration"], row["variant"], found["hardware"])
    for configuration, rows in found.get("configurations", {}).items():
        for row in rows:
            if row.get("equal_steps") == row["steps"]:
                yield from of_variant(configuration, row["variant"], found["hardware"])
    if any(found.get(kind, {}).get("differing_steps") == [] for kind in ("dense", "moe", "grouped")):
        yield from ("--save", "--load")  # a soak test resumes


def of_case(text: str, layout: str) -> Iterator[str]:
    """Yield the facts that a comparison verifies, given its case (``dtype=bf16 modules=attn+mlp``) and layout."""
    words = re.sub(r"config=(\S+)", lambda config: config[1].replace("+", " ").replace("'", ""), text).split()
    case = {"positions": "rope", "tied": "True", "modules": ""} | dict(word.split("=", 1) for word in words)
    if {"wrapper", "fsdp", "torch_fsdp", "local"} & case.keys():
        return
    yield f"--{case['dtype']}"
    yield "--untie-embeddings-and-output-weights" + (" not given" if case["tied"] == "True" else "")
    if not case["modules"]:
        yield "--cuda-graph-modules not given"
        holds = GRAPHS.get(case.get("holds", case.get("layers_per_graph", "")))
        if holds and "model" not in case:  # layers of vision encoders are captured individually
            yield f"--cuda-graph-layers-per-graph {holds}"
    for name, values in case.items():
        if values not in ("", "0", "False", "None"):
            for flag in FLAGS.get(name, (f"--{name.replace('_', '-')}",)):
                yield from (flag, *(f"{flag} {value}" for value in values.split("+")))
    for name in re.findall(r"[A-Z]+", layout):
        yield from LAYOUTS.get(name, ())


def of_variant(configuration: str, variant: str, hardware: str) -> Iterator[str]:
    """Yield the facts that a ``step_time.py`` run verifies; none unless it has graphs of a sharded model."""
    model, _, flags = configuration.partition(":")
    name, _, own_flags = parts(variant)
    own, (kind, *additions) = " ".join(own_flags), name.split("+")
    if kind != "native":  # eager, another engine or wrapper
        return
    if model in ("C", "D") and not hardware.startswith("1 x"):
        yield "--expert-model-parallel-size"
    if "fused" in additions:
        yield "--no-gradient-accumulation-fusion not given"
    added = (flag for each in additions if each in ADDITIONS for flag in ADDITIONS[each][1])
    for flag, *values in map(str.split, (*FLAG.findall(f"{flags} {own}"), *added)):
        if not flag.startswith("~"):
            yield from (flag, *(f"{flag} {value}" for value in values))
