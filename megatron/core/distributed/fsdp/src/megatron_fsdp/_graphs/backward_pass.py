"""Run the backward pass of a ``MegatronFSDP``: accumulate complete gradients in buckets, then reduce them."""

import warnings
from collections import defaultdict
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch

from ..param_and_grad_buffer import _check_nan_in_grad, to_local_if_dtensor
from ..unsharded_gradients import REDUCES_EVERY_BACKWARD
from .pipelines import TrainingState, drop_collectives, release_captured, set_training_state, shown_in_profiles


class Gradients:
    """Accumulates and reduces the gradients of one model.

    Attributes:
        awaited: Parameters whose gradients the current backward pass has not accumulated yet.
        reduced: Whether a backward pass outside of whole-model graphs has reduced gradients since the previous step;
            None if there was no such pass.
        final: Whether the latest backward pass was marked as the last of its step, and thus has reduced all gradients.
    """

    def __init__(self, graphs: Any):
        self._graphs, self._fsdp = graphs, graphs.fsdp
        self.awaited: set[torch.nn.Parameter] = set()
        self.reduced: bool | None = None
        self.final = False

    def reduce_across_replicas(self) -> None:
        """Reduce gradients across HSDP replicas at the end of a step, if graphs contain whole passes.

        This keeps the order of reductions equal on ranks that replayed the pass and ranks that ran it eagerly.
        """
        if self._graphs.whole_passes is not None and self._graphs.captured is None:
            self.final = self._is_final()
            if self.final:
                self._fsdp.grad_reduce_pipeline.reduce_all_across_replicas()

    def _is_final(self) -> bool:
        """Return whether this backward pass is marked as the last of its step."""
        return getattr(self._fsdp, "is_last_microbatch", False) or self._fsdp.model_auto_sync

    def expect(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Mark the gradients of ``params``, and no others, as not yet accumulated in this backward pass."""
        self.awaited = set(params)
        for param in self.awaited:
            param.grad_added_to_main_grad = False

    @torch.compiler.disable
    def handle(self, params: list[torch.nn.Parameter]) -> None:
        """Move the complete gradients of ``params`` to their buckets, and reduce the complete buckets.

        Gradients of shared parameters are skipped: they are complete only at the end of the backward pass.

        Raises:
            RuntimeError: A weight gradient is delayed, but has no hook to accumulate it.
        """
        params = [param for param in params if not getattr(param, "_is_shared", False)]
        for param in params:
            if getattr(param, "skip_backward_post_hook", False) and not hasattr(param, "post_wgrad_grad_acc_hook"):
                raise RuntimeError(
                    f"{self._fsdp.param_to_name[param]} has a delayed weight gradient but no post_wgrad_grad_acc_hook "
                    "to accumulate it: leave out --delay-wgrad-compute"
                )
        if params:
            self._accumulate_and_reduce(params)
            self.awaited.difference_update(params)

    def handle_rest(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Accumulate the awaited gradients of ``params``; return whether this backward pass also reduces them."""
        rest = sorted(self.awaited.intersection(params), key=self._fsdp.param_to_name.__getitem__)
        self.awaited.difference_update(rest)
        return self._accumulate_and_reduce(rest)

    def check_final(self) -> None:
        """Raise RuntimeError if gradients are unreduced because no backward pass was marked as the last of the step."""
        fsdp = self._fsdp
        waits = fsdp.dist_index.use_hybrid_fsdp or fsdp.data_parallel_sharding_strategy not in REDUCES_EVERY_BACKWARD
        if waits and fsdp.microbatch_count and not self.final:
            raise RuntimeError(
                "the gradients of this step are not reduced, because the pipeline schedule marked no backward pass as "
                "its last: set config.grad_sync_func to None, as --no-align-grad-reduce does"
            )

    def _accumulate_and_reduce(self, params: list[torch.nn.Parameter]) -> bool:
        """Accumulate gradients. If this backward pass reduces gradients, reduce them and return True."""
        fsdp = self._fsdp
        self.final = self._is_final()
        reduces = self.final or fsdp.data_parallel_sharding_strategy in REDUCES_EVERY_BACKWARD
        self.reduced = reduces or bool(self.reduced)
        self.accumulate(params)
        if reduces:
            across_replicas = fsdp.dist_index.use_hybrid_fsdp and self.final and self._graphs.whole_passes is None
            fsdp.grad_reduce_pipeline.reduce_gradients(
                params,
                suggested_queue_capacity=fsdp.suggested_RS_queue_capacity,
                outer_fsdp_group_grad_reduce=across_replicas,  # see ``reduce_across_replicas``
            )
        return reduces

    def accumulate(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Add each gradient to its main gradient, unless a fused kernel or a graph has already added it."""
        buffer = self._fsdp.param_and_grad_buffer
        copied_to, copied_from = [], []
        claimed: dict[int, Any] = {}
        for param in params:
            bucket = buffer.param_to_param_group[param]
            group = buffer.parameter_groups[bucket]
            if not group.requires_grad:
                continue
            sharded = (group.hfsdp_helper_gbuf or group.main_grad_buffer).is_data_distributed
            if not param.grad_added_to_main_grad and (sharded or param.grad is not None):
                if param.grad is not None and self._fsdp.report_nan_in_param_grad:
                    _check_nan_in_grad(to_local_if_dtensor(param.grad))
                main_grad = self._claim_main_grad(param, bucket, claimed)
                if param.grad is None:
                    main_grad.zero_()
                elif sharded:  # every backward pass uses a new bucket; the reduction adds to the shard
                    copied_to.append(main_grad)
                    copied_from.append(to_local_if_dtensor(param.grad))
                else:
                    main_grad.add_(to_local_if_dtensor(param.grad))
            if param.grad is not None:
                del param.grad
            param.grad_added_to_main_grad = False
        if copied_to:
            torch._foreach_copy_(copied_to, copied_from)

    def _claim_main_grad(self, param: torch.nn.Parameter, bucket: int, claimed: dict[int, Any]) -> torch.Tensor:
        """Set ``param.main_grad`` to a view of its bucket, and return it.

        Args:
            claimed: The buckets fetched so far, keyed by index; updated in place.
        """
        main_grads = param._gbuf
        if bucket in claimed:
            item = main_grads.get_item_from_bucket(claimed[bucket], param._item_id)
            param.main_grad = item.view(to_local_if_dtensor(param).shape)
        else:
            param.main_grad = param.get_main_grad()
            dtype = self._fsdp.mp_policy.grad_comm_dtype if main_grads.is_data_distributed else None
            claimed[bucket] = main_grads.fetch_bucket(dtype=dtype)
        return param.main_grad


class Phase(Enum):
    """Phase of the backward pass."""

    CLOSED = auto()
    REPLAYED = auto()  # whole-model graphs run it; hooks do nothing
    EXPECTS_GRADIENTS = auto()  # hooks handle the gradients that autograd computes
    IN_PARTS = auto()  # like EXPECTS_GRADIENTS, with separate autograd passes for embedding, layers and output layer


class BackwardPass:
    """Opens and closes the backward pass of one model, and cleans up after an exception.

    Attributes:
        module_names: The name of each module in the model; filled during hook registration.
        trainable: All parameters that require gradients, in order; filled during hook registration.
        runners: Maps each module whose backward pass has begun to its runner, or to the replayed ``RecordedPasses``.
        takers: Maps parameters to the runner that collects their gradients; other gradients accumulate immediately.
        collected: Maps each runner to the parameters whose gradients it has collected but not accumulated yet.
    """

    def __init__(self, graphs: Any):
        self._graphs, self._fsdp = graphs, graphs.fsdp
        self.module_names: dict[torch.nn.Module, str] = {}
        self.trainable: dict[torch.nn.Parameter, None] = {}
        self.phase = Phase.CLOSED
        self.runners: dict[torch.nn.Module, Any] = {}
        self.takers: dict[torch.nn.Parameter, Any] = {}
        self.collected: defaultdict[Any, list[torch.nn.Parameter]] = defaultdict(list)
        self._caller_ends_it = False
        self._before: tuple[int, torch.nn.Parameter] | None = None  # see ``note_beside_graphs``

    @property
    def is_open(self) -> bool:
        """Whether a backward pass is in progress."""
        return self.phase is not Phase.CLOSED

    @property
    def expects_gradients(self) -> bool:
        """Whether autograd computes gradients in the current backward pass."""
        return self.phase is Phase.EXPECTS_GRADIENTS

    def start(self, *, caller_ends_it: bool = False, replayed: bool = False) -> None:
        """Open the model's backward pass if it is closed.

        Without ``replayed``, await all gradients, and stop forward hooks from prefetching and releasing parameters.

        Args:
            caller_ends_it: Whether the caller calls ``finish_backward``. Otherwise autograd does.
            replayed: Whether a whole-model graph is about to be replayed.

        Raises:
            RuntimeError: The replay would omit a gradient that autograd has computed in the same pass.
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
        """Record that autograd computed a gradient of ``param`` outside of the whole-model graphs.

        Raises:
            RuntimeError: A replay in the same pass has reduced the gradients without this one.
        """
        if self.phase is Phase.REPLAYED:
            raise self._left_out(param)
        if self.phase is Phase.CLOSED:  # a replay may follow
            self._before = torch._C._current_graph_task_id(), param

    def _left_out(self, param: torch.nn.Parameter) -> RuntimeError:
        return RuntimeError(
            f"{self._fsdp.param_to_name[param]} gets a gradient that the CUDA graphs of the whole model do not "
            "reduce: the loss uses it outside of the model's forward pass (in a penalty, for example). Set "
            "--cuda-graph-layers-per-graph 1: embedding, final norm and output layer then run eagerly"
        )

    def _expect_gradients(self) -> None:
        if self._graphs.shards_params:
            set_training_state(self.module_names, TrainingState.PRE_BACKWARD)
            gathers = self._fsdp.all_gather_pipeline
            for bucket, group in enumerate(self._fsdp.param_and_grad_buffer.parameter_groups):
                if group.fsdp_unit_id is not None:
                    gathers.bucket_can_be_released[gathers.get_bucket_key(bucket, bwd=False)] = True
        self._graphs.gradients.expect(self.trainable)
        if self._graphs.whole_passes is not None:
            self._graphs.whole_passes.gather_first_unit("backward")  # as on ranks that replay this pass

    def begin(self, modules: Iterable[torch.nn.Module], runner: object) -> None:
        """Record that the backward pass of ``modules`` begins; ``runner`` ran their forward pass.

        Raises:
            RuntimeError: This backward pass mixes replayed and eager forward passes of a module, which would accumulate
                its gradients in two different buffers.
        """
        for module in modules:
            if self.runners.setdefault(module, runner) is not runner:
                raise RuntimeError(
                    f"{type(module).__name__}: this backward pass mixes replayed and eager forward passes "
                    "(for example, of different shapes): call backward() for each loss separately"
                )

    def clear_runners(self) -> None:
        """Clear ``runners``, ``takers`` and ``collected`` after the backward passes of all modules."""
        self.runners.clear()
        self.takers.clear()
        self.collected.clear()

    def finish_units(self) -> None:
        """Finish units for which autograd does not call ``after_backward``, because they or their inputs are frozen.

        Otherwise they would stay gathered, and their next forward pass would be treated as a recomputation.
        """
        for unit in reversed(self._graphs.units):  # in the order in which replays reduce
            if unit._training_state == TrainingState.PRE_BACKWARD:
                (self.runners.get(unit) or self._graphs.runner_of(unit)).after_backward()

    @shown_in_profiles
    def finish_backward(self) -> None:
        """Accumulate and reduce the remaining gradients, and close the backward pass."""
        fsdp, gradients = self._fsdp, self._graphs.gradients
        if self.phase is not Phase.REPLAYED:
            self.finish_units()
        self.clear_runners()  # collected gradients are still awaited
        if self.phase in (Phase.EXPECTS_GRADIENTS, Phase.IN_PARTS) and gradients.handle_rest(self.trainable):
            fsdp.grad_reduce_pipeline.reset()
        if fsdp.dist_index.use_hybrid_fsdp:
            gradients.reduce_across_replicas()
        self.phase = Phase.CLOSED
        fsdp.__dict__["microbatch_count"] += 1  # bypasses Module.__setattr__, which is slow
        if fsdp.model_auto_sync:
            fsdp.finish_grad_sync()

    def close(self) -> None:
        """Close the backward pass, and stop awaiting gradients."""
        self.phase = Phase.CLOSED
        self.clear_runners()
        self._graphs.gradients.awaited.clear()
        set_training_state(self.module_names, TrainingState.IDLE)

    def drop(self) -> None:
        """Close an unfinished backward pass, and discard its gradients."""
        self.close()
        drop_collectives(self._fsdp)
        release_captured(self._fsdp)

    def drop_unfinished(self) -> None:
        """Clean up after a backward pass that ended with an exception, because autograd does not close it.

        Later passes would otherwise count as part of it, leaving gradients unreduced and parameters gathered.
        """
        if self.phase is Phase.CLOSED:
            return
        warnings.warn(
            "Megatron-FSDP: an exception ended the last backward pass. Unreduced gradients are dropped, but "
            "reduced ones remain in the main gradients: call zero_grad_buffer() and optimizer.zero_grad() before the "
            "next step.",
            stacklevel=4,
        )
        self.drop()

    def forward_begins(self) -> None:
        """Drop an unfinished backward pass before a forward pass of the whole model.

        The backward pass is kept if autograd is running it (to recompute the whole model), or if the schedule calls
        ``finish_backward``.
        """
        if not self._caller_ends_it and torch._C._current_graph_task_id() == -1:
            self.drop_unfinished()
