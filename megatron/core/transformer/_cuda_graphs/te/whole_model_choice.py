"""Whether the whole model is captured or its layers are."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import CaptureFailedError
from ..flags.own import WHOLE_MODEL, layers_per_graph, packed_sequences
from .agreement import CaptureAgreement
from .backends import Backend
from .decoder_graphs import decoder_blocker
from .layers import fsdp_of
from .training_calls import NONE_SEEN, READS, HiddenStatesReads, TrainingCalls
from .whole_model import other_method, whole_model_blocker


class ChoosesWholeModel:
    """The part of ``TECudaGraphHelper`` that chooses between graphs of the whole model and graphs of its layers."""

    model: Sequence[torch.nn.Module]
    config: Any
    chunks_with_decoder: Sequence[torch.nn.Module | None]
    callables_per_chunk: Sequence[Sequence[torch.nn.Module]]
    _engine: Backend
    _agreement: CaptureAgreement
    _one_graph_serves_all: Callable[[], bool]
    _log: Callable[[int, str], None]
    _whole_model_refused = ""  # why
    _tries_whole_model = False  # though nobody asked for it
    _whole_model_failed = False  # when it was tried
    _training_calls: TrainingCalls | None = None  # of a model that may be captured as a whole
    _hidden_states_reads: HiddenStatesReads | None = None  # where the number of layers in a graph is left to us

    def _captures_whole_model(self) -> bool:
        """Whether this rank would capture the whole model."""
        return layers_per_graph(self.config) in (None, WHOLE_MODEL) and not self._model_blocker()

    def _all_capture_whole_model(self) -> bool:
        """Whether all ranks capture the whole model. If one cannot though no number of layers was given, log why."""
        wanted = layers_per_graph(self.config)
        if wanted not in (None, WHOLE_MODEL):
            return False
        reason = self._agreement.objection(self._model_blocker())
        self._whole_model_refused = reason
        self._tries_whole_model = wanted is None and not reason
        if reason:
            level = logging.INFO if wanted is None else logging.WARNING
            self._log(level, f"instead of the whole model its layers are captured, because {reason}")
        return not reason

    def _captures_decoder(self) -> bool:
        """Whether this rank would capture all layers of the decoder in one graph, where it does not the whole model."""
        return self._may_capture_decoder() and not self._decoder_blocker()

    def _all_capture_decoder(self) -> bool:
        """Whether all ranks capture all layers of the decoder in one graph. If one cannot, log why."""
        if not self._may_capture_decoder():
            return False
        reason = self._agreement.objection(self._decoder_blocker())
        if reason:
            self._log(logging.INFO, f"each layer is captured in a graph of its own, because {reason}")
        return not reason

    def _may_capture_decoder(self) -> bool:
        """Whether nothing rules it out that is the same on all ranks."""
        if self.config.cuda_graph_modules or "gradient_sinks" not in self._engine.parameters:
            return False
        if layers_per_graph(self.config) == 1:
            return False
        return self._one_graph_serves_all() and len(self.model) == 1 and fsdp_of(self.model[0]) is not None

    def _decoder_blocker(self) -> str:
        """Say why this rank captures each layer by itself; empty if it captures all of the decoder in one graph."""
        config = self.config
        for reason, applies in (
            (READS, self._reads_hidden_states()),
            ("FP8 and FP4 keep statistics outside of graphs", config.fp8 or config.fp4),
            ("sequences are packed", packed_sequences(config) is not None),
            ("weight gradients are delayed (--delay-wgrad-compute)", config.delay_wgrad_compute),
            ("activations are offloaded", config.fine_grained_activation_offloading or config.cpu_offloading),
            ("backward keeps autograd's graph", config.cuda_graph_retain_backward_graph),
        ):
            if applies:
                return reason
        decoder = getattr(self.chunks_with_decoder[0], "decoder", None)
        if decoder is None:
            return "there is no decoder"
        fsdp: Any = fsdp_of(self.model[0])
        against: str = decoder_blocker(decoder, self.callables_per_chunk[0])
        return against or fsdp.recording_blocker(decoder.layers)

    def _captures_layers_instead(self, failed: CaptureFailedError) -> bool:
        """Whether layers are to be captured now that the whole model could not be."""
        if not self._tries_whole_model or failed.interrupted:
            return False
        self._tries_whole_model, self._whole_model_failed = False, True
        return True

    def _model_blocker(self) -> str:
        """Say why this rank does not capture the whole model; empty if it does."""
        calls = "" if layers_per_graph(self.config) else self._calls_blocker()  # ends the watch in any case
        reads = READS if self._reads_hidden_states() else ""
        return self._whole_model_blocker() or calls or reads

    def _reads_hidden_states(self) -> bool:
        """Whether training has read hidden states between layers, so that each layer needs a graph of its own."""
        return self._hidden_states_reads is not None and self._hidden_states_reads.any()

    def _calls_blocker(self) -> str:
        """Say why training would not replay graphs of the whole model, so that they are captured only if asked for."""
        if self._whole_model_failed:
            return "its capture failed"
        if self._training_calls is None:
            return NONE_SEEN
        against, method = self._training_calls.against(), other_method(self.chunks_with_decoder[0])
        return f"{method} is not GPTModel's own, and may compute something else in every step" if method else against

    def _whole_model_blocker(self) -> str:
        if "gradient_sinks" not in self._engine.parameters:
            return f"the {self._engine.name} engine captures layers only"
        if not self._one_graph_serves_all() or len(self.model) != 1:
            return "several micro-batches are in flight at a time"
        fsdp = fsdp_of(self.model[0])
        if fsdp is None:
            return "the model is not under Megatron-FSDP"
        model = self.chunks_with_decoder[0]
        if model is not None and {*fsdp.parameters()} != {*model.parameters()}:
            return f"there are parameters outside of {type(model).__name__}"
        against: str = whole_model_blocker(model, self.config) or fsdp.whole_model_blocker()
        return against
