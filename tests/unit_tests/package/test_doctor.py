"""Test ``python -m megatron_fsdp_cuda_graphs doctor``."""

import importlib.metadata
import os
import re
import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

from megatron_fsdp_cuda_graphs import __main__ as command
from megatron_fsdp_cuda_graphs import doctor, overlay

ROOT = Path(__file__).parents[3]
TE_MODULE = "transformer_engine.pytorch"
CONTAINER_TORCH = "2.11.0a0+eb65b36914.nv26.2"  # an NVIDIA pre-release build


def transformer_engine(monkeypatch):
    """Install a stub of TransformerEngine."""
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, TE_MODULE, types.ModuleType(TE_MODULE))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2")


@pytest.fixture
def no_transformer_engine(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, TE_MODULE, None)
    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch, "__version__", f"{doctor.VERIFIED_TORCH}+cu130")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def patched_core(monkeypatch):
    """Skip the import of the patched modules; another test imports them in a subprocess."""
    monkeypatch.setattr(doctor, "_examine_module", lambda name, report: None)


@pytest.fixture
def ready(two_gpus, patched_core, monkeypatch):
    transformer_engine(monkeypatch)


class TestWhyOff:
    @pytest.fixture(autouse=True)
    def clean(self, monkeypatch):
        monkeypatch.delenv(overlay.SWITCH, raising=False)
        monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)

    @pytest.mark.parametrize("value", ["0", "False"])
    def test_switched_off_patch_is_reported(self, monkeypatch, value):
        monkeypatch.setenv(overlay.SWITCH, value)
        assert doctor.why_off() == f"MEGATRON_FSDP_CUDA_GRAPHS={value} turns the patch off. Unset it."

    def test_untested_megatron_core_is_reported(self, monkeypatch):
        monkeypatch.setattr(overlay, "find_core", lambda: overlay.Core("0.20.0", "somewhere"))
        assert "found 0.20.0 at somewhere. It is left unpatched. Install megatron-core==0.19.2" in doctor.why_off()

    def test_disabled_autoload_of_torch(self, monkeypatch):
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in doctor.why_off()
        assert "megatron_fsdp_cuda_graphs.overlay.activate()" in doctor.why_off()

    def test_missing_entry_point_is_reported(self, monkeypatch):
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
        assert "entry point that turns the patch on is not installed" in doctor.why_off()


