"""Generate tables of times and memory from results of ``step_time.py``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks._step_time.variants import parts

Row = tuple[str, ...]
Results = Sequence[Mapping[str, Any]]
PARTS = "native::--cuda-graph-modules attn mlp"
_SETTINGS = {"NCCL_CTA_POLICY=2": "", "--use-nccl-ub": "user buffers", "--ddp-average-in-collective": "averaged"}
PEAK_TFLOPS = 989.4  # H100 and H200 (SXM), dense bf16, from NVIDIA's data sheets
GROUPED = "+grouped"


def steps(results: Results) -> Iterator[Row]:
    """Yield one row per configuration: times, throughput and capture time with graphs, and memory in MiB."""
    yield (
        *("model", "eager (ms)", "graphs (ms)", "graphs of parts (ms)", "full iteration (ms)", "compute alone (ms)"),
        *("graphs / full iteration", "graphs / compute alone", "tokens/s per GPU", "MFU", "capture (s)"),
        *("memory, eager", "graphs", "of these pools", "full iteration", "equal steps"),
    )
    for found in results:
        for configuration, rows in found["configurations"].items():
            for suffix in ("", GROUPED):
                named = {row["variant"]: row for row in rows if "error" not in row}
                eager, graphs, whole = (named.get(name + suffix, {}) for name in ("eager", "native", "full_iteration"))
                alone = named.get(f"compute_alone{suffix}", {})
                if eager and graphs:
                    yield (
                        _model(configuration, suffix),
                        *map(_ms, (eager, graphs, {} if suffix else named.get(PARTS, {}), whole, alone)),
                        *(_ratio(graphs, other) for other in (whole, alone)),
                        str(graphs["tokens_per_second"]),
                        f"{graphs['tflops'] / PEAK_TFLOPS:.0%}",
                        f"{graphs['capture_seconds']:.2f}",
                        *(str(each.get("reserved_mib", "-")) for each in (eager, graphs)),
                        *(str(graphs["graph_pools_mib"]), str(whole.get("reserved_mib", "-"))),
                        f"{graphs['equal_steps']} of {graphs['steps']}",
                    )


def _ratio(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    return f"{row['ms'] / base['ms']:.2f}" if base else "-"


def levers(results: Results) -> Iterator[Row]:
    """Yield one row per variant with graphs, compared with a full iteration and with compute alone, fused if it is."""
    yield (
        *("model", "settings", "graphs (ms)", "full iteration (ms)", "compute alone (ms)"),
        *("graphs / full iteration", "graphs / compute alone", "equal steps"),
    )
    for found in results:
        for configuration, rows in found["configurations"].items():
            variants = {row["variant"]: row for row in rows}
            for name, row in variants.items():
                if name.startswith("native"):
                    whole = variants.get(name.replace("native", "full_iteration"), {})
                    alone = variants.get(name.partition(":")[0].replace("native", "compute_alone"), {})
                    equal = f"{row['equal_steps']} of {row['steps']}" if row["reference"] else "-"
                    yield (
                        *(_model(configuration, GROUPED * (GROUPED in name)), _settings(name)),
                        *(*map(_ms, (row, whole, alone)), _ratio(row, whole), _ratio(row, alone), equal),
                    )


def _settings(variant: str) -> str:
    """Return the environment variables, flags and additions of a variant, as worded in ``_SETTINGS`` where possible."""
    name, variables, flags = parts(variant)
    quoted = [_SETTINGS.get(word, f"`{word}`") for word in (*variables, *flags)]
    return ", ".join(filter(None, ["fused"] * ("+fused" in name) + quoted))


def gpus(found: Mapping[str, Any]) -> str:
    """Return the number and model of the GPUs that produced a file."""
    return str(found["hardware"]).replace("NVIDIA ", "").removesuffix(" 80GB HBM3")


def commit(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the commit of a row, or of its file if the row has none."""
    return str(row.get("commit", found["commit"]))


def _model(configuration: str, suffix: str) -> str:
    name, _, flags = configuration.partition(":")
    return ", ".join([name, *(f"`{each}`" for each in (flags, "--moe-use-grouped-tensor" * bool(suffix)) if each)])


def _ms(row: Mapping[str, Any]) -> str:
    return f"{row['ms']:.1f}" if "ms" in row else "-"
