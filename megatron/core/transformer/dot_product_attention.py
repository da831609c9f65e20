"""Unfused attention whose key and value head sizes may differ, as in multi-latent attention."""

from typing import Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class DotProductAttention(_upstream.DotProductAttention):
    """Extends megatron-core's ``DotProductAttention`` with two arguments that ``MultiLatentAttention`` passes.

    Args:
        k_channels: The head size of queries and keys; ``config.kv_channels`` if None.
        v_channels: The head size of values; ``config.kv_channels`` if None.
    """

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        if k_channels is not None and kwargs.get("softmax_scale") is None:
            kwargs["softmax_scale"] = k_channels**-0.5
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
