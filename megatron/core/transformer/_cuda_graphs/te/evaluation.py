"""Forward graphs of layers for evaluation, captured when the first evaluation after training's capture begins."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.utils import log_single_rank

from .. import state
from ..eager_passes import EagerPasses
from ..engine.addresses import AddressGuard, places_of
from ..engine.make_graphed_callables import make_graphed_callables
from ..engine.plan import ordered_plan
from ..errors import CaptureFailedError, UnsupportedError
from ..evaluation_graph import EvaluationGraph
from ..hooks import extracted_hooks, has_other_hooks
from ..own_options import packed_sequences
from .agreement import CaptureAgreement
from .joined_collectives import joined_collectives
from .sample_inputs import SampleArguments, attention_mask_type, captures_attention, default_kwargs, sample_arguments

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

# As often as torch's own make_graphed_callables: training has not warmed up what evaluation runs.
_WARMUP_ITERATIONS = 3


def against_evaluation_graphs(config: Any, fsdp: Any) -> str:
    """Say why evaluation cannot have graphs; empty if it can.

    Args:
        config: The model's ``TransformerConfig``.
        fsdp: Its ``MegatronFSDP``.
    """
    in_part = CudaGraphModule.moe_router in config.cuda_graph_modules
    again, in_pieces = config.recompute_granularity, config.mlp_chunks_for_training > 1
    for reason, applies in (
        ("FP8 and FP4 keep statistics outside of graphs", config.fp8 or config.fp4),
        ("sequences are packed", packed_sequences(config) is not None),
        ("weight gradients are delayed (--delay-wgrad-compute)", config.delay_wgrad_compute),
        ("activations are offloaded", config.fine_grained_activation_offloading),
        ("parameters are gathered module by module", fsdp.enable_fine_grained_param_gather_hook),
        ("MoE layers are captured in part, and run in part again or in pieces", in_part and (again or in_pieces)),
    ):
        if applies:
            return reason
    return ""


class EvaluationGraphs:
    """Captures a forward graph of each layer, in evaluation mode, and gives it to the layer.

    The graphs have static inputs and a memory pool of their own, and what they return is copied: whenever evaluation
    runs, it changes nothing that training's graphs or a backward pass that is still to come will read. A capture that
    fails leaves evaluation eager.

    Args:
        config: The layers' ``TransformerConfig``.
        fsdp: The ``MegatronFSDP`` around them.
        layers: The names of the layers that have graphs of training, each with the layer, in the order in which they
            run.
        inputs: Makes static inputs of a layer.
        new_agreement: Makes what the ranks of this pipeline stage agree by.
        against: Why no graphs are to be captured; empty if they are.
    """

    def __init__(
        self,
        config: Any,
        fsdp: Any,
        layers: Sequence[tuple[str, Any]],
        inputs: Callable[[Any], SampleArguments],
        new_agreement: Callable[[], CaptureAgreement],
        against: str,
    ):
        self._config, self._fsdp = config, fsdp
        self._layers = list(layers)
        self._inputs, self._new_agreement = inputs, new_agreement
        self._against = against
        fsdp.expect_evaluation(self.capture)

    def against(self) -> str:
        """Say why the configuration rules graphs out; empty if it does not."""
        return self._against or against_evaluation_graphs(self._config, self._fsdp)

    def capture(self) -> None:
        """Capture, or log why not. All ranks of the pipeline stage must call it together, in evaluation mode."""
        if not self._layers:  # reset
            return
        against = self.against()
        layers = [layer for _, layer in self._layers]
        if against:
            log_single_rank(logger, logging.INFO, f"Evaluation runs eagerly, because {against}")
            return
        agreement = self._new_agreement()
        graphs: list[EvaluationGraph] = []
        try:
            if any(has_other_hooks(module) for layer in layers for module in layer.modules()):  # perhaps here only
                raise UnsupportedError("layers, or modules in them, have hooks of others")
            with joined_collectives(agreement.join):
                graphs = self._capture(agreement)
            agreement.finish()
        except BaseException as error:
            for graph in graphs:
                graph.reset()
            failed = agreement.failed(error)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            warning = f"{failed}. Evaluation runs eagerly."
            if isinstance(error, CaptureFailedError):
                log_single_rank(logger, logging.WARNING, warning)
            else:
                logger.warning(warning, exc_info=None if isinstance(error, UnsupportedError) else error)
            return
        for layer, graph in zip(layers, graphs, strict=True):
            layer.evaluation_graph = graph
        log_single_rank(logger, logging.INFO, f"Captured {len(graphs)} layer graphs for evaluation")

    def _capture(self, agreement: CaptureAgreement) -> list[EvaluationGraph]:
        layers = tuple(layer for _, layer in self._layers)
        chunks = [1] * len(layers)
        order = [step for chunk in range(1, len(layers) + 1) for step in (chunk, -chunk)]  # one layer at a time
        samples = sample_arguments(
            ordered_plan(order, chunks, len(layers)),
            lambda index: self._inputs(layers[index]),
            lambda index: attention_mask_type(layers[index]),
        )
        keywords = [kwargs for _, kwargs in samples]
        absent = default_kwargs(layers, keywords)
        guards: dict[torch.nn.Module, AddressGuard] = {}
        with (
            _capture_mode(layers),
            self._fsdp.capture_evaluation_graphs(layers),
            extracted_hooks(layers) as hooks,
        ):
            graphed = make_graphed_callables(
                layers,
                [args for args, _ in samples],
                num_warmup_iters=_WARMUP_ITERATIONS,
                sample_kwargs=keywords,
                enabled=False,
                _order=order,
                _num_layers_per_chunk=chunks,
                _reuse_graph_input_output_buffers=True,
                capture_time_hooks=[
                    _between(partial(agreement.begin, f"evaluation of {name}"), own, partial(_guard, guards))
                    for (name, _), own in zip(self._layers, hooks, strict=True)
                ],
            )
        given: dict[int, torch.Tensor | None] = {}
        eager_passes = EagerPasses()
        return [
            EvaluationGraph(
                layer,
                name,
                graphed[index],
                *samples[index],
                guards[layer],
                has_attention=captures_attention(layer),
                absent=absent[index],
                given=given,
                eager_passes=eager_passes,
            )
            for index, (name, layer) in enumerate(self._layers)
        ]

    def reset(self) -> None:
        """Free the graphs; evaluation runs eagerly."""
        for _, layer in self._layers:
            if layer.evaluation_graph is not None:
                layer.evaluation_graph.reset()
                layer.evaluation_graph = None
        self._layers.clear()
        del self._inputs, self._new_agreement


def _between(first: Callable, hooks: dict[str, Any], last: Callable) -> dict[str, Any]:
    """``hooks`` of a layer with two more that run before its forward pass, in front of the others and behind them."""
    return {**hooks, "forward_pre_hooks": {"first": first, **hooks["forward_pre_hooks"], "last": last}}


def _guard(guards: dict[torch.nn.Module, AddressGuard], layer: torch.nn.Module, *_: Any) -> None:
    """Note where parameters, which are gathered now, and buffers of ``layer`` are."""
    places = [*places_of(layer, "_parameters"), *places_of(layer, "_buffers")]
    guards[layer] = AddressGuard(
        lambda: [owner.get(key) for _, owner, key in places], lambda index: places[index].name, ""
    )


@contextmanager
def _capture_mode(layers: Sequence[Any]) -> Iterator[None]:
    """Let layers in evaluation mode run what their graphs of training hold."""
    from megatron.core.transformer.transformer_layer import TransformerLayer  # imports this module

    with ExitStack() as stack:
        stack.callback(state._set_capture_end)
        state._set_capture_start()
        for layer in layers:
            # The capture of other layers than transformer layers is to call ``forward``.
            forwards = {"forward": layer._te_cuda_graph_capture} if isinstance(layer, TransformerLayer) else {}
            if getattr(layer, "is_moe_layer", False) and CudaGraphModule.moe_router in layer.config.cuda_graph_modules:
                forwards["_forward_mlp"] = partial(_up_to_the_router, layer, layer._forward_mlp)
            own = vars(layer)
            for name, forward in forwards.items():
                stack.callback(_put_back, own, name, own.get(name))
                own[name] = forward
        yield


def _up_to_the_router(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``forward``, the MoE part of ``layer``, which ends where graphs do only in training.

    The router, which differs between training and evaluation, stays in evaluation mode.
    """
    parts = vars(layer), vars(layer.mlp)
    for part in parts:
        part["training"] = True
    try:
        return forward(*args, **kwargs)
    finally:
        for part in parts:
            part["training"] = False


def _put_back(attributes: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        del attributes[name]
    else:
        attributes[name] = value
