"""What Megatron-FSDP does around the graphs of a unit in each pass, decided once after capture.

Without a plan every pass collects the unit's buckets from its parameters, looks for buckets to prefetch, and moves and
counts gradients one by one.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.graph import Capture
from megatron.core.transformer._cuda_graphs.launches import launches_of

from .recorded_collectives import TO_GATHER, RecordedGather, RecordedReduction
from .unit import Direction, Unit

Group = tuple[int, ...]


class GroupGather:
    """The all-gather of one group of buckets in one direction.

    Args:
        gathers: The pipeline of all-gathers.
        group: The indices of the buckets.
        recordings: The recorded all-gathers there are, by group; none for buckets without fixed addresses.

    Attributes:
        keys: Those of the buckets in the pipeline, for this direction.
    """

    def __init__(self, gathers: Any, group: Group, backward: bool, recordings: Mapping[Group, RecordedGather]):
        params = [param for bucket in group for param in gathers.buffer.parameter_groups[bucket].params]
        self.group, self.recordings = group, recordings
        self.keys = [gathers.get_bucket_key(bucket, backward) for bucket in group]
        self._status = gathers.bucket_status
        self._eagerly = partial(gathers.all_gather_params, params, bwd=backward)

    def launch(self) -> None:
        """Start the all-gather of those buckets that are not gathered yet."""
        if all(self._status[key] not in TO_GATHER for key in self.keys):
            return
        recorded = self.recordings.get(self.group)
        if recorded is None or not recorded.launch():
            self._eagerly()


@dataclass
class UnitPlan:
    """The steps around the graphs of one unit.

    Attributes:
        gathers: For each direction what to gather: the unit's groups of buckets, then those to prefetch.
        claimed: The reductions of buckets that the backward graph writes to.
        reduced: Those of them whose every gradient the backward graph writes.
        left: The parameters whose gradients it writes and whose bucket is in none of ``reduced``.
    """

    fsdp: Any
    unit: Unit
    gathers: dict[Direction, list[GroupGather]]
    claimed: Sequence[RecordedReduction] = ()
    reduced: Sequence[RecordedReduction] = ()
    left: list[torch.nn.Parameter] = field(default_factory=list)

    def gather(self, direction: Direction) -> None:
        """Gather the unit's parameters, wait for them, and prefetch those of the units after it."""
        gathers, backward = self.fsdp.all_gather_pipeline, direction == "backward"
        if self.fsdp.dist_index.hsdp_outer_dp_shard:
            gathers.gather_between_instances()
        for bucket in self.unit.buckets:
            gathers.bucket_can_be_released[gathers.get_bucket_key(bucket, backward)] = False
        for group in self.gathers[direction]:
            group.launch()
        for bucket in self.unit.buckets:
            gathers.wait_bucket_ready(bucket, backward)

    def claim(self) -> None:
        """Get hold of the buckets that the backward graph writes to.

        Raises:
            MovedBufferError: a bucket cannot go where it was at capture.
        """
        for reduction in self.claimed:
            reduction.claim()

    def reduce(self, between_instances: bool = False) -> None:
        """Reduce the buckets that the backward graph has filled, also ``between_instances`` of hybrid sharding."""
        reductions = self.fsdp.grad_reduce_pipeline
        for reduction in self.reduced:
            reductions.wait_for_previous_grad_reduce(suggested_queue_capacity=self.fsdp.suggested_RS_queue_capacity)
            reduction.launch()
            if between_instances:
                reductions.reduce_between_instances(reduction.buckets)


