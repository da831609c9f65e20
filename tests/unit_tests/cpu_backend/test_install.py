"""Test the installation of the CPU backend, and its launcher for scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run python in a subprocess without a GPU."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def output(code: str) -> list[str]:
    """Run ``code`` and return the printed lines."""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


LAUNCHER = ("-m", "megatron_fsdp_cuda_graphs.cpu_backend")


def test_visible_gpu_raises():
    lines = output(
        "import torch; torch.cuda.is_available = lambda: True; zeros = torch.zeros\n"
        "from megatron_fsdp_cuda_graphs.cpu_backend import install, installed\n"
        "try: install()\n"
        "except RuntimeError as error: print(error)\n"
        "print(installed(), torch.zeros is zeros)"
    )
    assert "CUDA_VISIBLE_DEVICES=''" in lines[0]
    assert lines[1] == "False True"


@pytest.mark.long
def test_imported_megatron_gets_the_replacements():
    assert output(
        "import torch, warnings; warnings.filterwarnings('ignore')\n"
        "from megatron.core.distributed import param_and_grad_buffer as module\n"
        "from megatron_fsdp_cuda_graphs.cpu_backend import install; install()\n"
        "print(module.dist_reduce_scatter_func is torch.distributed.reduce_scatter_tensor)"
    )[-1:] == ["True"]


def test_transformer_engine_is_hidden():
    code = "from megatron_fsdp_cuda_graphs.cpu_backend import install; install(); import transformer_engine"
    assert "ModuleNotFoundError: import of transformer_engine halted" in python("-c", code).stderr


def test_launcher_runs_a_script_like_python(tmp_path: Path):
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, neighbour\n"
        "print(__name__, sys.argv[1:], sys.path[0] == sys.argv[0].rsplit('/', 1)[0], neighbour.NAME)\n"
        "print(torch.cuda.is_available(), torch.ones(2, device='cuda').is_cuda)\n"
    )
    done = python(*LAUNCHER, str(script), "--flag", "value")
    assert done.stdout.split("\n") == ["__main__ ['--flag', 'value'] True neighbour", "True True", ""], done.stderr


def test_script_ends_after_threads_and_exit_functions(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "import atexit, threading, time\n"
        "class Thing:\n"
        "    def __del__(self): print('taken apart')\n"
        "atexit.kept = Thing()\n"  # finalization would delete it
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
    )
    done = python(*LAUNCHER, str(tmp_path / "script.py"))
    assert done.stdout == "thread\nat exit\n", done.stderr
    assert done.returncode == 0