class TestReport:
    def test_complete_environment_can_use_graphs(self, ready):
        assert doctor.main() == 0
        report = doctor.examine()
        assert (report.missing, report.limits) == ([], [])
        assert str(report).endswith("Graphs under Megatron-FSDP can work here.")
        assert ("GPUs", "2 x H200") in report.facts

    def test_missing_transformer_engine_is_a_limit(self, two_gpus, patched_core, no_transformer_engine):
        report = doctor.examine()
        assert not report.missing
        assert "--transformer-impl local" in report.limits[0]

    def test_disabled_patch_is_reported(self, ready, monkeypatch):
        monkeypatch.setattr(overlay, "is_active", lambda: False)
        monkeypatch.setenv(overlay.SWITCH, "0")
        assert doctor.examine().missing == [doctor.why_off()]

    def test_untested_megatron_core_on_request_is_a_limit(self, ready, monkeypatch):
        monkeypatch.setattr(overlay, "find_core", lambda: overlay.Core("0.20.0", "somewhere"))
        monkeypatch.setenv(overlay.SWITCH, "untested")
        report = doctor.examine()
        assert not report.missing
        assert "found 0.20.0 at somewhere" in report.limits[0]

    def test_missing_megatron_core_is_reported(self, ready, monkeypatch):
        monkeypatch.setattr(overlay, "find_core", lambda: None)
        assert doctor.examine().missing == ["megatron-core is not installed. Install megatron-core==0.19.2."]

    def test_expandable_segments_need_nccl_graph_register_0(self, ready, monkeypatch):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        (missing,) = doctor.examine().missing
        assert "NCCL_GRAPH_REGISTER=0" in missing
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
        assert not doctor.examine().missing

    @pytest.mark.parametrize(
        ("version", "where"),
        [("2.15.0+cu132", "on GPUs"), ("2.16.0", "at all"), ("2.1.0", "at all"), (CONTAINER_TORCH, "at all")],
    )
    def test_untested_torch_is_a_limit(self, ready, monkeypatch, version, where):
        monkeypatch.setattr(torch, "__version__", version)
        report = doctor.examine()
        assert not report.missing
        tested = "torch 2.11 to 2.15 on the CPU backend", "torch 2.11.0 with TransformerEngine 2.20.2 on GPUs"
        assert report.limits[0].startswith(f"This torch is not tested {where}: {' and '.join(tested)} are.")
        assert ("tested", "; ".join(tested)) in report.facts

    def test_constraints_have_the_gpu_tested_versions(self):
        constraints = (ROOT / "constraints.txt").read_text().splitlines()
        assert f"torch=={doctor.VERIFIED_TORCH}" in constraints
        assert f"transformer-engine=={doctor.VERIFIED_ENGINE}" in constraints

    def test_pip_installs_gpu_tested_versions(self):
        setup = (ROOT / "pyproject.toml").read_text()
        (torches,) = re.findall(r'"torch(>=[^"]+)"', setup)
        minors = [f"2.{minor}" for minor in range(30) if SpecifierSet(torches).contains(f"2.{minor}.0")]
        assert minors == [doctor.VERIFIED_TORCH.rpartition(".")[0]]
        (engines,) = re.findall(r'"transformer-engine[^>]*(>=[^"]+)"', setup)
        newest = max(f"2.{minor}" for minor in range(10, 30) if SpecifierSet(engines).contains(f"2.{minor}.2"))
        assert newest == doctor.VERIFIED_ENGINE.rpartition(".")[0]

    def test_makefile_tests_the_same_versions_of_torch(self):
        (others,) = re.findall(r"^OTHER_TORCHES := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        versions = [doctor.VERIFIED_TORCH, *others.split()]
        assert [version.rpartition(".")[0] for version in versions] == list(doctor.TESTED_TORCH)


def test_requested_version_of_torch_is_installed():
    asked = os.environ.get("TORCH_VERSION")
    minor = f"{asked}+" if asked else tuple(f"{minor}." for minor in doctor.TESTED_TORCH)
    assert torch.__version__.startswith(minor)


class TestModule:
    def test_import_error_is_reported(self, monkeypatch):
        def refuse(name):
            raise OSError("broken build")

        monkeypatch.setattr(importlib, "import_module", refuse)
        report = doctor.Report()
        doctor._examine_module("megatron.core.layers", report)
        assert report.missing == ["megatron.core.layers cannot be imported: OSError: broken build"]

    def test_module_from_another_import_hook_is_reported(self, monkeypatch):
        name = overlay.patched_modules()[0]
        stranger = types.ModuleType(name)
        stranger.__file__ = "elsewhere.py"
        monkeypatch.setattr(importlib, "import_module", lambda _: stranger)
        report = doctor.Report()
        doctor._examine_module(name, report)
        assert report.missing[0].startswith(f"{name} came from elsewhere.py")


def test_report_of_this_environment():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fsdp_cuda_graphs"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    assert f"patched modules    {len(overlay.patched_modules())}\n" in done.stdout
    (missing,) = done.stdout.split("Missing:\n")[1].split("\n\n")[0].splitlines()
    assert "No GPU is visible" in missing


def test_unknown_command_is_refused_and_help_lists_all(capsys):
    assert command.main(["plot"]) == 2
    assert "no command 'plot'" in capsys.readouterr().err
    assert command.main(["--help"]) == 0
    assert "plan " in capsys.readouterr().out
