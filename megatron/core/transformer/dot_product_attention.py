"""Attention without TransformerEngine, also of keys and values of other sizes, which multi-latent attention has."""

from typing import Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class DotProductAttention(_upstream.DotProductAttention):
    """megatron-core's ``DotProductAttention``, with two arguments more that ``MultiLatentAttention`` gives.

    Args:
        k_channels: Size of a head's queries and keys; ``config.kv_channels`` if None.
        v_channels: Size of a head's values; the same.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        if softmax_scale is None and k_channels is not None:
            softmax_scale = k_channels**-0.5
        super().__init__(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout,
            softmax_scale,
            cp_comm_type,
            pg_collection,
        )
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
