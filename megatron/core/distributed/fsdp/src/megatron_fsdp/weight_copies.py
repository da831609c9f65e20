"""The copy of the optimizer's weights to the model's after an optimizer step."""

from typing import Any

from .mixed_precision import is_float8tensor
from .planned_copies import Placement, PlannedCopies


class WeightCopies:
    """Copies the shards of all main weights to the shards of the model's weights that are gathered next."""

    def __init__(self, buffer: Any):
        """Plan the copies.

        Args:
            buffer: The ``ParamAndGradBuffer`` that holds both, with ``plannable`` parameters.
        """
        pairs, buffers = [], []
        for group in buffer.parameter_groups:
            main, model = group.main_weight_buffer, group.model_weight_buffer
            if main is None:
                continue
            buffers += [main, model]
            only_shard = main.is_data_distributed or model.is_data_distributed
            for item in map(main.param_idx.__getitem__, group.params):
                # .data: the copy must not count as a change of the parameters that are views of the buffer
                to = model.get_item(item, only_shard=only_shard).data
                pairs.append((to, main.get_item(item, only_shard=only_shard)))
        self._copies = PlannedCopies(pairs)
        self._placement = Placement(buffers)

    @staticmethod
    def plannable(buffer: Any) -> bool:
        """Whether weights are only copied, between buffers, and neither quantized nor written to parameters."""
        groups = [group for group in buffer.parameter_groups if group.main_weight_buffer is not None]
        return all(
            group.model_weight_buffer is not None
            and group.transpose_weight_buffer is None
            and not any(map(is_float8tensor, group.params))
            for group in groups
        )

    def unmoved(self) -> bool:
        """Whether all weights are where they were when the copies were planned."""
        return self._placement.unchanged()

    def run(self) -> None:
        """Copy all weights."""
        self._copies.run()
