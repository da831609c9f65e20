"""Installs the patch's ``megatron/`` tree under its own name, so that megatron-core's files stay untouched."""

import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup

NAME = "megatron_fsdp_cuda_graphs"

# Metadata that setuptools leaves here would be found by any Python started in this folder: torch of another environment
# would call an entry point that is not installed there, and `import torch` would fail.
METADATA = Path(__file__).with_name("build")
METADATA.mkdir(exist_ok=True)
# What an earlier build left would be installed too, modules that are gone since among them.
shutil.rmtree(METADATA / "lib", ignore_errors=True)

setup(
    name="megatron-fsdp-cuda-graphs",
    version="0.2.0",
    description="CUDA graphs under Megatron-FSDP, as a patch to Megatron-Core",
    license="Apache-2.0",
    options={"egg_info": {"egg_base": METADATA.name}},
    python_requires=">=3.12",
    package_dir={NAME: "megatron"},
    packages=[
        NAME,
        *(f"{NAME}.{package}" for package in find_namespace_packages("megatron", exclude=["*__pycache__*"])),
    ],
    # The newest that pip may bring ran on GPUs; `pip install --no-deps` installs beside others, of which
    # megatron/overlay.py has those of megatron-core that are patched. NVIDIA's containers have pre-releases of torch.
    install_requires=["torch>=2.11.0a0,<2.12", "megatron-core>=0.19.0,<=0.19.2", "numpy", "einops", "packaging"],
    extras_require={
        # It is built at installation, against the installed torch (`--no-build-isolation`), and needs CUDA's compiler.
        "te": ["transformer-engine[core-cu13,pytorch]>=2.19,<2.21"],
        "dev": [
            "hypothesis",
            "matplotlib",
            "mypy",
            "pre-commit",
            "pytest",
            "pytest-xdist",
            "pyyaml",
            "ruff",
            "setuptools>=77",
        ],
    },
    # torch calls this entry point at the end of `import torch`; megatron-core cannot be imported before torch.
    entry_points={"torch.backends": [f"{NAME} = {NAME}.overlay:activate"]},
)
