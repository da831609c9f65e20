"""What scripts on ranks of their own import before megatron-core: it installs the CPU backend where there is no GPU.

Never import it in a process of tests: the CPU backend stays installed.

Attributes:
    on_cpu: Whether the ranks have no GPU.
"""

import sys

import torch

from megatron_fsdp_cuda_graphs import cpu_backend

on_cpu = cpu_backend.installed() or not torch.cuda.is_available()  # the backend's torch.cuda is available too
if on_cpu:
    cpu_backend.install()

from tests.support.stand_ins import fused_weight_gradient_mlp_cuda  # noqa: E402

sys.modules.setdefault("fused_weight_gradient_mlp_cuda", fused_weight_gradient_mlp_cuda)
