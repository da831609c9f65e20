"""Installs the patch's ``megatron/`` tree under its own name, so that megatron-core's files stay untouched."""

from setuptools import find_namespace_packages, setup

NAME = "megatron_fsdp_cuda_graphs"

setup(
    name="megatron-fsdp-cuda-graphs",
    version="0.1.0",
    description="Per-layer CUDA graphs under Megatron-FSDP, as a patch to Megatron-Core",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={NAME: "megatron"},
    packages=[NAME, *(f"{NAME}.{package}" for package in find_namespace_packages("megatron"))],
    install_requires=["torch>=2.6", "megatron-core>=0.19,<0.20", "numpy", "einops", "packaging"],
    extras_require={"te": ["transformer-engine[pytorch]>=2.19"]},
    # torch calls this entry point at the end of `import torch`; megatron-core cannot be imported before torch.
    entry_points={"torch.backends": [f"{NAME} = {NAME}.overlay:activate"]},
)
