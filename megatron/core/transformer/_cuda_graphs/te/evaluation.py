"""Forward graphs of layers for evaluation, captured when the first evaluation after training's capture begins."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch

from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.utils import log_single_rank

from .. import state
from ..attribute_reads import AttributeReads
from ..dispatcher_state import DispatcherState
from ..eager_passes import EagerPasses
from ..engine.addresses import AddressGuard, places_of
from ..engine.make_graphed_callables import make_graphed_callables
from ..errors import CaptureFailedError
from ..expected_inputs import DefaultInputs
from ..flags.own import goes_on_eagerly, packed_sequences
from ..hooks import extracted_hooks, has_other_hooks
from ..layer_graph import EvaluationGraph
from ..replacements import Replacements, between, replaced_attribute
from ..replay_conditions import ReplayConditions
from .agreement import CaptureAgreement, warn_of_failure
from .capture_arguments import WARMUP_ITERATIONS, quantization_arguments, recorded_quantization
from .joined_collectives import joined_collectives
from .layers import layer_name
from .order import PassOrder
from .sample_inputs import LayerInputs, attention_mask_type, captures_attention, default_kwargs, sample_arguments
from .stage import Chunk, Stage
from .training_calls import arguments_by_name, call_blocker, is_first, shape_of_hidden_states
from .whole_model import ModelGraphs, capture_evaluation

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


def _repeats_router(config: Any) -> bool:
    """Whether a graph ends at a router that evaluation runs once more, or for each piece of its tokens."""
    repeats = config.recompute_granularity or config.mlp_chunks_for_training > 1
    return CudaGraphModule.moe_router in config.cuda_graph_modules and bool(repeats)


_Blockers = tuple[tuple[Callable[[Any], object], str], ...]
# What in a model's ``TransformerConfig`` rules graphs of evaluation out, and the reason; the first one counts.
_BLOCKERS: _Blockers = (
    (lambda config: config.fp4, "graphs of FP4 were not tried in evaluation"),
    (lambda config: config.delay_wgrad_compute, "weight gradients are delayed (--delay-wgrad-compute)"),
    (lambda config: config.fine_grained_activation_offloading, "activations are offloaded"),
    (_repeats_router, "MoE layers are captured in part, and run in part again or in pieces"),
)
# What rules out graphs of layers only.
_OF_LAYERS: _Blockers = (
    (
        lambda config: packed_sequences(config) is not None,
        "sequences are packed, and graphs of layers were not tried with them in evaluation",
    ),
    (
        lambda config: config.fp8_param,
        "parameters are in FP8, whose places in memory graphs of layers do not know (--fp8-param-gather)",
    ),
)


def evaluation_blocker(config: Any, whole: bool) -> str:
    """Return why evaluation cannot have graphs of layers, or of the whole model, with this ``TransformerConfig``."""
    blockers = _BLOCKERS if whole else _OF_LAYERS + _BLOCKERS
    return next((reason for applies, reason in blockers if applies(config)), "")


def shape_of_call(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Return tokens in a sequence and sequences in a micro-batch of a call of ``model``; None where it does not show.

    Models of others may add to the tokens that they are called with: the features of images, for example.
    """
    forward = type(model).forward  # not the replays of all of it, which may stand for it
    if not forward.__module__.startswith("megatron.core.models."):
        return None
    if not is_first(model):
        sequences, length = shape_of_hidden_states(model, model.decoder.input_tensor)
    else:
        tokens = arguments_by_name(signature(forward).parameters, (model, *args), kwargs).get("input_ids")
        if not isinstance(tokens, torch.Tensor):
            return None
        sequences, length = tokens.shape
    return length * model.config.context_parallel_size, sequences


