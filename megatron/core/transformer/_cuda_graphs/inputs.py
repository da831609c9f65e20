"""Optional static inputs of graphs, and offsets of packed sequences.

Attention reads the offsets of packed sequences from static inputs; the other fields of ``PackedSeqParams`` are fixed.
"""

from typing import Any, Literal

import torch

from .errors import ArgumentError
from .flags.options import PACKED_FLAG

# Graphs with attention read the offsets of packed sequences; graphs without attention ignore them.
PackedUse = Literal["read", "unused"]
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv")
ADVICE = (
    f"With {PACKED_FLAG}, pad the PackedSeqParams of every training micro-batch with "
    "megatron.core.packed_seq_params.pad_packed_seq_params(params, sequences, seq_length)"
)


class DefaultInputs:
    """Restores static inputs to their captured values for calls that omit them.

    Graphs with equal captured values share one ``DefaultInputs``, which stores the values on the host.
    """

    def __init__(self) -> None:
        self._captured: dict[str, torch.Tensor] = {}
        self._overwritten: set[int] = set()  # the ids of static inputs

    def will_overwrite(self, name: str, static: torch.Tensor) -> None:
        """Save the captured value of ``static`` before the first replay that overwrites it."""
        if id(static) not in self._overwritten:
            self._overwritten.add(id(static))
            if name not in self._captured:
                self._captured[name] = static.detach().to("cpu", copy=True)

    def restore(self, name: str, static: torch.Tensor) -> None:
        """Restore ``static`` if a replay overwrote it."""
        if id(static) in self._overwritten:
            self._overwritten.remove(id(static))
            static.detach().copy_(self._captured[name])


def static_offsets(sequences: int, seq_length: int) -> dict[str, torch.Tensor]:
    """Create static offsets, int32 ``[sequences + 1]`` on the GPU, keyed by name; the first sequence has all tokens."""
    offsets = torch.full((sequences + 1,), seq_length, dtype=torch.int32, device="cuda")
    offsets[0] = 0
    return {name: offsets.clone() for name in OFFSETS}


def from_static_offsets(kwargs: dict[str, Any], seq_length: int) -> dict[str, Any]:
    """Return capture-time ``kwargs`` with any offsets replaced by ``packed_seq_params``."""
    if OFFSETS[0] not in kwargs:
        return kwargs
    from megatron.core.packed_seq_params import PackedSeqParams

    kwargs = dict(kwargs)
    offsets = {name: kwargs.pop(name) for name in OFFSETS}
    kwargs["packed_seq_params"] = PackedSeqParams(
        qkv_format="thd", **offsets, max_seqlen_q=seq_length, max_seqlen_kv=seq_length, pad_between_seqs=False
    )
    return kwargs


def to_inputs(name: str, kwargs: dict[str, Any], use: PackedUse, seq_length: int) -> dict[str, Any]:
    """Return ``kwargs`` of a replay with ``packed_seq_params`` removed, and its offsets added if the graphs read them.

    Raises:
        ArgumentError: ``packed_seq_params`` is missing, or differs from the captured format.
    """
    kwargs = dict(kwargs)
    if reason := unpack(kwargs, seq_length, use):
        raise ArgumentError(f"{name} {reason}. {ADVICE}")
    return kwargs


def unpack(given: dict[str, Any], seq_length: int, use: PackedUse = "read") -> str:
    """Replace ``packed_seq_params`` in ``given``, the arguments of a call keyed by name, with its offsets.

    Returns:
        The mismatch with the captured format; empty if there is none.
    """
    params = given.pop("packed_seq_params", None)
    if params is None:
        return "was captured for packed sequences, got none"
    expected = {
        "qkv_format": "thd",
        "max_seqlen_q": seq_length,
        "max_seqlen_kv": seq_length,
        "cu_seqlens_q_padded": None,
        "cu_seqlens_kv_padded": None,
        "pad_between_seqs": False,
        "local_cp_size": None,
        "cp_group": None,
    }
    if params.tokens_per_sample is not None:
        expected["tokens_per_sample"] = seq_length
    for field, value in expected.items():
        has = getattr(params, field)
        if isinstance(has, torch.Tensor) or has != value:
            return f"was captured for packed sequences with {field} {value}, got {has}"
    if use == "read":
        given |= {name: getattr(params, name) for name in OFFSETS}
    return ""
