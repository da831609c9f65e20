"""Report whether CUDA graphs under Megatron-FSDP can work in this environment, and list missing requirements."""

import importlib
import importlib.metadata
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from packaging.version import Version

from . import overlay

# GPU-tested versions, as in constraints.txt, which is not installed. pyproject.toml allows their minor versions.
VERIFIED_TORCH, VERIFIED_ENGINE = "2.11.0", "2.20.2"
# Versions tested on the CPU backend.
TESTED_TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")


@dataclass
class Report:
    """Findings, in print order.

    Attributes:
        facts: Names and values to print.
        missing: Problems that keep graphs under FSDP from working, with remedies.
        limits: Other problems.
    """

    facts: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{name:17}  {value}" for name, value in self.facts]
        for title, texts in {"Missing:": self.missing, "Limits:": self.limits}.items():
            lines += ["", title, *(f"  - {text}" for text in texts)] if texts else []
        can = "cannot" if self.missing else "can"
        return "\n".join([*lines, "", f"Graphs under Megatron-FSDP {can} work here."])


def find_transformer_engine() -> tuple[str | None, str | None]:
    """Return TransformerEngine's version (None if not installed) and its import error (None if it imports)."""
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        version = None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # builds for a different CUDA or torch can raise any error
        return version, f"{type(error).__name__}: {error}"
    return version, None


def why_off() -> str:
    """Return the reason why importing torch did not turn the patch on, and the remedy."""
    if overlay.switch() == "off":
        return f"{overlay.SWITCH}={os.environ[overlay.SWITCH]} turns the patch off. Unset it."
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if autoload != "1":
        return (
            f"TORCH_DEVICE_BACKEND_AUTOLOAD={autoload} keeps torch from turning the patch on. Unset it, or call "
            f"{overlay.__name__}.activate() before anything imports megatron."
        )
    if not any(entry.attr == "activate" for entry in importlib.metadata.entry_points(group="torch.backends")):
        return "The entry point that turns the patch on is not installed. Install this project with pip."
    if problem := overlay.untested_core():
        return f"{problem}. It is left unpatched. {overlay.REMEDY}"
    return "torch did not turn the patch on: install torch 2.5 or newer."


def examine() -> Report:
    """Examine this environment. Imports torch, the patched modules and TransformerEngine."""
    report = Report(facts=[("Python", platform.python_version())])
    try:
        import torch
    except Exception as error:
        report.missing.append(f"torch cannot be imported: {error.__cause__ or error}")
        return report
    report.facts.append(("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"))
    tested = f"torch {TESTED_TORCH[0]} to {TESTED_TORCH[-1]} on the CPU backend"
    verified = f"torch {VERIFIED_TORCH} with TransformerEngine {VERIFIED_ENGINE} on GPUs"
    report.facts.append(("tested", f"{tested}; {verified}"))
    version = Version(torch.__version__)
    minor = f"{version.major}.{version.minor}"
    if version.is_prerelease or not VERIFIED_TORCH.startswith(f"{minor}."):  # containers have pre-release builds
        where = "on GPUs" if minor in TESTED_TORCH and not version.is_prerelease else "at all"
        report.limits.append(
            f"This torch is not tested {where}: {tested} and {verified} are. First compare a short training with an "
            "eager one."
        )
    _examine_core(report)
    _examine_transformer_engine(report)
    _examine_gpus(report)
    return report


def _examine_core(report: Report) -> None:
    core, active = overlay.find_core(), overlay.is_active()
    known = ", ".join(overlay.TESTED_VERSIONS)
    report.facts.append(("megatron-core", f"{core.version or 'unknown version'} ({core.origin})" if core else "none"))
    report.facts.append(("patch", f"{'on' if active else 'off'} (tested with megatron-core {known})"))
    if not active:
        report.missing.append(why_off())
    if core is None:
        report.missing.append(f"megatron-core is not installed. Install megatron-core=={overlay.TESTED_VERSIONS[-1]}.")
    elif active:
        if problem := overlay.untested_core():
            report.limits.append(f"{problem}. Compare a short training with an eager one first.")
        names = overlay.patched_modules()
        for name in names:
            _examine_module(name, report)
        report.facts.append(("patched modules", str(len(names))))


def _examine_module(name: str, report: Report) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            module = importlib.import_module(name)
    except Exception as error:
        report.missing.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
        return
    if not overlay.is_patched(module):
        report.missing.append(f"{name} came from {module.__file__}: an import hook other than the patch's runs first.")


def _examine_transformer_engine(report: Report) -> None:
    version, error = find_transformer_engine()
    report.facts.append(("TransformerEngine", f"{version or 'none'}{f': {error}' if error else ''}"))
    if error:
        what = "cannot be imported" if version else "is not installed (extra: te)"
        report.limits.append(
            f"TransformerEngine {what}: use --transformer-impl local, whose models can be captured without it."
        )


def _examine_gpus(report: Report) -> None:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    names = ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus))
    report.facts.append(("GPUs", names or "none"))
    if not gpus:
        report.missing.append("No GPU is visible to torch. The CPU backend runs the tests and `make demo` without one.")
        return
    if not torch.distributed.is_nccl_available():
        report.missing.append("This torch has no NCCL, which FSDP needs. Install a CUDA build of torch.")
    if not report.missing:
        from megatron.core.transformer._cuda_graphs.flags.table import allocator_problem

        problem = allocator_problem()
        report.missing += [problem] if problem else []


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report. Return 0 if graphs under FSDP can work, 1 if not, 2 if there are arguments."""
    if arguments:
        print(f"doctor takes no arguments: {' '.join(arguments)}", file=sys.stderr)
        return 2
    report = examine()
    print(report)
    return int(bool(report.missing))
