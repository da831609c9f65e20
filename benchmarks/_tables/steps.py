"""Generate tables of times and memory from results of ``step_time.py`` and ``scaling.py``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks._step_time.variants import parts

Row = tuple[str, ...]
Results = Sequence[Mapping[str, Any]]
NAMES = {
    "eager": "eager",
    "native": "graphs",
    "native::--cuda-graph-layers-per-graph all": "graphs of all layers",
    "full_iteration": "full iteration",
    "compute_alone": "compute alone",
}
_KINDS = {
    "eager+grouped": "eager",
    "native+grouped": "whole model",
    "full_iteration+grouped": "full iteration",
    "ddp+grouped": "eager",
    "ddp_graphs+grouped": "layers",
    "ddp+grouped::--cuda-graph-impl full_iteration": "full iteration",
}
_SETTINGS = {"NCCL_CTA_POLICY=2": "", "--use-nccl-ub": "user buffers", "--ddp-average-in-collective": "averaged"}
PEAK_TFLOPS = 989.4  # H100 and H200 (SXM), dense bf16, from NVIDIA's data sheets
FLAGS = {
    "+grouped": "`--moe-use-grouped-tensor`",
    "+checks": "losses checked",
}


def launches(results: Results) -> Iterator[Row]:
    """Yield one row per configuration: medians and ranges over launches, from the first file that has it."""
    yield (
        *("model", "GPUs", "eager (ms)", "graphs (ms)", "full iteration (ms)", "compute alone (ms)"),
        *("graphs / full iteration", "graphs / compute alone", "commit"),
    )
    seen: set[tuple[str, str]] = set()
    for found, model, variants in _trained(results, needed=("native",)):
        if (model, gpus(found)) in seen:
            continue
        seen.add((model, gpus(found)))
        graphs, whole, alone = (variants.get(name, {}) for name in ("native", "full_iteration", "compute_alone"))
        yield (
            model,
            gpus(found),
            _spread(variants.get("eager", {}), "ms"),
            _spread(graphs, "ms"),
            _spread(whole, "ms"),
            _spread(alone, "ms"),
            _spread(graphs, "ratio_to_full_iteration", whole),
            _spread(graphs, "ratio_to_compute_alone", alone),
            commit(found, graphs),
        )


def models(results: Results) -> Iterator[Row]:
    """Yield one row per configuration: times, throughput with graphs, and memory relative to eager training."""
    yield (
        *("model", "GPUs", "eager (ms)", "graphs (ms)", "full iteration (ms)", "compute alone (ms)"),
        *("tokens/s per GPU", "MFU", "memory / eager", "equal steps", "commit"),
    )
    for found, model, variants in _trained(results):
        eager, graphs = variants["eager"], variants["native"]
        tokens, tflops = (graphs.get(key) for key in ("tokens_per_second", "tflops"))
        yield (
            *(model, gpus(found)),
            *(_ms(variants.get(name, {})) for name in ("eager", "native", "full_iteration", "compute_alone")),
            *(("-", "-") if tflops is None else (str(tokens), f"{tflops / PEAK_TFLOPS:.0%}")),
            f"{graphs['reserved_mib'] / eager['reserved_mib']:.2f}",
            *(f"{graphs['equal_steps']} of {graphs['steps']}", commit(found, graphs)),
        )


def levers(results: Results) -> Iterator[Row]:
    """Yield one row per variant with graphs, compared with a full-iteration graph with the same settings."""
    yield (
        *("model", "GPUs", "settings", "graphs (ms)", "full iteration (ms)", "graphs / full iteration"),
        *("equal steps", "commit"),
    )
    for found in results:
        for configuration, rows in found["configurations"].items():
            variants = {row["variant"]: row for row in rows}
            for name, row in variants.items():
                if name.startswith("native"):
                    compared = f"{row['equal_steps']} of {row['steps']}" if row["reference"] else "-"
                    whole = variants.get(name.replace("native", "full_iteration"), {})
                    ratio = f"{row['ms'] / whole['ms']:.2f}" if whole else "-"
                    yield (
                        *(_model(configuration, ""), gpus(found), _settings(name), _ms(row), _ms(whole), ratio),
                        *(compared, commit(found, row)),
                    )


def _settings(variant: str) -> str:
    """Return the environment variables, flags and additions of a variant, as worded in ``_SETTINGS`` where possible."""
    name, variables, flags = parts(variant)
    quoted = [_SETTINGS.get(word, f"`{word}`") for word in (*variables, *flags)]
    optimizer = ["`--optimizer-cuda-graph`"] * ("+optimizer" in name)
    return ", ".join(filter(None, ["fused"] * ("+fused" in name) + quoted + optimizer))


def memory(results: Results) -> Iterator[Row]:
    """Yield one row per configuration: memory and capture time. Each cell lists the values of all variants."""
    yield "model", "GPUs", "mode", "reserved (MiB)", "peak allocated (MiB)", "graph pools (MiB)", "capture (s)"
    for found, model, variants in _trained(results):
        rows = {
            mode: variants[name]
            for name, mode in NAMES.items()
            if "reserved_mib" in variants.get(name, {}) and name != "compute_alone"  # it does not shard
        }
        keys = ("reserved_mib", "max_allocated_mib", "graph_pools_mib")
        figures = (" / ".join(f"{row[key]:.0f}" for row in rows.values()) for key in keys)
        seconds = " / ".join(f"{row['capture_seconds']:.2f}" for row in rows.values())
        yield model, gpus(found), " / ".join(rows), *figures, seconds


def recomputation(results: Results) -> Iterator[Row]:
    """Yield one row per configuration: times, and memory with graphs."""
    yield "model", "GPUs", "eager (ms)", "graphs (ms)", "reserved (MiB)", "graph pools (MiB)", "commit"
    for found in results:
        for configuration, rows in found["configurations"].items():
            eager, graphs = ({row["variant"]: row for row in rows}.get(name, {}) for name in ("eager", "native"))
            figures = (f"{graphs[key]:.0f}" for key in ("reserved_mib", "graph_pools_mib"))
            yield _model(configuration, ""), gpus(found), _ms(eager), _ms(graphs), *figures, found["commit"]


def kinds(results: Results) -> Iterator[Row]:
    """Yield one row per model and wrapper: time and memory. Each cell lists the values of all kinds of graphs."""
    yield "model", "GPUs", "wrapper", "mode", "ms", "reserved (MiB)", "capture (s)", "equal steps", "commit"
    for found in results:
        for configuration, rows in found["configurations"].items():
            for wrapper, prefix in (("Megatron-FSDP", ("eager", "native", "full")), ("DDP", ("ddp",))):
                own = [row for row in rows if row["variant"].startswith(prefix)]
                equal = {f"{row['equal_steps']} of {row['steps']}": None for row in own if row["reference"]}
                yield (
                    *(_model(configuration, ""), gpus(found), wrapper),
                    *(" / ".join(_KINDS[row["variant"]] for row in own), " / ".join(_ms(row) for row in own)),
                    " / ".join(f"{row['reserved_mib']:.0f}" for row in own),
                    " / ".join(f"{row['capture_seconds']:.2f}" for row in own),
                    *(" / ".join(equal), commit(found, own[0])),
                )


def growth(results: Results) -> Iterator[Row]:
    """Yield one row per number of layers and micro-batches: step times, memory and capture time."""
    yield (
        *(
            "layers",
            "micro-batches",
            "eager (ms)",
            "graphs (ms)",
            "eager (MiB)",
            "graphs (MiB)",
        ),
        *("capture (s)", "equal steps", "commit"),
    )
    for found in results:
        models: dict[tuple[int, int], dict[str, Any]] = {}
        for row in found["models"]:
            models.setdefault((row["layers"], row["micro_batches"]), {})[row["variant"]] = row
        for (layers, many), variants in models.items():
            eager, graphs = variants["eager"], variants["native"]
            yield (
                *(str(layers), str(many), _ms(eager), _ms(graphs)),
                *(str(eager["reserved_mib"]), str(graphs["reserved_mib"]), f"{graphs['capture_seconds']:.2f}"),
                *(f"{graphs['equal_steps']} of {graphs['steps']}", found["commit"]),
            )


def gpus(found: Mapping[str, Any]) -> str:
    """Return the number and model of the GPUs that produced a file."""
    return str(found["hardware"]).replace("NVIDIA ", "").removesuffix(" 80GB HBM3")


def commit(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the commit of a row, or of its file if the row has none."""
    return str(row.get("commit", found["commit"]))


