"""What a fork server imports for the runs of ``pretrain.py``: the CPU backend and all that the script imports.

Never import it elsewhere: the CPU backend stays installed.
"""

import gc
import runpy
import sys

from megatron_fsdp_cuda_graphs import cpu_backend

from .pretrain import SCRIPT

cpu_backend.install()
sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT))
gc.collect()
gc.freeze()  # captures collect garbage, and building a model does: spare them what the imports left
