"""Where in a training step a module under Megatron-FSDP is."""

from enum import Enum, auto


class TrainingState(Enum):
    """The state of a module, in its ``_training_state``."""

    FORWARD = auto()
    PRE_BACKWARD = auto()  # its parameters are gathered for backward, or its forward pass runs again
    POST_BACKWARD = auto()
    IDLE = auto()
