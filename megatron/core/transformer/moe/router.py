"""A router that rejects incompatible flags of grouped experts, and registers with ``token_bounds``."""

from typing import Any

from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.token_bounds import token_bounds
from megatron.core.transformer._cuda_graphs.flags.options import Options, alltoall_capacity_factor, grouped_tensor
from megatron.core.transformer._cuda_graphs.flags.table import EXPERT_ROWS, check
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class TopKRouter(_upstream.TopKRouter):
    """Extends megatron-core's ``TopKRouter`` for ``--moe-alltoall-capacity-factor``.

    ``token_bounds`` limits the router's tokens only if ``RerunStateMachine`` can rerun a step that exceeds the limit.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if grouped_tensor(self.config) or alltoall_capacity_factor(self.config) is not None:
            check(Options(self.config), EXPERT_ROWS)  # sharding is unknown here
        validates = get_rerun_state_machine().get_mode() == RerunMode.VALIDATE_RESULTS
        if validates and alltoall_capacity_factor(self.config) is not None:
            token_bounds.add(self)
