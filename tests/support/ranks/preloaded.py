"""Import the CPU backend and all modules that scripts import, before ranks are forked.

Never import this module elsewhere: the CPU backend stays installed.
"""

import argparse
import gc
import runpy
import sys
from typing import Any

# Import before megatron-core, whose layers look up the stand-in kernel at import time.
import tests.support.ranks.rank_backend  # noqa: F401

# isort: split

from megatron.training import argument_utils, arguments
from tests.support.pretraining.pretrain import SCRIPT
from tests.support.trainings import compare_runs, inject_faults  # noqa: F401

_read = argument_utils.ArgumentGroupFactory._get_field_docstrings
_docstrings: dict[type, dict[str, str]] = {}


def _read_once(factory: Any, config: type) -> dict[str, str]:
    if config not in _docstrings:
        _docstrings[config] = _read(factory, config)
    return dict(_docstrings[config])


# megatron-core parses help texts from its sources, which takes a third of the time of a short run.
argument_utils.ArgumentGroupFactory._get_field_docstrings = _read_once
arguments.add_megatron_arguments(argparse.ArgumentParser())
sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT))
gc.collect()
gc.freeze()  # exclude imported objects from garbage collection during captures and model building
