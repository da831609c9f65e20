"""Define specs of hybrid models without TransformerEngine or ``mamba-ssm``.

Use them with ``--hybrid-layer-pattern M-*-ME --spec tests.support.layers.hybrid_spec local``.
"""

from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

KERNEL = 4  # tokens mixed per position


class ShiftMixer(torch.nn.Module):
    """Stand-in for ``MambaMixer``: gated causal mixing of the last tokens per channel, without CUDA kernels.

    Args:
        config: The ``TransformerConfig``.
        d_model: Hidden size.
    """

    def __init__(self, config: Any, d_model: int, **unused: Any):
        super().__init__()
        dtype = config.params_dtype
        self.norm = torch.nn.LayerNorm(d_model, dtype=dtype)
        self.in_proj = torch.nn.Linear(d_model, 2 * d_model, dtype=dtype)
        self.taps = torch.nn.Parameter(torch.full((KERNEL, d_model), 1 / KERNEL, dtype=dtype))
        self.out_proj = torch.nn.Linear(d_model, d_model, dtype=dtype)

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """Return the mixed ``hidden_states``, ``[sequence, batch, hidden]``, and None for the bias."""
        values, gate = self.in_proj(self.norm(hidden_states)).chunk(2, dim=-1)
        padded = torch.nn.functional.pad(values, (0, 0, 0, 0, KERNEL - 1, 0))
        mixed = sum(tap * padded[shift : shift + len(values)] for shift, tap in enumerate(self.taps))
        return self.out_proj(mixed * torch.nn.functional.silu(gate)), None


class LocalHybridStack(HybridStack):
    """``HybridStack`` with Megatron's final norm."""

    def __init__(self, *args: Any, **kwargs: Any):
        with mock.patch.object(hybrid_block, "TENorm", LocalSpecProvider().layer_norm()):
            super().__init__(*args, **kwargs)


_dense = get_gpt_layer_local_submodules()
_shift_layer = ModuleSpec(
    module=MambaLayer,
    submodules=MambaLayerSubmodules(mixer=ModuleSpec(module=ShiftMixer), mamba_bda=get_bias_dropout_add),
)

local = ModuleSpec(
    module=LocalHybridStack,
    submodules=HybridStackSubmodules(
        mamba_layer=_shift_layer,
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_dense.input_layernorm,
                self_attention=_dense.self_attention,
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_dense.pre_mlp_layernorm, mlp=_dense.mlp, mlp_bda=get_bias_dropout_add
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_dense.pre_mlp_layernorm,
                mlp=get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[get_mtp_layer_spec_for_backend(None, backend=LocalSpecProvider())]
            ),
        ),
    ),
)
"""Megatron's layers with ``ShiftMixer``."""

if find_spec("mamba_ssm") is not None:
    transformer_engine = hybrid_stack_spec
else:
    transformer_engine = ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(**(vars(hybrid_stack_spec.submodules) | {"mamba_layer": _shift_layer})),
    )
"""TransformerEngine's layers, with ``ShiftMixer`` if ``mamba-ssm`` is missing."""
