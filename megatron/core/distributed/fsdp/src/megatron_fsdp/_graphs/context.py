"""What runners, captures and graphs of one ``MegatronFSDP`` share."""

from dataclasses import dataclass, field
from typing import Any

import torch

from .backward_pass import BackwardPass
from .gradients import Gradients
from .registry import Registry
from .unit import Unit
from .unit_plan import UnitPlans


@dataclass(frozen=True)
class Context:
    """The parts of one ``MegatronFSDP``.

    Attributes:
        fsdp: The wrapper, whose pipelines and buffers they drive.
        registry: Decides how a pass is run.
        plans: Makes plans, and owns recorded collectives.
        units: Its FSDP units by module, in the order of forward; filled while hooks are registered.
    """

    fsdp: Any
    registry: Registry
    gradients: Gradients
    backward: BackwardPass
    plans: UnitPlans
    units: dict[torch.nn.Module, Unit] = field(default_factory=dict)
