"""Build variants of a GPT under Megatron-FSDP, with our hooks or megatron-core's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from tests.support.trainings import models, training
from tests.support.trainings.case import Case

SMALL = {"layers": 2, "hidden": 32, "sequence": 16, "steps": 3}


@dataclass(frozen=True)
class Variant:
    """A case with additional arguments for its model, wrapper and configurations.

    Attributes:
        case: The model and training configuration.
        config: Arguments of ``TransformerConfig``.
        sharding: Arguments of ``DistributedDataParallelConfig``.
        fsdp: Arguments of ``MegatronFSDP``.
        model: Arguments of ``GPTModel``.
        change: Called with the model before it is wrapped.
    """

    case: Case = field(default_factory=lambda: small())
    config: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    change: Callable[[torch.nn.Module], None] = lambda model: None

    @contextmanager
    def in_place(self, *, upstream: bool) -> Iterator[None]:
        """Patch model construction to build this variant while in this context.

        ``upstream`` selects megatron-core's ``MegatronFSDP`` instead of ours.
        """
        from megatron.core import distributed, transformer
        from megatron.core.distributed.fsdp import mcore_fsdp_adapter
        from megatron.core.models import gpt

        kind = _with_our_buffers(upstream_class()) if upstream else mcore_fsdp_adapter.MegatronFSDP
        build = gpt.GPTModel

        def gpt_model(*args, **kwargs):
            model = build(*args, **kwargs | self.model)
            self.change(model)
            return model

        replaced = [
            (gpt, "GPTModel", gpt_model),
            (transformer, "TransformerConfig", _given(transformer.TransformerConfig, self.config)),
            (distributed, "DistributedDataParallelConfig", _given(_sharding_config(), self.sharding)),
            (mcore_fsdp_adapter, "MegatronFSDP", _given(kind, self.fsdp)),
        ]
        with ExitStack() as stack:
            for owner, name, replacement in replaced:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield

    def build(self, *, graphs: bool = False) -> torch.nn.Module:
        """Build the wrapped model, without an optimizer."""
        with self.in_place(upstream=False):
            config = models.transformer_config(self.case, graphs)
            return models.wrapped(self.case, config, models.gpt(self.case, config))


def small(**changes: Any) -> Case:
    """Return a small, fast case, with a double buffer only if parameters are sharded."""
    sharded = changes.get("data_parallel_sharding_strategy", "optim_grads_params") == "optim_grads_params"
    return Case.of({**SMALL, "fsdp_double_buffer": sharded, **changes})


def _with_our_buffers(kind: Any) -> type:
    """Return a subclass of megatron-core's ``MegatronFSDP`` that scales unsharded gradients, as our buffer requires."""

    def attach(self: Any) -> None:
        self.param_and_grad_buffer.unsharded_gradients.scale()
        kind.attach_grad_to_optimizer_state(self)

    return type(kind.__name__, (kind,), {"attach_grad_to_optimizer_state": attach})


def upstream_class() -> type:
    """Return megatron-core's own ``MegatronFSDP``."""
    from megatron_fsdp_cuda_graphs.overlay import upstream

    return upstream("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp").MegatronFSDP


def run_backward(model: torch.nn.Module, case: Case) -> None:
    """Run the forward and backward pass of one micro-batch."""
    batch = next(training._batches(case, 0))
    model(batch.tokens, batch.positions, batch.mask, labels=batch.labels).float().mean().backward()


def freeze_embedding(model: torch.nn.Module) -> None:
    """Freeze the word embedding and one bias of each layer."""
    model.embedding.requires_grad_(False)
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.bias.requires_grad = False


def tie_output_layer(model: torch.nn.Module) -> None:
    """Tie the output layer to the embedding."""
    model.output_layer.weight = model.embedding.word_embeddings.weight


def delay_weight_gradients(model: torch.nn.Module) -> None:
    """Mark the weight gradient of the first linear layer of each MLP as delayed."""
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.need_backward_dw = lambda: True
        layer.mlp.linear_fc1.weight.skip_backward_post_hook = True


def hook_by_user(module: torch.nn.Module, *unused: Any) -> None:
    """Do nothing, like a user's hook registered before the model is wrapped."""


def hook_layers(model: torch.nn.Module) -> None:
    """Register user hooks on every layer."""
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(hook_by_user)
        layer.register_forward_hook(hook_by_user)


def _given(build: Callable, arguments: dict[str, Any]) -> Callable:
    return (lambda *args, **kwargs: build(*args, **kwargs | arguments)) if arguments else build


def _sharding_config() -> type:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig


FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FINE_FORWARD = {"enable_fine_grained_param_gather_hook": True}
FINE_BOTH = FINE_FORWARD | {"enable_fine_grained_param_gather_backward_hook": True}
LAYERS_ARE_UNITS = {"fsdp_unit_modules": ["megatron.core.transformer.TransformerLayer"]}
SHARED: dict[str, Any] = {"model": {"share_embeddings_and_output_weights": False}, "change": tie_output_layer}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
