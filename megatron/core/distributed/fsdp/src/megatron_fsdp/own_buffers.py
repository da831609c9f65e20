"""Fixed buffers that belong to one model.

megatron-core's allocators keep their buffers in a dictionary of the process, by a name that is the same for all models:
a second model would gather its parameters to the buffers of the first, or replace them by larger ones.
"""

import weakref
from itertools import count
from typing import Any

from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer

_numbers = count()


class OwnBuffers:
    """Makes the buffers of one of megatron-core's allocators its own: named for it alone, freed when it goes.

    To be inherited before the allocator.
    """

    def __init__(self, name: str, *args: Any, **kwargs: Any):
        """Make the allocator.

        Args:
            name: What the buffers are for, the first part of their names.
            args, kwargs: The allocator's other arguments.
        """
        own = f"{name}_of_allocator_{next(_numbers)}"
        super().__init__(own, *args, **kwargs)  # type: ignore[call-arg]
        weakref.finalize(self, _free, f"{own}_").atexit = False


def _free(prefix: str) -> None:
    buffers = get_global_memory_buffer().buffer
    for key in list(buffers):  # another allocator may end meanwhile
        if key[0].startswith(prefix):
            buffers.pop(key, None)
