"""Compute all experts of an MoE layer at once with token counts on the GPU (--moe-use-grouped-tensor)."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import grouped_mm

from megatron.core.transformer._cuda_graphs.errors import UnsupportedError
from megatron.core.transformer._cuda_graphs.hooks import has_own_hooks
from megatron.core.transformer._cuda_graphs.snapshot import has_third_party_forward
from megatron.core.transformer.mlp import MLP


class _GroupedLinear(torch.autograd.Function):
    """Autograd function of ``grouped_linear``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, offsets: torch.Tensor, unused_rows: bool, *weights: torch.Tensor):
        ctx.unused_rows = unused_rows
        # Save the parameters themselves, because sharded ones are gathered again for the backward pass.
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
    """Multiply each expert's rows by its weight.

    Args:
        rows: ``[rows, input]``, sorted by expert; bfloat16 on a GPU.
        weights: ``[output, input]`` per expert, in the dtype of ``rows``. They are copied unless they are evenly spaced
            in one storage, as in a Megatron-FSDP bucket.
        offsets: End of each expert's rows, int32 ``[experts]``, on the device of ``rows``.
        unused_rows: Whether there may be rows after the last offset; they become zero in the result and in gradients.

    Returns:
        ``[rows, output]``, in the dtype of ``rows``.

    Raises:
        ValueError: The GPU has no kernel that reads the offsets on the device.
    """
    if rows.device.type == "cuda" and (
        rows.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (9, 0)
    ):
        raise ValueError(
            f"--moe-use-grouped-tensor requires --bf16 and compute capability 9.0 or newer, got {rows.dtype} on "
            f"{torch.cuda.get_device_name(rows.device)}: leave out --moe-use-grouped-tensor"
        )
    return _GroupedLinear.apply(rows.contiguous(), offsets, unused_rows, *weights)


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack ``weights`` of equal shape; return a view if possible, else a copy."""
    first = weights[0].detach()
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    distance = weights[1].storage_offset() - start if len(weights) > 1 else first.numel()
    for index, weight in enumerate(weights):
        in_place = weight.storage_offset() == start + index * distance and weight.is_contiguous()
        if distance < first.numel() or not in_place or weight.untyped_storage().data_ptr() != storage:
            return torch.stack([weight.detach() for weight in weights])
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride()), start)


def _behind(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a mask of the rows after the last offset, bool ``[rows]``."""
    return torch.arange(rows, device=offsets.device) >= offsets[-1]


def _zero_unused(rows: torch.Tensor, offsets: torch.Tensor, unused_rows: bool) -> torch.Tensor:
    """If ``unused_rows``, zero the rows after the last offset in place, and their gradients in backward.

    Return ``rows``.
    """
    return rows.masked_fill_(_behind(offsets, len(rows)).unsqueeze(1), 0) if unused_rows else rows


def _of_each_row(biases: Sequence[torch.Tensor], offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the bias of each row's expert, ``[rows, output]``; zero after the last offset.

    This multiplies by one-hot rows, because indexing sums gradients in a nondeterministic order on a GPU.
    """
    before = torch.arange(rows, device=offsets.device).unsqueeze(1) < offsets
    own = before ^ torch.nn.functional.pad(before[:, :-1], (1, 0))
    return own.to(biases[0].dtype) @ torch.stack([*biases])


class Linears(NamedTuple):
    """Weights and biases of one linear layer for every expert; biases may be empty."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]


def linears(modules: Sequence[torch.nn.Module], numbers: Iterable[int] | None = None) -> Linears:
    """Return the ``weight`` and ``bias`` parameters of ``modules``.

    Args:
        modules: The linear layers.
        numbers: Suffixes of the parameter names if one module has the parameters of several experts.
    """
    suffixes = [""] if numbers is None else [*map(str, numbers)]
    weights, biases = (
        [getattr(module, name + suffix, None) for module in modules for suffix in suffixes]
        for name in ("weight", "bias")
    )
    return Linears(weights, [bias for bias in biases if bias is not None and bias.numel()])


def run_pre_hooks(experts: torch.nn.Module, activation: Any) -> None:
    """Run the forward pre-hooks that gather parameters of ``experts``: only its submodule ``activation`` is called.

    Raises:
        UnsupportedError: A submodule has third-party hooks or a third-party ``forward``, which would not run.
    """
    called = {experts, *(activation.modules() if isinstance(activation, torch.nn.Module) else ())}
    for module in experts.modules():
        if module in called:
            continue
        own = has_third_party_forward(type(module)) or "forward" in vars(module)  # type: ignore[arg-type]
        if own or has_own_hooks(module):
            raise UnsupportedError(
                f"--moe-use-grouped-tensor does not run the third-party hook or forward of {type(module).__name__} in "
                "experts: remove it, or leave out --moe-use-grouped-tensor"
            )
        for hook in [*module._forward_pre_hooks.values()]:
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
    """Run all experts of a layer without synchronizing.

    Args:
        config: The experts' ``TransformerConfig``.
        activation_func: The activation function, as in ``MLP``.
        fc1: The first linear layers.
        fc2: The second linear layers.
        rows: The tokens ``[rows, hidden]``, sorted by expert.
        tokens_per_expert: Integers ``[experts]``, on the GPU.
        probs: The router probability of each row, ``[rows]``.

    Returns:
        The output ``[rows, hidden]``, including biases, and None.
    """
    offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
    unused_rows = config.expert_model_parallel_size > 1
    if unused_rows:  # unused rows and their gradients are uninitialized and may be NaN
        probs = probs.masked_fill(_behind(offsets, len(probs)), 0)
    if config.moe_apply_probs_on_input:
        rows, probs = (probs.unsqueeze(1) * rows).to(rows.dtype), torch.ones_like(probs)
    experts = SimpleNamespace(  # the attributes that MLP.forward reads
        config=config,
        activation_func=activation_func,
        linear_fc1=_OfAllExperts(fc1, offsets, unused_rows),
        linear_fc2=_OfAllExperts(fc2, offsets, unused_rows, probs),
    )
    output, _ = MLP.forward(experts, rows, probs)
    return output, None


class _OfAllExperts(torch.nn.Module):
    """One linear layer for all experts; ``bias_scale`` multiplies each row's bias."""

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
