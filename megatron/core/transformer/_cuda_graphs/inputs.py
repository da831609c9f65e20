"""Inputs of graphs: those that a call leaves out, and packed sequences.

Of packed sequences attention reads the offsets from static inputs, and all else of them is fixed.
"""

from typing import Any, Literal

import torch

from .errors import ArgumentError
from .flags.options import PACKED_FLAG

# What the graphs of a layer do with packed sequences: read their offsets, or do without, having no attention.
PackedUse = Literal["read", "unused"]
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv")
ADVICE = (
    f"With {PACKED_FLAG} every micro-batch of a training step needs "
    "megatron.core.packed_seq_params.pad_packed_seq_params(params, sequences, seq_length)"
)


class DefaultInputs:
    """Restores static inputs to their values at capture, for calls that leave them out.

    Share one object among graphs whose static inputs of a name were equal at capture. Values are kept on the host.
    """

    def __init__(self) -> None:
        self._captured: dict[str, torch.Tensor] = {}
        self._overwritten: set[int] = set()  # the ids of static inputs

    def will_overwrite(self, name: str, static: torch.Tensor) -> None:
        """Keep the value at capture of ``static``, which the next replay overwrites."""
        if id(static) not in self._overwritten:
            self._overwritten.add(id(static))
            if name not in self._captured:
                self._captured[name] = static.detach().to("cpu", copy=True)

    def restore(self, name: str, static: torch.Tensor) -> None:
        """Restore ``static`` if a replay has overwritten it."""
        if id(static) in self._overwritten:
            self._overwritten.remove(id(static))
            static.detach().copy_(self._captured[name])


def static_offsets(sequences: int, seq_length: int) -> dict[str, torch.Tensor]:
    """Make static inputs for the offsets of ``sequences`` sequences, of which the first has all tokens.

    Args:
        sequences: Sequences in a micro-batch, those of no tokens included.
        seq_length: Tokens in a micro-batch.

    Returns:
        By keyword, int32 ``[sequences + 1]`` on the GPU.
    """
    offsets = torch.full((sequences + 1,), seq_length, dtype=torch.int32, device="cuda")
    offsets[0] = 0
    return {name: offsets.clone() for name in OFFSETS}


def from_static_offsets(kwargs: dict[str, Any], seq_length: int) -> dict[str, Any]:
    """Return ``kwargs`` at capture with ``packed_seq_params`` in the place of offsets, if there are any."""
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
    """Return ``kwargs`` of a layer at a replay without ``packed_seq_params``, and with its offsets if graphs read them.

    Args:
        kwargs: The keywords that the layer is called with.
        seq_length: Tokens in a micro-batch.

    Raises:
        ArgumentError: there are no packed sequences, or they are others than graphs were captured for.
    """
    kwargs = dict(kwargs)
    if reason := unpack(kwargs, seq_length, use):
        raise ArgumentError(f"{name} {reason}. {ADVICE}")
    return kwargs


def unpack(given: dict[str, Any], seq_length: int, use: PackedUse = "read") -> str:
    """Put offsets in the place of ``packed_seq_params`` in ``given``, or say of graphs why they do not fit them.

    Args:
        given: The arguments of a call by name.
        seq_length: Tokens in a micro-batch.
    """
    params = given.pop("packed_seq_params", None)
    if params is None:
        return "was captured for packed sequences, and is given none"
    expected = {
        "qkv_format": "thd",
        "max_seqlen_q": seq_length,
        "max_seqlen_kv": seq_length,
        "cu_seqlens_q_padded": None,
        "cu_seqlens_kv_padded": None,
        "pad_between_seqs": False,
    }
    for field, value in expected.items():
        has = getattr(params, field)
        if isinstance(has, torch.Tensor) or has != value:
            return f"was captured for packed sequences with {field} {value}, and is given {has}"
    if use == "read":
        given |= {name: getattr(params, name) for name in OFFSETS}
    return ""
