"""Pad packed sequence offsets to a fixed shape, as CUDA graphs require."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def pad_packed_seq_params(params: Any, sequences: int, seq_length: int) -> Any:
    """Pad ``params`` with empty sequences to a total of ``sequences``.

    The attention output does not change. Rotary embeddings must be fused: with ``max_seqlen_q == seq_length``,
    megatron-core's unfused ones let positions continue from one sequence to the next.

    Args:
        params: The ``PackedSeqParams`` (``thd``) of one micro-batch. ``cu_seqlens_q`` and ``cu_seqlens_kv`` are int32
            ``[sequences of the micro-batch + 1]`` and end with ``seq_length``, even under context parallelism.
        sequences: The maximum number of sequences per micro-batch (``--cuda-graph-packed-sequences``).
        seq_length: The number of tokens per micro-batch, which bounds the length of a sequence.

    Returns:
        New parameters: ``cu_seqlens_q`` and ``cu_seqlens_kv`` are ``[sequences + 1]``, and ``max_seqlen_q`` and
        ``max_seqlen_kv`` are ``seq_length``.

    Raises:
        ValueError: ``params`` has more than ``sequences`` sequences, or padding between them
            (``cu_seqlens_q_padded``).
    """
    if params.cu_seqlens_q_padded is not None or params.cu_seqlens_kv_padded is not None:
        raise ValueError(
            "CUDA graphs do not support packed sequences with padding between them (cu_seqlens_q_padded, "
            "cu_seqlens_kv_padded): include the padding in the sequences, and set these to None"
        )
    padded = {
        "cu_seqlens_q": _padded(params.cu_seqlens_q, sequences),
        "cu_seqlens_kv": _padded(params.cu_seqlens_kv, sequences),
    }
    return replace(params, **padded, max_seqlen_q=seq_length, max_seqlen_kv=seq_length, pad_between_seqs=False)


def _padded(offsets: torch.Tensor, sequences: int) -> torch.Tensor:
    missing = sequences + 1 - len(offsets)
    if missing < 0:
        raise ValueError(
            f"a micro-batch has {len(offsets) - 1} packed sequences, more than --cuda-graph-packed-sequences "
            f"{sequences}: raise the flag's value"
        )
    return torch.cat((offsets, offsets[-1:].expand(missing)))