class EvaluationGraphs:
    """Captures a forward graph of each layer, in evaluation mode, and gives it to the layer.

    Where training's graphs hold the whole model, or the chunk, so does one of evaluation, if the first call fits it.

    The graphs have static inputs and a memory pool of their own, and what they return is copied: whenever evaluation
    runs, it changes nothing that training's graphs or a backward pass that is still to come will read.

    Args:
        chunk: The chunk of it whose layers have graphs of training.
        sharding: Gathers layers: the ``graphs`` of ``MegatronFSDP``, or FSDP2's ``KeptParameters``.
        shape: Tokens in a sequence and sequences in a micro-batch, in training.
        whole: The graphs of the whole model, or of the chunk, in training; None if they hold layers.
    """

    def __init__(self, stage: Stage, chunk: Chunk, sharding: Any, shape: tuple[int, int], whole: ModelGraphs | None):
        self._stage, self._sharding, self._shape, self._whole = stage, sharding, shape, whole
        self._model, self._layers = chunk.model, tuple(chunk.layers)
        sharding.expect_evaluation(self.capture)

    def blocker(self) -> str:
        """Return why there are no graphs to capture; empty if there are."""
        return evaluation_blocker(self._stage.config, whole=self._whole is not None)

    def capture(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Capture, or log why not. All ranks of the pipeline stage must call it together, in evaluation mode.

        Args:
            args: Positional arguments of the model in the evaluation that begins: the graphs are for their shape.

        Raises:
            CaptureFailedError: capture failed, and ``config.cuda_graph_fallback`` is not ``eager``.
            CaptureInterruptedError: another rank was interrupted.
        """
        if not self._layers:  # reset
            return
        level, refused = logging.INFO, self.blocker()
        try:
            if not refused:
                level, refused = logging.WARNING, self._capture_together(args, kwargs)
        except CaptureFailedError as failed:
            if not goes_on_eagerly(self._stage.config):
                raise
            warn_of_failure(failed, "Evaluation runs eagerly (--cuda-graph-fallback eager)")
            return
        if refused:
            log_single_rank(logger, level, f"Evaluation runs eagerly, because {refused}")

    def _capture_together(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """Capture on all ranks, or return why on none; raise what every rank raises."""
        layers, whole = self._layers, self._whole
        agreement = self._stage.agreement(with_other_stages=False)  # later stages wait for this one's output
        graphs: list[Any] = []
        try:
            shape = shape_of_call(self._model, args, kwargs) or self._shape
            hooked = any(has_other_hooks(module) for layer in layers for module in layer.modules())
            if refused := agreement.objection("layers, or modules in them, have hooks of others" if hooked else ""):
                return refused
            if whole is not None and agreement.objection(call_blocker(whole.module, whole.by_name(args, kwargs))):
                whole = None
            if whole is None and (refused := evaluation_blocker(self._stage.config, whole=False)):
                return refused
            with joined_collectives(agreement.join):
                graphs = self._capture(agreement, shape) if whole is None else [self._capture_model(agreement, shape)]
            agreement.finish()
        except BaseException as error:
            failed = agreement.failed(error)  # first: cleanup can fail too, and others wait for this rank
            for graph in graphs:
                graph.reset()
            if isinstance(error, Exception):
                raise failed from error
            raise  # Ctrl-C
        captured = f"{len(graphs)} layer graphs" if whole is None else "the whole model"
        if whole is None:
            for layer, graph in zip(layers, graphs, strict=True):
                layer.evaluation_graph = graph
        else:
            (whole.evaluation,) = graphs
        log_single_rank(logger, logging.INFO, f"Captured {captured} for evaluation")
        return ""

    def _capture_model(self, agreement: CaptureAgreement, shape: tuple[int, int]) -> ModelGraphs:
        owner = self._sharding.evaluated_model(partial(agreement.begin, "evaluation of the whole model"))
        quantized = recorded_quantization(self._stage, self._model)
        return capture_evaluation(self._model, owner, *shape, WARMUP_ITERATIONS, quantized)

    def _capture(self, agreement: CaptureAgreement, shape: tuple[int, int]) -> list[Any]:
        inputs = LayerInputs(self._stage.config, *shape)
        layers = self._layers
        names = [layer_name(layer, index) for index, layer in enumerate(layers)]
        one_at_a_time: list[float] = [step for chunk in range(1, len(layers) + 1) for step in (chunk, -chunk)]
        passes = PassOrder(one_at_a_time, [1] * len(layers), 1)
        samples = sample_arguments(
            passes.plan,
            lambda index: inputs.make(layers[index], self._model),
            lambda index: attention_mask_type(layers[index]),
        )
        keywords = [kwargs for _, kwargs in samples]
        absent = default_kwargs(layers, keywords)
        guards: dict[torch.nn.Module, AddressGuard] = {}
        reads = AttributeReads()
        with (
            _capture_mode(layers) as dispatchers,
            self._sharding.capture_evaluation_graphs(layers),
            extracted_hooks(layers) as hooks,
            reads.noted(layers, stateless=True),
        ):
            graphed = make_graphed_callables(
                layers,
                [args for args, _ in samples],
                num_warmup_iters=WARMUP_ITERATIONS,  # of training none counts, which runs something else
                sample_kwargs=keywords,
                **quantization_arguments(self._stage, layers),
                _order=passes.order,
                _num_layers_per_chunk=passes.num_layers_per_chunk,
                _reuse_graph_input_output_buffers=True,
                capture_time_hooks=[
                    _between(agreement.beginning(f"evaluation of {name}"), own, partial(self._guard, guards))
                    for name, own in zip(names, hooks, strict=True)
                ],
            )
        defaults: defaultdict[Any, DefaultInputs] = defaultdict(DefaultInputs)
        eager_passes = EagerPasses()
        return [
            EvaluationGraph(
                name,
                graphed[index],
                *samples[index],
                guards[layer],
                dispatchers[layer],
                conditions=ReplayConditions(layer, reads, name, forward_replaced=True, parameters=False),
                has_attention=captures_attention(layer),
                absent=absent[index],
                defaults=defaults[attention_mask_type(layer)],
                eager_passes=eager_passes,
            )
            for index, (name, layer) in enumerate(zip(names, layers, strict=True))
        ]

    def _guard(self, guards: dict[torch.nn.Module, AddressGuard], layer: torch.nn.Module, *_: Any) -> None:
        """Note where parameters that the graph of ``layer`` reads, which are gathered now, and its buffers are."""
        read = set(map(id, self._sharding.read_by_graphs(layer)))
        places = [place for place in places_of(layer, "_parameters") if id(place.tensor) in read]
        places += places_of(layer, "_buffers")
        guards[layer] = AddressGuard(
            lambda: [owner.get(key) for _, owner, key in places], lambda index: places[index].name, ""
        )

    def reset(self) -> None:
        """Free the graphs; evaluation runs eagerly."""
        if self._whole is not None and self._whole.evaluation is not None:
            self._whole.evaluation.reset()
            self._whole.evaluation = None
        for layer in self._layers:
            if layer.evaluation_graph is not None:
                layer.evaluation_graph.reset()
                layer.evaluation_graph = None
        self._layers, self._whole = (), None
        del self._model, self._stage


def _between(first: Callable, hooks: dict[str, Any], last: Callable) -> dict[str, Any]:
    """``hooks`` of a layer with two more that run before its forward pass, in front of the others and behind them."""
    return {**hooks, "forward_pre_hooks": {"first": first, **hooks["forward_pre_hooks"], "last": last}}


@contextmanager
def _capture_mode(layers: Sequence[Any]) -> Iterator[dict[Any, DispatcherState]]:
    """Let layers in evaluation mode run what their graphs of training hold.

    Yields:
        What the last forward pass of each layer has set in its token dispatcher.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer  # imports this module

    dispatchers: dict[Any, DispatcherState] = {}
    methods = Replacements()
    for layer in layers:
        # The capture of other layers than transformer layers is to call ``forward``.
        forward = layer._te_cuda_graph_capture if isinstance(layer, TransformerLayer) else layer.forward
        methods.add(layer, "forward", partial(_noting_dispatcher, dispatchers, layer, forward))
        if getattr(layer, "is_moe_layer", False) and CudaGraphModule.moe_router in layer.config.cuda_graph_modules:
            methods.add(layer, "_forward_mlp", partial(_up_to_the_router, layer, layer._forward_mlp))
    with methods, between(state._set_capture_start, state._set_capture_end):
        yield dispatchers


def _noting_dispatcher(
    dispatchers: dict[Any, DispatcherState], layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``forward`` of ``layer`` and note what it has set in the token dispatcher."""
    output = forward(*args, **kwargs)
    dispatchers[layer] = DispatcherState(layer)
    return output


def _up_to_the_router(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``forward``, the MoE part of ``layer``, which ends where graphs do only in training.

    The router, which differs between training and evaluation, stays in evaluation mode.
    """
    with replaced_attribute((layer, layer.mlp), "training", lambda evaluating: True):
        return forward(*args, **kwargs)
