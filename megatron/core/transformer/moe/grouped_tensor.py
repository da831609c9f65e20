"""All experts of an MoE layer at once, with the number of tokens of each on the device (--moe-use-grouped-tensor)."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import grouped_mm

from megatron.core.transformer.mlp import MLP


class _GroupedLinear(torch.autograd.Function):
    """A linear layer for each group of rows, all in one call. See ``grouped_linear``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, offsets: torch.Tensor, unused_rows: bool, *weights: torch.Tensor):
        ctx.unused_rows = unused_rows
        # Parameters are saved as such: sharded ones may be elsewhere, gathered again, in the backward pass.
        ctx.save_for_backward(rows, offsets, *weights)
        return _zero_unused(grouped_mm(rows, as_one(weights).transpose(1, 2), offs=offsets), offsets, unused_rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        rows, offsets, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows, grad_weights = None, (None,) * len(weights)
        if ctx.needs_input_grad[0]:
            grad_rows = _zero_unused(grouped_mm(grad, as_one(weights), offs=offsets), offsets, ctx.unused_rows)
        if any(ctx.needs_input_grad[3:]):
            grad_weights = grouped_mm(grad.t(), rows, offs=offsets).unbind()
        return grad_rows, None, None, *grad_weights


def grouped_linear(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], offsets: torch.Tensor, unused_rows: bool = False
) -> torch.Tensor:
    """Multiply the rows of each expert by its weight.

    Args:
        rows: ``[rows, input]``, expert after expert; on a GPU bfloat16.
        weights: ``[output, input]`` of each expert, of that dtype. Where they are at equal distances in one storage, as
            in a bucket of Megatron-FSDP, they are read there, otherwise from a copy.
        offsets: int32 ``[experts]``, on the device of ``rows``: where the rows of each expert end.
        unused_rows: Whether there may be rows behind the last offset. They are zero in the result and in gradients.

    Returns:
        ``[rows, output]``, of the same dtype.

    Raises:
        ValueError: a GPU has no kernel for it that leaves the host out.
    """
    if rows.device.type == "cuda" and (
        rows.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (9, 0)
    ):
        raise ValueError(
            f"--moe-use-grouped-tensor needs --bf16 and a GPU of compute capability 9.0 or newer, got {rows.dtype} on "
            f"{torch.cuda.get_device_name(rows.device)}: leave it out"
        )
    return _GroupedLinear.apply(rows.contiguous(), offsets, unused_rows, *weights)


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``weights``, all of one shape, as one tensor with a leading dimension: a view if possible, else a copy."""
    first = weights[0].detach()
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    distance = weights[1].storage_offset() - start if len(weights) > 1 else first.numel()
    for index, weight in enumerate(weights):
        in_place = weight.storage_offset() == start + index * distance and weight.is_contiguous()
        if distance < first.numel() or not in_place or weight.untyped_storage().data_ptr() != storage:
            return torch.stack([weight.detach() for weight in weights])
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride()), start)


def _behind(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return which rows no expert has, bool ``[rows]``."""
    return torch.arange(rows, device=offsets.device) >= offsets[-1]


def _zero_unused(rows: torch.Tensor, offsets: torch.Tensor, unused_rows: bool) -> torch.Tensor:
    """Zero the rows that no expert has, in place; their gradients are zero too, whatever comes back."""
    return rows.masked_fill_(_behind(offsets, len(rows)).unsqueeze(1), 0) if unused_rows else rows


def _of_each_row(biases: Sequence[torch.Tensor], offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the bias ``[output]`` of each row's expert, ``[rows, output]``, zero behind the last offset.

    A product with one-hot rows, whose gradient is a sum in a fixed order, as that of an index is not on every device.
    """
    before = torch.arange(rows, device=offsets.device).unsqueeze(1) < offsets
    own = before ^ torch.nn.functional.pad(before[:, :-1], (1, 0))
    return own.to(biases[0].dtype) @ torch.stack([*biases])


class Linears(NamedTuple):
    """A linear layer of each expert: its parameters, biases if there are any."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]


def linears(modules: Sequence[torch.nn.Module], numbers: Iterable[int] | None = None) -> Linears:
    """Return the parameters ``weight`` and ``bias`` of ``modules``.

    Args:
        numbers: What comes after these names where a module has the parameters of several experts.
    """
    suffixes = [""] if numbers is None else [*map(str, numbers)]
    weights, biases = (
        [getattr(module, name + suffix, None) for module in modules for suffix in suffixes]
        for name in ("weight", "bias")
    )
    return Linears(weights, [bias for bias in biases if bias is not None and bias.numel()])


def run_pre_hooks(experts: torch.nn.Module) -> None:
    """Run the forward pre-hooks inside ``experts``, whose modules are not called: some gather their parameters."""
    for module in experts.modules():
        for hook in [] if module is experts else [*module._forward_pre_hooks.values()]:
            hook(module, ())


def compute_experts(
    config: Any,
    activation_func: Callable[..., torch.Tensor],
    fc1: Linears,
    fc2: Linears,
    rows: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    probs: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """Run all experts of a layer; the host waits for nothing.

    Args:
        config: Their ``TransformerConfig``.
        activation_func: Theirs, as of ``MLP``.
        rows: The tokens ``[rows, hidden]``, expert after expert.
        tokens_per_expert: Integers ``[experts]``, on the device.
        probs: By what the router scales each row, ``[rows]``.

    Returns:
        The output ``[rows, hidden]``, biases included, and None.
    """
    offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
    unused_rows = config.expert_model_parallel_size > 1
    if unused_rows:  # nobody has written those of unused rows, nor their gradients: they may be NaN
        probs = probs.masked_fill(_behind(offsets, len(probs)), 0)
    if config.moe_apply_probs_on_input:
        rows, probs = (probs.unsqueeze(1) * rows).to(rows.dtype), torch.ones_like(probs)
    experts = SimpleNamespace(  # what MLP.forward reads of an MLP
        config=config,
        activation_func=activation_func,
        linear_fc1=_OfAllExperts(fc1, offsets, unused_rows),
        linear_fc2=_OfAllExperts(fc2, offsets, unused_rows, probs),
    )
    output, _ = MLP.forward(experts, rows, probs)
    return output, None


class _OfAllExperts(torch.nn.Module):
    """A linear layer of all experts, in one call; ``bias_scale`` multiplies the bias of each row."""

    def __init__(
        self, layers: Linears, offsets: torch.Tensor, unused_rows: bool, bias_scale: torch.Tensor | None = None
    ):
        super().__init__()
        self._arguments = layers, offsets, unused_rows, bias_scale

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        layers, offsets, unused_rows, bias_scale = self._arguments
        output = grouped_linear(rows, layers.weights, offsets, unused_rows)
        if layers.biases:
            bias = _of_each_row(layers.biases, offsets, len(rows))
            if bias_scale is not None:
                bias = bias * bias_scale.unsqueeze(1)
            output = (output + _zero_unused(bias, offsets, unused_rows)).to(output.dtype)
        return output, None