class UnitPlans:
    """Makes the plans of one ``MegatronFSDP``, and owns the recorded collectives."""

    def __init__(self, fsdp: Any):
        self._fsdp = fsdp
        self._gathers: dict[Group, RecordedGather] = {}
        self._reduced_once: set[Any] = set()  # process groups

    def fits(self, unit: Unit) -> bool:
        """Whether ``unit`` can have a plan: what it gathers is not transposed before it is used."""
        return self.records(unit) and not unit.float8_params

    def records(self, unit: Unit) -> bool:
        """Whether collectives of ``unit`` can be recorded: its buffers must be sharded, and in place.

        NCCL must allow collectives in graphs beside others, as it does by default.
        """
        fsdp = self._fsdp
        if os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == "0":
            return False
        if fsdp.data_parallel_sharding_strategy != "optim_grads_params":
            return False
        if not fsdp.ddp_config.fsdp_double_buffer or fsdp.report_nan_in_param_grad:
            return False
        groups = [fsdp.param_and_grad_buffer.parameter_groups[bucket] for bucket in unit.buckets]
        return all(group.fsdp_unit_id is not None and group.transpose_weight_buffer is None for group in groups)

    def make(
        self, units: Mapping[torch.nn.Module, tuple[Unit, frozenset[torch.nn.Parameter]]]
    ) -> dict[torch.nn.Module, UnitPlan]:
        """Record the collectives of ``units`` and return their plans. No bucket is in use, before and after.

        Args:
            units: For each module its unit, and the parameters whose gradients its backward graph writes.
        """
        capture = Capture(None, draws=False)
        try:
            for unit, _ in units.values():
                self._record(capture, unit)
        except BaseException:
            for unit, _ in units.values():
                self.forget(unit.buckets)
            raise
        return {module: self._plan(unit, written) for module, (unit, written) in units.items()}

    def to_gather(self, units: Mapping[torch.nn.Module, Unit]) -> dict[torch.nn.Module, UnitPlan]:
        """Return plans for consecutive ``units`` that gather, with nothing recorded, and prefetch no other unit."""
        buckets = {bucket for unit in units.values() for bucket in unit.buckets}
        return {
            module: UnitPlan(self._fsdp, unit, self._gathers_of_unit(unit, buckets)) for module, unit in units.items()
        }

    def _with_grads(self, group: Group) -> list[int]:
        return [bucket for bucket in group if bucket in self._fsdp.grad_reduce_pipeline.bucket_status]

    def _reduction(self, group: Group) -> RecordedReduction | None:
        """The recorded reduction of ``group``."""
        recorded = self._fsdp.grad_reduce_pipeline.recorded
        return next((recorded[bucket] for bucket in self._with_grads(group) if bucket in recorded), None)

    def gathers_of(self, buckets: Iterable[int], recorded: bool) -> list[GroupGather]:
        """Return the all-gathers of ``buckets`` that belong to no unit, recorded if so asked.

        No bucket is in use, before and after.
        """
        groups = self._groups(buckets)
        if recorded:
            capture = Capture(None, draws=False)
            for group in groups:
                self._gathers[group] = RecordedGather(capture, self._fsdp.all_gather_pipeline, group)
        return [self._gather(group, False) for group in groups]

    def recorded_collectives(self) -> int:
        """Return the number of recorded all-gathers and reductions."""
        return len(self._gathers) + len(self._fsdp.grad_reduce_pipeline.recorded)

    def set_up_communicators(self, units: Iterable[Unit]) -> None:
        """Reduce once in each process group that reduces gradients of ``units``: captures cannot set up communicators.

        What is in the buckets is reduced; the caller zeroes gradients later. Each has its place already, which it keeps
        (``take_places``).
        """
        reductions = self._fsdp.grad_reduce_pipeline
        for group in (group for unit in units for group in self._groups(unit.buckets)):
            with_grads = self._with_grads(group)
            if with_grads:
                process_group = reductions.get_fsdp_buffer(with_grads[0]).data_parallel_group
                if process_group not in self._reduced_once:
                    launched = launches_of(process_group)
                    try:
                        reductions._bucket_group_gradient_reduce(with_grads)
                    finally:
                        if launched():
                            self._reduced_once.add(process_group)

    def forget(self, buckets: Iterable[int]) -> None:
        """Free the collectives recorded for ``buckets``."""
        for group in self._groups(buckets):
            gather, reduction = self._gathers.pop(group, None), self._reduction(group)
            if gather is not None:
                gather.work.reset()
            if reduction is not None:
                reduction.work.reset()
                del self._fsdp.grad_reduce_pipeline.recorded[reduction.buckets[0]]

    def _groups(self, buckets: Iterable[int]) -> list[Group]:
        """The groups of buckets that are gathered or reduced together."""
        groups = self._fsdp.param_and_grad_buffer.bucket_to_bucket_group
        return sorted({tuple(sorted(groups[bucket])) for bucket in buckets})

    def _record(self, capture: Capture, unit: Unit) -> None:
        reductions = self._fsdp.grad_reduce_pipeline
        for group in self._groups(unit.buckets):
            if group in self._gathers:
                continue
            self._gathers[group] = RecordedGather(capture, self._fsdp.all_gather_pipeline, group)
            with_grads = self._with_grads(group)
            if with_grads:
                reductions.recorded[with_grads[0]] = RecordedReduction(capture, reductions, with_grads)

    def _plan(self, unit: Unit, written: frozenset[torch.nn.Parameter]) -> UnitPlan:
        parameter_groups = self._fsdp.param_and_grad_buffer.parameter_groups
        claimed: list[RecordedReduction] = []
        reduced: list[RecordedReduction] = []
        left: list[torch.nn.Parameter] = []
        for reduction in filter(None, map(self._reduction, self._groups(unit.buckets))):
            params = [param for bucket in reduction.buckets for param in parameter_groups[bucket].params]
            filled = [param for param in params if param in written]
            if filled:
                claimed.append(reduction)
            if len(filled) == len(params):
                reduced.append(reduction)
            else:
                left.extend(filled)
        return UnitPlan(self._fsdp, unit, self._gathers_of_unit(unit), claimed, reduced, left)

    def _gathers_of_unit(self, unit: Unit, among: set[int] | None = None) -> dict[Direction, list[GroupGather]]:
        """The all-gathers of ``unit``, then those to prefetch, of the buckets ``among`` only if given."""

        def gathers(step: int) -> list[GroupGather]:
            ahead = [group for group in self._prefetched(unit, step) if among is None or among.issuperset(group)]
            return [self._gather(group, step < 0) for group in self._groups(unit.buckets) + ahead]

        return {"forward": gathers(+1), "backward": gathers(-1)}

    def _gather(self, group: Group, backward: bool) -> GroupGather:
        return GroupGather(self._fsdp.all_gather_pipeline, group, backward, self._gathers)

    def _prefetched(self, unit: Unit, step: int) -> list[Group]:
        """The groups that megatron-core prefetches with ``unit`` in forward (1) or in backward (-1), as it orders them.

        It goes through the buckets until those ahead reach a size, or a third unit would need a double buffer, and
        gathers what it has found by rising bucket.
        """
        buffer = self._fsdp.param_and_grad_buffer
        ahead: list[Group] = []
        seen = set(unit.buckets)
        units = {buffer.parameter_groups[bucket].fsdp_unit_id for bucket in unit.buckets}
        size = 0
        bucket = max(seen) + 1 if step > 0 else min(seen) - 1
        while 0 <= bucket < len(buffer.parameter_groups) and size < self._fsdp.suggested_AG_prefetch_size:
            if bucket not in seen:
                units.add(buffer.parameter_groups[bucket].fsdp_unit_id)
                if len(units) > 2:
                    break
                group = tuple(sorted(buffer.bucket_to_bucket_group[bucket]))
                seen.update(group)
                ahead.append(group)
                size += sum(buffer.parameter_groups[i].model_weight_buffer.bucket_index.size for i in group)
            bucket += step
        return sorted(ahead)
