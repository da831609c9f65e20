"""Runs ``examples/pretrain_gpt.py`` with an optimizer whose step can be in a graph, without TransformerEngine too."""

import runpy
import sys

from tests.support.capturable import capturable_on_this_device
from tests.support.pretrain import SCRIPT

if __name__ == "__main__":
    sys.path.insert(0, str(SCRIPT.parent))
    with capturable_on_this_device():
        runpy.run_path(str(SCRIPT), run_name="__main__")
