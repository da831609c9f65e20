"""What is imported before ranks are forked: the CPU backend and all that the scripts import.

Never import it elsewhere: the CPU backend stays installed.
"""

import gc
import runpy
import sys

from . import compare_runs, inject_faults  # noqa: F401  # these install the CPU backend
from .pretrain import SCRIPT

sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT))
gc.collect()
gc.freeze()  # captures collect garbage, and building a model does: spare them what the imports left
