"""A model chunk whose whole forward pass is one graph, from tokens to losses, and whose backward pass is another."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from megatron.core.transformer.enums import AttnMaskType

from ..attribute_reads import AttributeReads
from ..eager_passes import EagerPasses
from ..engine.whole_passes import WholePasses
from ..flags.own import packed_sequences
from ..hooks import has_other_hooks
from ..replay_conditions import ReplayConditions
from .forward_graphs import ForwardGraphs
from .layers import _layer_is_graphable, decoder_layers
from .sample_inputs import attention_mask_type
from .training_calls import INPUTS, UNUSED, is_training


def whole_model_blocker(model: Any | None, config: Any) -> str:
    """Say why the passes of ``model`` cannot be one graph each; empty if they can.

    Args:
        model: The language model inside the wrappers of a model chunk.
        config: Its ``TransformerConfig``.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel  # imports cuda_graphs, which imports this module

    if not isinstance(model, GPTModel) or type(model).forward is not GPTModel.forward or "forward" in vars(model):
        return f"{type(model).__name__} is no GPTModel with its own forward"
    if not (model.pre_process and model.post_process):
        return "the model is divided into pipeline stages"
    layers = decoder_layers(model)
    if not layers or not all(_layer_is_graphable(layer, config) for layer in layers):
        return "not all of its layers can be captured"
    if len(set(map(attention_mask_type, layers))) > 1:
        return "its layers have different attention masks"
    for reason, applies in (
        ("only modules of layers are captured (--cuda-graph-modules)", config.cuda_graph_modules),
        ("there is multi-token prediction", config.mtp_num_layers),
        ("FP8 and FP4 keep statistics outside of graphs", config.fp8 or config.fp4),
        ("sequences are packed", packed_sequences(config) is not None),
        ("weight gradients are delayed (--delay-wgrad-compute)", config.delay_wgrad_compute),
        ("activations are offloaded", config.fine_grained_activation_offloading),
        ("the sequence is divided among context-parallel ranks", config.context_parallel_size > 1),
        ("the position embedding is multimodal", model.position_embedding_type == "mrope"),
        (
            "TransformerEngine's cross entropy reads values on the host (--cross-entropy-fusion-impl native does not)",
            config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te",
        ),
        ("backward keeps autograd's graph", config.cuda_graph_retain_backward_graph),
    ):
        if applies:
            return reason
    # Those inside a layer are recorded with it, as in a graph of its own.
    inside = {child for layer in layers for child in layer.modules() if child is not layer}
    for name, module in model.named_modules():
        if module is not model and module not in inside and has_other_hooks(module):
            return f"{name} has hooks, which do not run in replays"
    return ""


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
    model: Any, owner: Any, seq_length: int, micro_batch_size: int, num_warmup_iters: int, eager_passes: EagerPasses
) -> ModelGraphs:
    """Capture the passes of ``model``, whose calls replay them from then on.

    Args:
        model: The language model.
        owner: Megatron-FSDP's ``WholeModel`` of it.
        seq_length: Tokens in a sequence.
        micro_batch_size: Sequences in a micro-batch.
        num_warmup_iters: How often both passes run before.
        eager_passes: Counts calls for training with tensors of another shape.
    """
    # Imports TransformerEngine's wrappers, which import cuda_graphs, which imports this module.
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    inputs = sample_inputs(model, seq_length, micro_batch_size)
    passes = WholePasses(type(model).__name__, inputs, owner)
    kept: list[Any] = []  # rotary embeddings are cached where they are computed, and may leave the cache
    reads = AttributeReads()
    try:
        with owner.capture():
            with reads.noted([model]), ExitStack() as stack:
                for module in model.modules():
                    if isinstance(module, RotaryEmbedding):
                        stack.callback(module.register_forward_hook(lambda *call: kept.append(call[-1])).remove)
                passes.capture(model.forward, model, num_warmup_iters)
            conditions = ReplayConditions([model], reads, [model], forward_replaced=True, buffers=True)
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
