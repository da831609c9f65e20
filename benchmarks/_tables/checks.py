"""Generate tables of comparisons with eager training."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._step_time.variants import parts

from .steps import Results, Row, commit, gpus

ENGINES = {"native": "", "transformer_engine": ", TransformerEngine's engine"}
FLAG = re.compile(r"~?--\S+(?: (?!~?--)\S+)*")  # with its values; ~ removes it
_LAYOUTS = {
    "two instances": "HSDP",
    "EP of all": "EP = world size",
    "data parallel": "DP",
    "with sequence parallelism": "with SP",
}
MUST_DIFFER = "control=dead_"  # in the name of a negative control


def equality(results: Results) -> Iterator[Row]:
    """Yield one row per kind of comparison and machine: the number of cases equal to eager, and the commits.

    Only the first result of a case on a machine counts.
    """
    yield "what", "layouts", "GPUs", "equal", "others", "commit"
    rows: dict[tuple[str, str], dict[tuple[str, str], tuple[str, str]]] = {}
    for found in results:
        for case in found.get("results", ()):
            what = f"`{case['tests']}`{ENGINES[case.get('engine', 'native')]}"
            layout = case.get("layout", "data parallel")
            cases = rows.setdefault((gpus(found), what), {})
            cases.setdefault((layout, case["case"]), (_outcome(case), found["commit"]))
    for (machine, what), cases in sorted(rows.items()):
        layouts = "; ".join(sorted({layout for layout, _ in cases}))
        for long, short in _LAYOUTS.items():
            layouts = layouts.replace(long, short)
        counts = Counter(outcome for outcome, _ in cases.values())
        others = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if outcome != "equal")
        equal = f"{counts['equal']} of {counts.total() - counts['must differ']}"
        yield what, layouts, machine, equal, others, ", ".join(dict.fromkeys(commit for _, commit in cases.values()))
    for found in results:
        for each in found.get("comparisons", ()):
            yield (
                *(each["what"], each["layout"], gpus(each)),
                *(f"{each['equal']} of {each['cases']}", each["others"], each["commit"]),
            )


def _outcome(case: Mapping[str, Any]) -> str:
    if case["error"]:
        return "failed"
    if not case["differences"]:
        return "equal"
    return "must differ" if MUST_DIFFER in case["case"] else "differ"


def faults(results: Results) -> Iterator[Row]:
    """Yield one row per case with injected faults."""
    yield "case", "on", "passed", "commit"
    for found in results:
        for each in found["results"]:
            passed, attempts = (
                sum(each[key].values()) if isinstance(each[key], dict) else each[key] for key in ("passed", "attempts")
            )
            what = each.get("what", f"`{each['case']}`")
            yield what, gpus(found), f"{passed:,} of {attempts:,}", commit(found, each)


def soaks(results: Results) -> Iterator[Row]:
    """Yield one row per soak test."""
    yield "model", "GPUs", "steps, resumed after", "losses and norms equal to eager's", "memory", "commit"
    names = {
        "dense": "dense, the whole model",
        "moe": "parts of MoE layers",
        "grouped": "dropless experts in graphs of the whole model, with token imbalance drawn for each micro-batch",
    }
    for found in results:
        for name, said in names.items():
            if name in found:
                each = found[name]
                equal = each["steps"] - len(each["differing_steps"])
                flat = "flat" if each["flat"] else "grows"
                yield (
                    *(said, gpus(found), f"{each['steps']}, {each['resumed_after']}"),
                    *(f"{equal} of {each['steps']}", flat, found["commit"]),
                )


def repeated(results: Results) -> Iterator[Row]:
    """Yield rows with the numbers of equal runs and of distinct results.

    Modes of a model with the same numbers share a row. The model's name omits flags that all its runs share.
    """
    yield "model", "GPUs", "mode", "equal runs", "distinct results", "commit"
    modes: dict[Row, list[str]] = {}
    for found in results:
        by_model: dict[str, list[list[str]]] = {}
        for row in found["rows"]:
            name, _, flags = row["configuration"].partition(":")
            by_model.setdefault(name, []).append(FLAG.findall(flags))
        for row in found["rows"]:
            name, _, flags = row["configuration"].partition(":")
            common = set.intersection(*map(set, by_model[name]))
            own = " ".join(flag for flag in FLAG.findall(flags) if flag not in common)
            model, outcome = f"{name}, `{own}`" if own else name, f"{row['equal']} of {row['runs']}"
            variant, _, variant_flags = parts(row["variant"])
            mode = " ".join([_trained(variant), *(f"`{flag}`" for flag in [" ".join(variant_flags)] if flag)])
            modes.setdefault((model, gpus(found), outcome, str(row["results"]), row["commit"]), []).append(mode)
    for (model, machine, *rest), found_modes in modes.items():
        yield model, machine, "; ".join(found_modes), *rest


def _trained(variant: str) -> str:
    return variant.replace("native", "graphs").replace("+", ", ")
