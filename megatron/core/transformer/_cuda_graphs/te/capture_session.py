"""Capture the graphs of a pipeline stage."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from ..agreement import CaptureAgreement
from ..engine.graph import preserve_buffers
from ..engine.make_graphed_callables import make_graphed_callables
from ..engine.memory import release_cached_memory
from ..engine.plan import ordered_plan
from ..engine.rng import preserve_rng
from ..hooks import extracted_hooks, has_own_hooks
from ..replacements import between
from ..snapshot import Snapshot, module_aspects, named, refuse_changed_attributes
from .attached_graphs import attach_graphs
from .capture_arguments import CaptureArguments, num_warmup_iterations, recorded_quantization
from .capture_state import CaptureState, Holds, Status
from .layers import layer_name, refuse_skipped_forward
from .model import capture_for_evaluation, capture_models
from .stage import Stage

InputData = tuple[list[tuple[torch.Tensor, ...]], dict[str, Any]]


@dataclass
class CaptureSession:
    """Captures the passes of ``stage`` into ``graphs``. If a capture fails, deleting ``graphs`` undoes it completely.

    Attributes:
        agreement: Stores the name of the current pass for error messages.
        shape: Sequence length before any sharding, and micro-batch size.
    """

    stage: Stage
    graphs: CaptureState
    agreement: CaptureAgreement
    shape: tuple[int, int]

    def capture(self, input_data: Callable[[], InputData]) -> None:
        """Capture the graphs selected by ``graphs.scope``.

        Args:
            input_data: Returns inputs and arguments of ``make_graphed_callables`` for individually captured layers.
        """
        if self.graphs.scope.holds is Holds.MODEL:
            self._capture_model()
        else:
            self._capture_layers(input_data)
        # The first evaluation is captured when it begins.
        for chunk, graphs in zip(self.stage.chunks, self.graphs.models, strict=False):
            chunk.fsdp.graphs.before_evaluation = partial(capture_for_evaluation, self.stage, chunk, graphs)
        self.graphs.follow_rng_tracker()
        self.graphs.status = Status.CAPTURED

    def _capture_model(self) -> None:
        """Capture each chunk of the model as a whole."""
        from megatron.core.transformer.cuda_graphs import _set_capture_end, _set_capture_start  # imports this module

        stage, chunks = self.stage, self.stage.chunks
        models = [chunk.model for chunk in chunks]
        names = ["the whole model"] if stage.one_graph_serves_all else [f"chunk {i}" for i in range(len(chunks))]
        order = CaptureArguments(stage, [[model] for model in models], *self.shape).order()
        warmup_iters = num_warmup_iterations(stage.config, order.num_microbatches)
        owners = [
            chunk.fsdp.graphs.recorded_passes(partial(self.agreement.begin, name))
            for chunk, name in zip(chunks, names, strict=True)
        ]
        quantized = [recorded_quantization(stage, model) for model in models]
        # A failed capture may not restore generators and buffers. Capture mode would disable the layers' hooks.
        outside = between(_set_capture_end, _set_capture_start)
        self._free_gradients()
        with outside, preserve_rng(), preserve_buffers([chunk.module for chunk in chunks]):
            self.graphs.models = capture_models(
                models,
                owners,
                order.plan,
                self.shape,
                warmup_iters,
                quantized,
                given=self.graphs.calls.given,
            )
        self._warn_of_hooks((model, named(model)) for model in models)

    def _warn_of_hooks(self, captured: Iterable[tuple[torch.nn.Module, dict[torch.nn.Module, str]]]) -> None:
        """Warn about third-party hooks in graphs, given each captured module and the names of its submodules.

        Hooks of the captured modules themselves run around replays.
        """
        hooked = (
            name
            for root, modules in captured
            for module, name in modules.items()
            if module is not root and has_own_hooks(module)
        )
        if names := ", ".join(hooked):
            self.stage.log(
                logging.WARNING,
                f"hooks of {names} are part of CUDA graphs: replays repeat their work on the GPU but do not call them. "
                "Hooks registered after the capture are called, as their layers then run eagerly",
            )

    def _capture_layers(self, input_data: Callable[[], InputData]) -> None:
        """Capture each layer individually."""
        stage = self.stage
        layers = tuple(stage.layers)
        sample_args, arguments = input_data()
        names = [layer_name(layer, index) for index, layer in enumerate(layers)]
        for layer, name in zip(layers, names, strict=True):
            refuse_skipped_forward(layer, name)
        plan = ordered_plan(arguments["_order"], arguments["_num_layers_per_chunk"], len(layers))
        # Same as in the decoder under sequence parallelism.
        rng = get_cuda_rng_tracker().fork() if stage.config.sequence_parallel else nullcontext()
        with preserve_rng(), preserve_buffers(layers), self._fsdp_capture() as owners:
            with refuse_changed_attributes(layers), extracted_hooks(layers) as hooks, rng:
                arguments["capture_time_hooks"] = [
                    self.agreement.naming(own, name) for own, name in zip(hooks, names, strict=True)
                ]
                arguments["owners"] = owners or None
                graphs = make_graphed_callables(layers, sample_args, **arguments)
            held = [
                named(layer, name, layer._get_submodules_under_cudagraphs())
                for layer, name in zip(layers, names, strict=True)
            ]
            snapshots = [
                Snapshot(
                    "change it back, or capture again with delete_cuda_graphs() and create_cudagraphs()",
                    *module_aspects(modules, around=layer),
                )
                for layer, modules in zip(layers, held, strict=True)
            ]
        self._warn_of_hooks(zip(layers, held, strict=True))
        samples = list(zip(sample_args, arguments["sample_kwargs"], strict=True))
        attach_graphs(stage, plan, graphs, samples, snapshots)

    @contextmanager
    def _fsdp_capture(self) -> Iterator[list[Any]]:
        """Context manager that yields the owner of each layer's gradients under Megatron-FSDP; otherwise nothing."""
        self._free_gradients()
        owners: list[Any] = []
        with ExitStack() as stack:
            for chunk in self.stage.chunks:
                if chunk.fsdp is not None:
                    whole = not self.stage.config.cuda_graph_modules
                    owners += stack.enter_context(chunk.fsdp.graphs.layer_capture(chunk.layers, whole))
            yield owners

    def _free_gradients(self) -> None:
        """Free the optimizer's gradients before the capture: ``zero_grad_buffer`` drops them."""
        wrappers = [chunk.fsdp for chunk in self.stage.chunks if chunk.fsdp is not None]
        if wrappers and self.stage.role.language:
            for fsdp in wrappers:
                fsdp.zero_grad_buffer()
            release_cached_memory()
