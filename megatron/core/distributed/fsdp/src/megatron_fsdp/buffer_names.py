"""Fixed buffers that belong to one model.

megatron-core's allocators keep their buffers in a dictionary of the process, by a name that is the same for all models:
a second model would gather its parameters to the buffers of the first, or replace them by larger ones.
"""

import weakref
from itertools import count

from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer

_numbers = count()


def name_of_own_buffers(allocator: object, name: str) -> str:
    """Return a name for buffers of ``allocator`` alone, which are freed when it goes.

    Args:
        allocator: One of megatron-core's allocators with fixed buffers.
        name: What its buffers are for, the first part of the names that it would give them.
    """
    own = f"{name}_of_allocator_{next(_numbers)}"
    weakref.finalize(allocator, _free, f"{own}_").atexit = False
    return own


def _free(prefix: str) -> None:
    buffers = get_global_memory_buffer().buffer
    for key in list(buffers):  # another allocator may end meanwhile
        if key[0].startswith(prefix):
            buffers.pop(key, None)
