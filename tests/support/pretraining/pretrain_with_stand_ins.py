"""Run ``examples/pretrain_gpt.py`` with stand-ins for TransformerEngine.

These are a capturable optimizer (with ``--optimizer-cuda-graph``) and fused weight-gradient kernels (unless
``--no-gradient-accumulation-fusion`` is set).
"""

import runpy
import sys
from contextlib import ExitStack

from tests.support.layers.capturable import capturable_on_this_device
from tests.support.layers.fused_gradients import fused_kernels
from tests.support.pretraining.pretrain import SCRIPT

if __name__ == "__main__":
    sys.path.insert(0, str(SCRIPT.parent))
    with ExitStack() as stack:
        if "--optimizer-cuda-graph" in sys.argv:
            stack.enter_context(capturable_on_this_device())
        if "--no-gradient-accumulation-fusion" not in sys.argv:
            stack.enter_context(fused_kernels())
        runpy.run_path(str(SCRIPT), run_name="__main__")
