"""Run ``examples/pretrain_gpt.py`` with stand-ins for fused weight-gradient kernels.

With ``--no-gradient-accumulation-fusion``, run it without stand-ins.
"""

import runpy
import sys
from contextlib import ExitStack

from tests.support.layers.fused_gradients import fused_kernels
from tests.support.pretraining.pretrain import SCRIPT

if __name__ == "__main__":
    sys.path.insert(0, str(SCRIPT.parent))
    with ExitStack() as stack:
        if "--no-gradient-accumulation-fusion" not in sys.argv:
            stack.enter_context(fused_kernels())
        runpy.run_path(str(SCRIPT), run_name="__main__")
