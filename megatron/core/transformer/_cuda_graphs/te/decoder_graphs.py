"""A decoder whose layers run as one graph for each direction; what is around them runs eagerly."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from ..eager_passes import EagerPasses
from ..engine.captured import GraphedCallable
from ..engine.plan import unordered_plan
from ..engine.quantization import RecordedQuantization
from ..layer_graph import ATTENTION_INPUTS
from ..packed_sequences import from_static_offsets
from .forward_graphs import ForwardGraphs, captured, whole_passes
from .sample_inputs import captures_attention
from .training_calls import is_training


class _Replayed:
    """Stands for all layers of a decoder in the loop over them.

    Attributes:
        layer_number: Read by decoders; that of the first layer.
    """

    layer_number = 1

    def __init__(self, passes: GraphedCallable, inputs: Sequence[torch.Tensor]):
        self._passes, self._inputs = passes, inputs

    def __call__(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        return self._passes.replay([hidden_states, *self._inputs]), None


class DecoderGraphs(ForwardGraphs):
    """Stands for the ``forward`` of a decoder, and replays the graphs of its layers where they fit the call.

    They fit calls for training with tensors as at capture and nothing else, as long as the modules are what they were.
    The layers run eagerly in any other call: one that asks for hidden states between them, for example.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder, its layers by a replay if possible."""
        decoder = self.module
        inputs = self._inputs(args, kwargs) if is_training(decoder) else None
        if inputs is None:
            if torch.is_grad_enabled():
                self.before_eager_forward()
            return type(decoder).forward(decoder, *args, **kwargs)
        own, config = decoder.__dict__, decoder.config
        own["layers"] = (_Replayed(self.passes, inputs[1:]),)  # found before the module of this name
        if config.recompute_granularity == "full":  # which the graphs do
            own["config"] = copy(config)
            own["config"].recompute_granularity = None
        try:
            return type(decoder).forward(decoder, *args, **kwargs)
        finally:
            own["config"] = config
            del own["layers"]

    def _inputs(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        given = self.by_name(args, kwargs)
        if not given.get("extract_layer_indices"):
            given.pop("extract_layer_indices", None)
        return self.inputs_of(given, self.passes)

    def shape_of(self, given: Mapping[str, Any]) -> tuple[int, int]:
        tokens, sequences, _ = given["hidden_states"].shape
        return tokens, sequences


def _recomputed(
    decoder: Any, hidden_states: torch.Tensor, given: Mapping[str, torch.Tensor], quantizes: bool
) -> torch.Tensor:
    """Run all layers of ``decoder``, which are computed again in their backward pass, as it does.

    With ``quantizes`` each layer enters the context of FP8, if it is in FP8.
    """
    from megatron.core.recompute import checkpointed_forward  # imports cuda_graphs, which imports this module

    given = from_static_offsets(dict(given), decoder.layers[0]._tokens(hidden_states))
    unused = dict.fromkeys(("context", "context_mask", "attention_bias"))
    read = {name: given.get(name) for name in ("attention_mask", "rotary_pos_emb", "packed_seq_params")}
    return checkpointed_forward(
        decoder, hidden_states=hidden_states, use_inner_quantization_context=quantizes, **read, **unused
    )


def capture_decoder(
    decoder: Any,
    owner: Any,
    inputs: dict[str, torch.Tensor],
    read: Sequence[Sequence[str]],
    num_warmup_iters: int,
    eager_passes: EagerPasses,
    quantized: RecordedQuantization | None,
) -> DecoderGraphs:
    """Capture the passes of all layers of ``decoder``, whose calls replay them from then on; see ``captured``.

    Args:
        decoder: The block of a model that runs its layers one after the other.
        inputs: Static inputs by keyword, ``hidden_states`` first.
        read: For each layer which of the other inputs it reads.
        eager_passes: Counts calls for training with tensors of another shape.
        quantized: How the layers are quantized; None if they are not.
    """
    from megatron.core.fp8_utils import get_fp8_context  # imports cuda_graphs, which imports this module

    def run(hidden_states: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        # As the decoder does. Around replays it also enters the context of delayed scaling, and updates statistics.
        config = decoder.config
        at_once = quantized is not None and quantized.delayed
        forked = get_cuda_rng_tracker().fork() if config.sequence_parallel else nullcontext()
        with forked, quantized.autocast() if quantized is not None and at_once else nullcontext():
            if config.recompute_granularity == "full":
                return _recomputed(decoder, hidden_states, given, not at_once)
            for layer, names in zip(decoder.layers, read, strict=True):
                with nullcontext() if at_once else get_fp8_context(config, layer.layer_number - 1):
                    output = layer(hidden_states, **{name: given[name] for name in names})
                hidden_states = output[0] if isinstance(output, tuple) else output
        return hidden_states

    passes = whole_passes(type(decoder).__name__, run, inputs, decoder.layers, owner, quantized, copies_results=False)
    with captured({decoder: [passes]}, [owner], unordered_plan(1), num_warmup_iters, nullcontext()) as snapshots:
        return DecoderGraphs(
            decoder,
            [passes],
            eager_passes,
            snapshots[decoder],
            unused=() if any(map(captures_attention, decoder.layers)) else ATTENTION_INPUTS,
        )
