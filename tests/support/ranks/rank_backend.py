"""Install the CPU backend if there is no GPU. Scripts of ranks import this module before megatron-core.

Never import it in a test process: the CPU backend stays installed.

Attributes:
    on_cpu: Whether the ranks use the CPU backend.
"""

import sys

import torch

from megatron_fsdp_cuda_graphs import cpu_backend

on_cpu = cpu_backend.installed() or not torch.cuda.is_available()  # the backend also provides torch.cuda
if on_cpu:
    cpu_backend.install()

from tests.support.stand_ins import fused_weight_gradient_mlp_cuda  # noqa: E402

sys.modules.setdefault("fused_weight_gradient_mlp_cuda", fused_weight_gradient_mlp_cuda)
