"""The backward pass of the whole model: what opens it, what closes it, and cleanup where an exception ended it."""

import warnings
from collections import defaultdict
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch

from ..profiles import shown_in_profiles
from ..training_state import TrainingState
from .gradients import Gradients
from .pipelines import release_all
from .registry import Registry, Runner


class Phase(Enum):
    """How far the backward pass is."""

    CLOSED = auto()
    REPLAYED = auto()  # by graphs of the whole model, which leave nothing to do for hooks
    EXPECTS_GRADIENTS = auto()  # of parameters, which hooks handle
    IN_PARTS = auto()  # as above; embedding, layers and output layer run their parts of it by themselves


class BackwardPass:
    """The backward pass of one ``MegatronFSDP``.

    Attributes:
        module_names: The name of each module in the model, for profiles; filled while hooks are registered.
        trainable: All parameters that require a gradient, likewise; an ordered set, whose hashes are known.
        runners: Those of modules whose backward pass has begun in it; what was replayed as a whole has its owner here.
        takers: Who takes the complete gradients of parameters; others are handled at once.
        collected: Parameters whose gradient a runner has taken and not handled yet.
    """

    def __init__(self, fsdp: Any, gradients: Gradients, registry: Registry):
        self._fsdp, self._gradients, self._registry = fsdp, gradients, registry
        self.module_names: dict[torch.nn.Module, str] = {}
        self.trainable: dict[torch.nn.Parameter, None] = {}
        self._shards_params = fsdp.data_parallel_sharding_strategy == "optim_grads_params"
        self.phase = Phase.CLOSED
        self.runners: dict[torch.nn.Module, Any] = {}
        self.takers: dict[torch.nn.Parameter, Runner] = {}
        self.collected: defaultdict[Runner, list[torch.nn.Parameter]] = defaultdict(list)
        self._caller_ends_it = False
        self._before: tuple[int, torch.nn.Parameter] | None = None  # see ``note_beside_graphs``

    @property
    def is_open(self) -> bool:
        """Whether one is in progress."""
        return self.phase is not Phase.CLOSED

    @property
    def expects_gradients(self) -> bool:
        """Whether one of the model is in progress, in which autograd computes gradients."""
        return self.phase is Phase.EXPECTS_GRADIENTS

    def start(self, *, caller_ends_it: bool = False, replayed: bool = False) -> None:
        """Open it, unless it is open: no prefetch or release by forward hooks, all gradients still to come.

        Args:
            caller_ends_it: Whether the caller will call ``finish_backward`` itself. Otherwise autograd does.
            replayed: Whether it is a replay of the whole model's graph.

        Raises:
            RuntimeError: such a replay leaves out a gradient that autograd has computed in the same pass.
        """
        if replayed and self._before is not None:
            autograd_pass, param = self._before
            self._before = None
            if autograd_pass == torch._C._current_graph_task_id():
                self.drop()
                raise self._left_out(param)
        if self.phase is Phase.CLOSED:
            self.phase, self._caller_ends_it = Phase.REPLAYED, caller_ends_it
            self._fsdp.grad_reduce_pipeline.replayed = {}
            if not caller_ends_it:
                torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)
        if not replayed and self.phase is Phase.REPLAYED:
            self.phase = Phase.EXPECTS_GRADIENTS
            self._expect_gradients()

    def note_beside_graphs(self, param: torch.nn.Parameter) -> None:
        """Note that autograd has computed the gradient of ``param``, where there are graphs of the whole model.

        Raises:
            RuntimeError: a replay, which reduces the gradients of its pass, has left it out.
        """
        if self.phase is Phase.REPLAYED:
            raise self._left_out(param)
        if self.phase is Phase.CLOSED:  # the replay may be still to come
            self._before = torch._C._current_graph_task_id(), param

    def _left_out(self, param: torch.nn.Parameter) -> RuntimeError:
        return RuntimeError(
            f"{self._fsdp.param_to_name[param]} gets a gradient beside CUDA graphs of the whole model, which reduce "
            "theirs by themselves: the loss uses it outside of the model's forward pass (a penalty, say). Set "
            "--cuda-graph-layers-per-graph all: embedding, final norm and output layer then run eagerly"
        )

    def _expect_gradients(self) -> None:
        if self._shards_params:
            self._set_training_states(TrainingState.PRE_BACKWARD)
            gathers = self._fsdp.all_gather_pipeline
            for bucket, group in enumerate(self._fsdp.param_and_grad_buffer.parameter_groups):
                if group.fsdp_unit_id is not None:
                    gathers.bucket_can_be_released[gathers.get_bucket_key(bucket, bwd=False)] = True
        self._gradients.expect(self.trainable)
        if self._registry.whole_model is not None:
            self._registry.whole_model.gather_first_unit("backward")  # as ranks do that replay this pass

    def begin(self, modules: Iterable[torch.nn.Module], runner: object) -> None:
        """Note that the backward pass of ``modules`` begins, with what their forward pass had.

        Raises:
            RuntimeError: the same backward pass of the model has one of another kind, too: their gradients would be
                summed in two places.
        """
        for module in modules:
            if self.runners.setdefault(module, runner) is not runner:
                raise RuntimeError(
                    f"{type(module).__name__}: one backward pass has a forward pass that CUDA graphs replayed and one "
                    "that ran eagerly (of another shape, say). Call backward() for each loss by itself"
                )

    def end_of_modules(self) -> None:
        """Forget what has begun: no module's backward pass goes on."""
        self.runners.clear()
        self.takers.clear()
        self.collected.clear()

    @shown_in_profiles
    def finish_backward(self) -> None:
        """Close it: handle the remaining parameters, and finish the reductions."""
        fsdp = self._fsdp
        self.end_of_modules()  # what was collected is still awaited
        if self.phase in (Phase.EXPECTS_GRADIENTS, Phase.IN_PARTS) and self._gradients.handle_rest(self.trainable):
            fsdp.grad_reduce_pipeline.reset()
        if fsdp.dist_index.use_hybrid_fsdp:
            self._gradients.reduce_between_instances()
        self.phase = Phase.CLOSED
        fsdp.__dict__["microbatch_count"] += 1  # bypasses Module.__setattr__, which is slow
        if fsdp.model_auto_sync:
            fsdp.finish_grad_sync()

    def close(self) -> None:
        """Close it though gradients may be awaited, which count as if they had never been."""
        self.phase = Phase.CLOSED
        self.end_of_modules()
        self._gradients.awaited.clear()
        self._set_training_states(TrainingState.IDLE)

    def drop(self) -> None:
        """Close one that did not come to its end, and drop its gradients."""
        self.close()
        self._gradients.drop()
        release_all(self._fsdp)

    def drop_unfinished(self) -> None:
        """Clean up after one that an exception ended, if it is still open: autograd does not close it then.

        Later passes would otherwise count as a part of it, and neither reduce all gradients nor release parameters.
        """
        if self.phase is Phase.CLOSED:
            return
        warnings.warn(
            "Megatron-FSDP: an exception ended the last backward pass. Gradients that were not reduced are dropped; "
            "those that were are in the main gradients, so call zero_grad_buffer() and optimizer.zero_grad() before "
            "the next step.",
            stacklevel=4,
        )
        self.drop()

    def forward_begins(self) -> None:
        """Drop an unfinished one before a forward pass of the whole model.

        Two kinds of forward passes are allowed within a backward pass: activation checkpointing of the whole model, and
        schedules that call ``finish_backward`` themselves.
        """
        if not self._caller_ends_it and torch._C._current_graph_task_id() == -1:
            self.drop_unfinished()

    def _set_training_states(self, state: Any) -> None:
        for module in self.module_names:
            module.__dict__["_training_state"] = state
