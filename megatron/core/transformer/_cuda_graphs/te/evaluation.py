"""The graph of a whole model's forward pass in evaluation, captured when the first evaluation begins."""

import logging
from functools import partial
from typing import Any

from megatron.core.utils import log_single_rank

from ..agreement import CaptureAgreement, warn_of_failure
from ..errors import CaptureFailedError
from ..hooks import has_other_hooks
from .capture_arguments import WARMUP_ITERATIONS, recorded_quantization
from .stage import Chunk, Stage
from .training_calls import call_blocker, shape_of
from .whole_model import ModelGraphs, capture_evaluation

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


def capture_for_evaluation(stage: Stage, chunk: Chunk, training: ModelGraphs, args: tuple, kwargs: Any) -> None:
    """Capture the forward pass of ``chunk``, which is in evaluation mode; if that is impossible, log why.

    All ranks of the pipeline stage must call it together. The graph has static inputs and a memory pool of its own, and
    its output is copied, so evaluation changes nothing that graphs or backward passes of training read.

    Args:
        training: The graphs of the chunk's training passes. After their deletion nothing is captured.
        args, kwargs: Arguments of the model in the evaluation that begins. The graph is for their shapes.

    Raises:
        CaptureInterruptedError: another rank was interrupted.
    """
    if vars(training.module).get("forward") is not training:
        return
    try:
        refused = _capture(stage, chunk, training, args, kwargs)
    except CaptureFailedError as failed:
        warn_of_failure(failed, "Evaluation runs eagerly")
        return
    message = f"Evaluation runs eagerly, because {refused}" if refused else "Captured the whole model for evaluation"
    log_single_rank(logger, logging.WARNING if refused else logging.INFO, message)


def _capture(stage: Stage, chunk: Chunk, training: ModelGraphs, args: tuple, kwargs: Any) -> str:
    """Capture on all ranks, or return why on none; raise the same error on every rank."""
    model, given = training.module, training.by_name(args, kwargs)
    agreement = CaptureAgreement(stage.groups, with_other_stages=False)  # later stages wait for this one's output

    def undo() -> None:
        if training.evaluation is not None:
            training.evaluation.reset()
            training.evaluation = None

    with agreement.together(undo):
        hooked = any(has_other_hooks(module) for layer in chunk.layers for module in layer.modules())
        reason = "layers, or modules in them, have hooks of others" if hooked else call_blocker(model, given)
        if refused := agreement.objections({"evaluation": reason})["evaluation"]:
            return refused
        sequences, tokens = shape_of(model, given) or (0, 0)
        shape = tokens * stage.config.context_parallel_size, sequences
        owner = chunk.fsdp.graphs.evaluated_model(partial(agreement.begin, "evaluation of the whole model"))
        quantized = recorded_quantization(stage, model)
        training.evaluation = capture_evaluation(model, owner, *shape, WARMUP_ITERATIONS, quantized)
    return ""
