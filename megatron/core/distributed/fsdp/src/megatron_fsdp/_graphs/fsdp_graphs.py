"""Own the CUDA graphs and runners of one ``MegatronFSDP``, and check whether its passes can be captured."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner

from . import collectives
from .backward_pass import BackwardPass, Gradients
from .pipelines import free_gradients, prepared, release_all, release_captured, take_places
from .recorded_passes import EvaluatedModel, RecordedPasses
from .runners import EagerRunner, PartOfModule, ReplayedRunner

COLLECTIVES_STAY_OUTSIDE = (
    "its collectives cannot be captured (this requires --data-parallel-sharding-strategy optim_grads_params, "
    "--fsdp-double-buffer, and an environment without NCCL_GRAPH_MIXING_SUPPORT=0)"
)


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Return whether ``param`` has hooks other than Megatron-FSDP's; a graph does not call them."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


class FsdpGraphs:
    """Owns the graphs of one ``MegatronFSDP``, and the state shared by its hooks and captures.

    Args:
        fsdp: The wrapper whose pipelines and buffers the graphs use.

    Attributes:
        eager: The eager runner of each module; filled during hook registration.
        units: The eager runner of each FSDP unit, in forward order; filled during hook registration.
        layers: The runners of modules that have their own training graphs.
        whole_passes: The owner of graphs of the whole model; set from the start of their capture.
        captured: The runners of modules whose own graphs are being captured; empty during a capture of whole passes,
            None outside of captures.
        before_evaluation: Callback ``(args, kwargs)`` that captures the evaluation graph. It is called once, before the
            next forward pass in evaluation mode without grad; None if nothing is to be captured.
        reduced_once: The process groups whose communicators were set up by a first gradient reduction.
    """

    def __init__(self, fsdp: Any):
        self.fsdp = fsdp
        self.shards_params = fsdp.data_parallel_sharding_strategy == "optim_grads_params"
        self.gradients, self.backward = Gradients(self), BackwardPass(self)
        self.eager: dict[torch.nn.Module, EagerRunner] = {}
        self.units: dict[torch.nn.Module, EagerRunner] = {}
        self.layers: dict[torch.nn.Module, ReplayedRunner] = {}
        self.whole_passes: RecordedPasses | None = None
        self.captured: Mapping[torch.nn.Module, ReplayedRunner] | None = None
        self.before_evaluation: Callable[[tuple, dict[str, Any]], object] | None = None
        self.reduced_once: set[Any] = set()

    def runner_of(self, module: torch.nn.Module) -> EagerRunner:
        """Return the runner for the current forward pass of ``module``.

        This is the runner of the capture in progress, of the graphs to replay (``module.replaying``), or an eager one.
        """
        replayed = module.__dict__.get("replaying") if self.captured is None else self.captured.get(module)
        # Copied modules have hooks but no runner.
        return replayed or self.eager.get(module) or EagerRunner(self, module)

    @property
    def has_graphs(self) -> bool:
        """Whether training graphs exist or a capture is in progress."""
        return bool(self.layers) or self.whole_passes is not None or self.captured is not None

    def hold(self, module: torch.nn.Module) -> bool:
        """Return whether training graphs contain the unit ``module``."""
        return module in self.layers or (self.whole_passes is not None and module in self.units)

    @contextmanager
    def capturing(self, runners: Mapping[torch.nn.Module, ReplayedRunner]) -> Iterator[None]:
        """Context manager that marks a capture as in progress, with one runner per module that gets its own graphs."""
        self.captured = runners
        try:
            yield
        finally:
            self.captured = None

    def free_buffers(self) -> None:
        """Free all communication buffers and discard unreduced gradients; later passes allocate new buffers."""
        release_all(self.fsdp)
        free_gradients(self.fsdp, self.fsdp.grad_reduce_pipeline.bucket_status)
        self.fsdp.param_and_grad_buffer.free_buckets()

    def whole_model_blocker(self) -> str:
        """Return why the passes of the whole model cannot be captured, or an empty string."""
        if self.fsdp.model_auto_sync:
            return "Megatron-FSDP synchronizes the model in every micro-batch"
        if not (self.units and all(map(self._collectives_can_be_recorded, self.units.values()))):
            return COLLECTIVES_STAY_OUTSIDE
        for param in self.backward.trainable:
            if has_gradient_hooks(param):
                return f"parameter {self.fsdp.param_to_name[param]} has hooks, or several modules share it"
            if getattr(param, "skip_backward_post_hook", False):
                return f"the weight gradient of {self.fsdp.param_to_name[param]} is delayed"
        return ""

    def _collectives_can_be_recorded(self, unit: EagerRunner) -> bool:
        """Return whether the unit's buffers are sharded and fixed, and NCCL allows collectives in graphs."""
        fsdp = self.fsdp
        if os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == "0" or not self.shards_params:
            return False
        if not fsdp.ddp_config.fsdp_double_buffer or fsdp.report_nan_in_param_grad:
            return False
        groups = [fsdp.param_and_grad_buffer.parameter_groups[bucket] for bucket in unit.buckets]
        return all(group.fsdp_unit_id is not None and group.transpose_weight_buffer is None for group in groups)

    def recorded_passes(self, begin: Callable[[str], object], *, alone: bool) -> RecordedPasses:
        """Create the ``RecordedPasses`` that owns the whole-model training graphs."""
        return RecordedPasses(self, begin, alone=alone)

    def evaluated_model(self, begin: Callable[[str], object]) -> EvaluatedModel:
        """Create the owner of the evaluation graph of a whole model that already has training graphs.

        Args:
            begin: Called with the name of each part of the capture; see ``RecordedPasses``.
        """
        return EvaluatedModel(self, begin, alone=True)

    @contextmanager
    def layer_capture(
        self, modules: Iterable[torch.nn.Module], whole: bool = True
    ) -> Iterator[list[GraphOwner | None]]:
        """Context manager for capturing individual ``modules``: FSDP units, or modules that are never released.

        Yields the owner of the gradients in the backward graph of each module; None if autograd gets them.

        In the context, the model uses raw parameters, and gradients are not reduced. No collective is in flight before
        or after. On exit, all buckets used by the capture are released, and the modules have their previous parameters
        again (raw, or the optimizer's ``DTensor``). After an exception no module has graphs.

        Args:
            modules: The modules to capture.
            whole: Whether the graphs contain each module's entire computation.
        """
        fsdp = self.fsdp
        with prepared(fsdp):
            take_places(fsdp)
            captured = {module: ReplayedRunner(self, module) for module in modules}
            recorded = [runner for runner in captured.values() if self._has_recorded_collectives(runner)]
            buckets = [bucket for runner in recorded for bucket in runner.buckets]
            try:
                with self.capturing(captured):
                    for runner in captured.values():
                        self.backward.takers.update(dict.fromkeys(runner.params, runner))
                    try:
                        collectives.set_up_communicators(fsdp, buckets, self.reduced_once)
                        yield [self._owner(runner, whole) for runner in captured.values()]
                    finally:
                        self.backward.clear_runners()
                    release_captured(fsdp)
                    collectives.record(fsdp, buckets, reductions=True)
                    for runner in recorded:
                        runner.select_collectives()
            except BaseException:
                fsdp.param_and_grad_buffer.leave_graphs()
                collectives.forget(fsdp, buckets)
                raise
        self.layers.update(captured)

    def _has_recorded_collectives(self, runner: EagerRunner) -> bool:
        return runner.module in self.units and self._collectives_can_be_recorded(runner) and not runner.float8_params

    def _owner(self, runner: ReplayedRunner, whole: bool) -> GraphOwner | None:
        if not self._has_recorded_collectives(runner) or any(map(has_gradient_hooks, runner.params)):
            return None
        runner.frames_backward = whole
        return runner if whole else PartOfModule(runner)

    def forget_graphs(self, modules: Iterable[torch.nn.Module]) -> None:
        """Run ``modules`` eagerly from now on, free their collectives' graphs, and clear ``before_evaluation``."""
        for module in modules:
            runner = self.layers.pop(module, None)
            if runner is not None:
                collectives.forget(self.fsdp, runner.buckets)
        self.before_evaluation = None
        self.fsdp.param_and_grad_buffer.leave_graphs()
        # Only graphs have waited for the gathers across replicas; eager passes have not.
        self.fsdp.all_gather_pipeline.gathered_across_replicas = False
