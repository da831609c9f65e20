"""The CUDA graphs of one ``MegatronFSDP``: what runs a pass, what can be captured, and captures."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from . import collectives
from .backward_pass import BackwardPass, Gradients
from .pipelines import prepared, release_captured, take_places
from .recorded_passes import EvaluatedModel, RecordedPasses
from .runners import Eager, PartOfModule, Replayed
from .unit import Unit

COLLECTIVES_STAY_OUTSIDE = (
    "its collectives cannot be in graphs (that needs --data-parallel-sharding-strategy optim_grads_params, "
    "--fsdp-double-buffer, and no NCCL_GRAPH_MIXING_SUPPORT=0)"
)


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Whether ``param`` has hooks beside the one of Megatron-FSDP: autograd calls them, and no graph does."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


# What must be true of no parameter, and the reason. The last does not rule out the whole model, which completes them.
_OF_PARAMETERS: Sequence[tuple[Any, str]] = (
    (has_gradient_hooks, "parameter {} has hooks, or several modules share it"),
    (lambda param: getattr(param, "skip_backward_post_hook", False), "the weight gradient of {} is delayed"),
    (lambda param: getattr(param, "_is_shared", False), "the gradient of {} is completed elsewhere"),
)


class FsdpGraphs:
    """Owns the graphs of one ``MegatronFSDP``, and everything that its hooks and captures share.

    Args:
        fsdp: The wrapper, whose pipelines and buffers they drive.

    Attributes:
        units: Its FSDP units by module, in the order of forward; filled while hooks are registered.
        layers: The runners of modules with graphs of their own for training.
        passes: The owner of the graphs that hold several layers, or the whole model, also while they are captured.
        captured: The runners of modules with graphs of their own that are being captured, none in a capture of whole
            passes; None while no capture is under way.
        before_evaluation: Called once with the arguments of the model, and forgotten, before the next forward pass in
            evaluation.
        reduced_once: The process groups that reduce gradients and are set up.
    """

    def __init__(self, fsdp: Any):
        self.fsdp = fsdp
        self.shards_params = fsdp.data_parallel_sharding_strategy == "optim_grads_params"
        self.gradients, self.backward = Gradients(self), BackwardPass(self)
        self.units: dict[torch.nn.Module, Unit] = {}
        self.layers: dict[torch.nn.Module, Replayed] = {}
        self.passes: RecordedPasses | None = None
        self.captured: Mapping[torch.nn.Module, Replayed] | None = None
        self.before_evaluation: list[Callable[[tuple, dict[str, Any]], object]] = []
        self.reduced_once: set[Any] = set()
        self._eager: dict[torch.nn.Module, Eager] = {}

    # ------------------------------------------------------------------------------------------- what runs a pass

    def runner_of(self, module: torch.nn.Module) -> Eager:
        """Return the runner of the forward pass of ``module`` that begins, or runs.

        It is that of the capture under way, or of the graphs that the module's call replays (``module.replaying``), or
        an eager one. The backward pass reads nothing of the module.
        """
        replayed = module.__dict__.get("replaying") if self.captured is None else self.captured.get(module)
        runner: Eager | None = replayed or self._eager.get(module)
        if runner is None:
            runner = Eager(self, module)
            if module in self.backward.module_names:  # copies of it have its hooks, and must not be kept alive here
                self._eager[module] = runner
        return runner

    @property
    def model_passes(self) -> RecordedPasses | None:
        """The owner of the graphs of the whole model's passes."""
        return self.passes if self.passes is not None and self.passes.whole else None

    @property
    def has_graphs(self) -> bool:
        """Whether there are graphs for training, or a capture is under way."""
        return bool(self.layers) or self.passes is not None or self.captured is not None

    def hold(self, module: torch.nn.Module) -> bool:
        """Whether graphs for training hold ``module``, a unit."""
        return module in self.layers or (self.passes is not None and module in self.passes.units)

    @contextmanager
    def capturing(self, runners: Mapping[torch.nn.Module, Replayed]) -> Iterator[None]:
        """The context in which a capture is under way, with these runners of modules with graphs of their own."""
        self.captured = runners
        try:
            yield
        finally:
            self.captured = None

    # -------------------------------------------------------------------------------------------------- whole passes

    def recording_blocker(self, modules: Iterable[torch.nn.Module]) -> str:
        """Return why the passes of ``modules`` cannot be recorded with their collectives; empty if they can."""
        units = [self.units.get(module) for module in modules]
        return self._blocker(units, [param for unit in units if unit for param in unit.params], _OF_PARAMETERS)

    def whole_model_blocker(self) -> str:
        """Return why the whole model's passes cannot be graphs; empty if they can."""
        if self.fsdp.model_auto_sync:
            return "Megatron-FSDP synchronizes the model in every micro-batch"
        return self._blocker([*self.units.values()] or [None], self.backward.trainable, _OF_PARAMETERS[:-1])

    def _blocker(
        self, units: Iterable[Unit | None], params: Iterable[torch.nn.Parameter], reasons: Sequence[Any]
    ) -> str:
        if not all(unit is not None and self._collectives_can_be_recorded(unit) for unit in units):
            return COLLECTIVES_STAY_OUTSIDE
        for param in params:
            for applies, reason in reasons:
                if applies(param):
                    return str(reason.format(self.fsdp.param_to_name[param]))
        return ""

    def _collectives_can_be_recorded(self, unit: Unit) -> bool:
        """Whether the buffers of ``unit`` are sharded, and in place, and NCCL allows collectives in graphs."""
        fsdp = self.fsdp
        if os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == "0" or not self.shards_params:
            return False
        if not fsdp.ddp_config.fsdp_double_buffer or fsdp.report_nan_in_param_grad:
            return False
        groups = [fsdp.param_and_grad_buffer.parameter_groups[bucket] for bucket in unit.buckets]
        return all(group.fsdp_unit_id is not None and group.transpose_weight_buffer is None for group in groups)

    def recorded_layers(self, layers: Iterable[torch.nn.Module], begin: Callable[[str], object]) -> RecordedPasses:
        """Return the owner of two graphs that hold the passes of consecutive ``layers``, in the order of forward.

        ``begin`` is that of ``RecordedPasses``, also below.
        """
        return RecordedPasses(self, {layer: self.units[layer] for layer in layers}, begin, whole=False)

    def whole_model(self, begin: Callable[[str], object]) -> RecordedPasses:
        """Return the owner of graphs of the whole model's passes."""
        return RecordedPasses(self, self.units, begin, whole=True)

    def evaluated_model(self, begin: Callable[[str], object]) -> EvaluatedModel:
        """Return the owner of a graph of the whole model's forward pass in evaluation; training has graphs, too."""
        assert self.passes is not None
        return EvaluatedModel(self.passes, begin)

    def expect_evaluation(self, prepare: Callable[[tuple, dict[str, Any]], object]) -> None:
        """Call ``prepare`` once, before the next forward pass of the model in evaluation mode and without grad.

        It gets the positional arguments and the keyword arguments of the pass.
        """
        self.before_evaluation.append(prepare)

    # -------------------------------------------------------------------------------------------------- single layers

    @contextmanager
    def capture_graphs(self, modules: Iterable[torch.nn.Module], keep_buckets: bool = False) -> Iterator[None]:
        """The context in which graphs of ``modules`` are captured, each apart.

        The model has raw parameters, gradients are withheld, no collective is in flight at either end. When the context
        ends, also after an exception, every bucket that capture used is released and the module's parameters are
        restored (raw, or the optimizer's ``DTensor``). After an exception no module is graphed.

        Args:
            modules: The modules that are captured, each an FSDP unit or one whose parameters are never released.
            keep_buckets: Whether graphs read no experts, and the buckets of all other parameters of ``modules`` keep
                their memory as long as there are graphs.
        """
        fsdp = self.fsdp
        with prepared(fsdp):
            take_places(fsdp)
            captured = {module: Replayed(self, module, reads_experts=not keep_buckets) for module in modules}
            kept = frozenset(bucket for runner in captured.values() for bucket in runner.kept)
            recorded = [module for module in captured if self._has_recorded_collectives(module)]
            buckets = [bucket for module in recorded for bucket in self.units[module].buckets]
            fsdp.param_and_grad_buffer.keep_weights(kept, True)
            try:
                with self.capturing(captured):
                    for runner in captured.values():
                        self.backward.takers.update(dict.fromkeys(runner.module.parameters(), runner))
                    try:
                        collectives.set_up_communicators(fsdp, buckets, self.reduced_once)
                        yield
                    finally:
                        self.backward.end_of_modules()
                    release_captured(fsdp)
                    collectives.record(fsdp, buckets, reductions=True)
                    for module in recorded:
                        captured[module].follow_hooks()
            except BaseException:
                fsdp.param_and_grad_buffer.keep_weights(kept, False)
                collectives.forget(fsdp, buckets)
                raise
        self.layers.update(captured)

    def _has_recorded_collectives(self, module: torch.nn.Module) -> bool:
        unit = self.units.get(module)
        return unit is not None and self._collectives_can_be_recorded(unit) and not unit.float8_params

    def gradient_sinks(self, modules: Iterable[torch.nn.Module], whole: bool) -> list[Replayed | PartOfModule | None]:
        """Return for each of ``modules`` what takes its gradients in its backward graph; None for autograd.

        Args:
            modules: Those that are captured, in the context of ``capture_graphs``.
            whole: Whether their graphs hold all that they compute.

        Raises:
            RuntimeError: outside of that context.
        """
        if self.captured is None:
            raise RuntimeError("gradients are taken for graphs that are being captured: call it in capture_graphs()")
        sinks: list[Replayed | PartOfModule | None] = []
        for module in modules:
            runner = self.captured[module]
            takes = self._has_recorded_collectives(module) and not any(map(has_gradient_hooks, module.parameters()))
            runner.takes_gradients, runner.frames_backward = takes, takes and whole
            sinks.append(None if not takes else runner if whole else PartOfModule(runner))
        return sinks

    def recorded_collectives(self) -> int:
        """Return how many graphs hold all-gathers or reductions alone, beside those of layers."""
        pipelines = self.fsdp.all_gather_pipeline, self.fsdp.grad_reduce_pipeline
        return sum(len(set(pipeline.recorded.values())) for pipeline in pipelines)

    def forget_graphs(self, modules: Iterable[torch.nn.Module]) -> None:
        """Let ``modules`` train eagerly from now on, expect no evaluation, and free what was recorded for them."""
        for module in modules:
            runner = self.layers.pop(module, None)
            if runner is not None:
                collectives.forget(self.fsdp, self.units[module].buckets if module in self.units else ())
                self.fsdp.param_and_grad_buffer.keep_weights(runner.kept, False)
        self.before_evaluation.clear()
        self.fsdp.param_and_grad_buffer.leave_graphs()