def _trained(
    results: Results, *, needed: Sequence[str] = ("eager", "native")
) -> Iterator[tuple[Mapping[str, Any], str, dict[str, Any]]]:
    """Yield file content, model name and rows by variant, for each model that has all ``needed`` variants.

    Variants with a suffix in ``FLAGS`` count as a separate model, and their names omit the suffix.
    """
    for found in results:
        for configuration, rows in found.get("configurations", {}).items():
            all_variants = {row["variant"]: row for row in rows}
            for suffix in ("", *FLAGS):
                ending = len(suffix)
                variants = {
                    name[: len(name) - ending]: row for name, row in all_variants.items() if name.endswith(suffix)
                }
                if all("ms" in variants.get(name, {}) for name in needed):
                    yield found, _model(configuration, suffix), variants


def _model(configuration: str, suffix: str) -> str:
    name, _, flags = configuration.partition(":")
    return ", ".join(filter(None, [name, f"`{flags}`" * bool(flags), FLAGS.get(suffix, "")]))


def _ms(row: Mapping[str, Any]) -> str:
    return f"{row['ms']:.1f}" if "ms" in row else "-"


def _spread(row: Mapping[str, Any], key: str, base: Mapping[str, Any] | None = None) -> str:
    """Format a value of a row, followed by its range over launches if they differ.

    Args:
        row: A row, possibly empty.
        key: ``ms``, or the name of a ratio.
        base: For a ratio, the row of the variant in the denominator.
    """
    if "error" in (base or row):
        return "cannot be captured"
    value = row.get(key)
    if value is None and base and "ms" in row and "ms" in base:  # variants with additions have no ratio
        value = row["ms"] / base["ms"]
    if value is None:
        return "-"
    digits = 1 if key == "ms" else 2
    each = [launch[key] for launch in row.get("launches", ()) if launch.get(key) is not None]
    least, most = (f"{bound(each, default=0):.{digits}f}" for bound in (min, max))
    between = f" ({least} to {most})" if least != most else ""
    return f"{value:.{digits}f}{between}"
