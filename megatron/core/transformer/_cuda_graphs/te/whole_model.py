"""A model chunk whose whole forward pass is one graph, from tokens to losses, and whose backward pass is another."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from megatron.core.transformer.enums import AttnMaskType

from ..attribute_reads import AttributeReads
from ..eager_passes import EagerPasses
from ..engine.quantization import RecordedQuantization
from ..engine.whole_passes import WholePasses
from ..replay_conditions import ReplayConditions
from .forward_graphs import ForwardGraphs
from .layers import decoder_layers
from .sample_inputs import attention_mask_type
from .training_calls import INPUTS, UNUSED, is_training


def other_method(model: Any) -> str:
    """Return the name of a method of ``GPTModel`` that ``model`` has another one of; empty if there is none.

    Those that save checkpoints do not count. Another one may read what changes from step to step.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_model import GPTModel  # imports cuda_graphs, which imports this module

    for kind in (GPTModel, LanguageModule):
        for name, method in vars(kind).items():
            counts = callable(method) and not name.startswith("__") and "state_dict" not in name
            if counts and (name in vars(model) or getattr(type(model), name) is not getattr(GPTModel, name)):
                return name
    return ""


def sample_inputs(model: Any, seq_length: int, micro_batch_size: int) -> dict[str, torch.Tensor]:
    """Make static inputs of ``model``, by the keywords of its ``forward``.

    Token ids, position ids and labels are ``[micro-batch, sequence]`` (int64). The attention mask is the one that
    layers apply where none is given.

    Args:
        model: The language model.
        seq_length: Tokens in a sequence.
        micro_batch_size: Sequences in a micro-batch.
    """
    layer = decoder_layers(model)[0]
    inputs = {name: torch.zeros(micro_batch_size, seq_length, dtype=torch.int64, device="cuda") for name in INPUTS}
    mask = layer.get_layer_static_inputs(seq_length, micro_batch_size).get("attention_mask")
    if mask is None:
        del inputs["attention_mask"]
    else:
        inputs["attention_mask"] = mask if attention_mask_type(layer) is AttnMaskType.causal else mask.zero_()
    return inputs


class ModelGraphs(ForwardGraphs):
    """Stands for the ``forward`` of a language model, and replays its graphs where they fit the call.

    They fit calls for training that give labels, tensors as at capture, and nothing else that losses depend on, as long
    as the modules are what they were. The model runs eagerly in any other call, an evaluation for example.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, by a replay if possible."""
        if is_training(self.module):
            given = self.by_name(args, kwargs)
            inputs = self.inputs_of(given) if given.get("labels") is not None else None
            if inputs is not None:
                return self.passes(inputs)
        if torch.is_grad_enabled():
            self.passes.before_eager_forward()
        return type(self.module).forward(self.module, *args, **kwargs)

    def shape_of(self, given: Mapping[str, Any]) -> tuple[int, int]:
        sequences, tokens = given["labels"].shape
        return tokens, sequences


def capture_whole_model(
    model: Any,
    owner: Any,
    seq_length: int,
    micro_batch_size: int,
    num_warmup_iters: int,
    eager_passes: EagerPasses,
    quantized: RecordedQuantization | None = None,
) -> ModelGraphs:
    """Capture the passes of ``model``, whose calls replay them from then on.

    Args:
        model: The language model.
        owner: Megatron-FSDP's ``WholeModel`` of it.
        seq_length: Tokens in a sequence.
        micro_batch_size: Sequences in a micro-batch.
        num_warmup_iters: How often both passes run before.
        eager_passes: Counts calls for training with tensors of another shape.
        quantized: How the model is quantized; None if it is not.
    """
    # Imports TransformerEngine's wrappers, which import cuda_graphs, which imports this module.
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    inputs = sample_inputs(model, seq_length, micro_batch_size)
    passes = WholePasses(type(model).__name__, inputs, owner, quantized=quantized)
    kept: list[Any] = []  # rotary embeddings are cached where they are computed, and may leave the cache
    reads = AttributeReads()
    try:
        with owner.capture():
            with reads.noted([model]), ExitStack() as stack:
                for module in model.modules():
                    if isinstance(module, RotaryEmbedding):
                        stack.callback(module.register_forward_hook(lambda *call: kept.append(call[-1])).remove)
                passes.capture(model.forward, model, num_warmup_iters)
            held = None if quantized is None else quantized.tensors
            conditions = ReplayConditions([model], reads, [model], forward_replaced=True, buffers=True, quantized=held)
    except BaseException:
        passes.reset()
        raise
    return ModelGraphs(
        model,
        passes,
        inputs,
        eager_passes,
        conditions,
        may_be_absent=("attention_mask",),
        unused=UNUSED,
        kept=kept,
    )
