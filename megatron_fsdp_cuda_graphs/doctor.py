"""Says whether CUDA graphs under Megatron-FSDP can work in this environment, and what is missing."""

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

# As in constraints.txt, which an installation lacks: all tests passed with these, on GPUs too. pyproject.toml admits
# their minor versions.
VERIFIED_TORCH, VERIFIED_ENGINE = "2.11.0", "2.20.2"
# Tests on the CPU backend passed with these.
TESTED_TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")


@dataclass
class Report:
    """What was found, in the order in which it is printed.

    Attributes:
        facts: Name and value of everything that was looked at.
        modules: Name of every module of the patch, and whether it is replaced, extended or added.
        missing: What keeps graphs under FSDP from working, each with what to do about it.
        limits: What does not keep them from working, but narrows what can be used.
    """

    facts: list[tuple[str, str]] = field(default_factory=list)
    modules: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether graphs under FSDP can work here."""
        return not self.missing

    def __str__(self) -> str:
        lines = [f"{name:17}  {value}" for name, value in self.facts]
        added = [name for name, state in self.modules if state == "added"]
        changed = [f"{state:11} {name}" for name, state in self.modules if state != "added"]
        sections = {
            "Modules of megatron-core:": [*changed, f"and {len(added)} added"] if self.modules else [],
            "Missing:": [f"- {text}" for text in self.missing],
            "Limits:": [f"- {text}" for text in self.limits],
        }
        for title, texts in sections.items():
            lines += ["", title, *(f"  {text}" for text in texts)] if texts else []
        verdict = (
            "Graphs under Megatron-FSDP can work here."
            if self.ready
            else "Graphs under Megatron-FSDP cannot work here."
        )
        return "\n".join([*lines, "", verdict])


def find_transformer_engine() -> tuple[str | None, str | None]:
    """Return TransformerEngine's version (None: not installed), and why it cannot be imported (None: it can)."""
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        version = None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a build for another CUDA or torch raises whatever its loader raises
        return version, f"{type(error).__name__}: {error}"
    return version, None


def why_off() -> str:
    """Say why the patch is not on although torch was imported, and what to do."""
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
    return "torch did not turn the patch on: its autoload of torch.backends entry points needs torch 2.5 or newer."


def examine() -> Report:
    """Look at this environment. Imports torch, megatron-core's patched modules and TransformerEngine."""
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
    if version.is_prerelease or not VERIFIED_TORCH.startswith(f"{minor}."):  # containers have builds of pre-releases
        where = "on GPUs" if minor in TESTED_TORCH and not version.is_prerelease else "at all"
        report.limits.append(
            f"This torch was not tested {where}: {tested} and {verified} were. Compare a short training with eager "
            "training first."
        )
    _examine_core(report)
    _examine_transformer_engine(report)
    _examine_gpus(report)
    return report


def _examine_core(report: Report) -> None:
    core = overlay.find_core()
    known = ", ".join(overlay.TESTED_VERSIONS)
    report.facts.append(("megatron-core", f"{core.version or 'unknown version'} ({core.origin})" if core else "none"))
    report.facts.append(("patch", f"{'on' if overlay.is_active() else 'off'} (tested with megatron-core {known})"))
    if not overlay.is_active():
        report.missing.append(why_off())
    if core is None:
        report.missing.append(f"megatron-core is not installed. Install megatron-core=={overlay.TESTED_VERSIONS[-1]}.")
        return
    if not overlay.is_active():
        return
    if problem := overlay.untested_core():
        report.limits.append(f"{problem}. Compare a short training with an eager one first.")
    report.modules += [(name, _examine_module(name, report)) for name in overlay.patched_modules()]


def _examine_module(name: str, report: Report) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):
            module = importlib.import_module(name)
    except Exception as error:
        report.missing.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
        return "fails"
    if not overlay.is_patched(module):
        report.missing.append(f"{name} came from {module.__file__}, not from the patch: another import hook is ahead.")
        return "not patched"
    return overlay.change(name)


def _examine_transformer_engine(report: Report) -> None:
    version, error = find_transformer_engine()
    report.facts.append(("TransformerEngine", f"{version or 'none'}{f': {error}' if error else ''}"))
    if error:
        what = "cannot be imported" if version else "is not installed (extra: te)"
        report.limits.append(
            f"TransformerEngine {what}, so its layers cannot be built. Models built with --transformer-impl local can "
            "be graphed without it."
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
        report.missing.append("This torch has no NCCL, which FSDP communicates through. Install a CUDA build of torch.")
    checks = "megatron.core.transformer._cuda_graphs.flags.table"
    if dict(report.modules).get(checks, "fails") != "fails":
        problem = importlib.import_module(checks).allocator_problem()
        report.missing += [problem] if problem else []


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report. Returns the exit code: 0 if graphs under FSDP can work here, else 1; 2 for any argument."""
    if arguments:
        print(f"doctor takes no arguments: {' '.join(arguments)}", file=sys.stderr)
        return 2
    report = examine()
    print(report)
    return 0 if report.ready else 1
