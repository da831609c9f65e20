"""Run ``examples/pretrain_gpt.py`` with a stand-in for TensorBoard's writer.

The stand-in appends JSON lines with writer, name, value and iteration to the file SCALARS_PATH.
"""

import json
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

from tests.support.pretraining.pretrain import SCRIPT


def note(writer, name, value, step):
    with open(os.environ["SCALARS_PATH"], "a") as file:
        file.write(json.dumps([writer, name, float(value), step]) + "\n")


class SummaryWriter:
    """TensorBoard writer with the methods that Megatron calls."""

    def __init__(self, log_dir, max_queue):
        self.flush = self.add_text = mock.Mock()

    def add_scalar(self, name, value, step):
        note("tensorboard", name, value, step)


def install():
    """Install the stand-in as a module."""
    tensorboard = ModuleType("torch.utils.tensorboard")
    vars(tensorboard).update(SummaryWriter=SummaryWriter)
    tensorboard.__spec__ = ModuleSpec(tensorboard.__name__, None)  # read by Megatron's checks for installed packages
    sys.modules[tensorboard.__name__] = tensorboard


def main():
    install()
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
