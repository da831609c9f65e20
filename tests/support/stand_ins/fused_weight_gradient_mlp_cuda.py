"""Replace Apex's extension of the same name with plain torch, for tests of fused weight gradients.

Megatron's own linear layers reject ``gradient_accumulation_fusion`` without the extension, which must be built from
source.
"""

import torch


def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_outputs: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the weight gradient ``grad_outputs^T inputs`` to ``main_grad``, ``[out, in]``."""
    main_grad.add_(grad_outputs.t().matmul(inputs))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
