"""Run ``examples/pretrain_gpt.py`` with stand-ins for TensorBoard's writer and W&B.

The stand-ins append JSON lines with writer, name, value and iteration to the file SCALARS_PATH.
"""

import json
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

from megatron.training import cuda_graph_scalars
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


def log(scalars, step):
    for name, value in scalars.items():
        note("wandb", name, value, step)


def install():
    """Install the stand-ins as modules."""
    tensorboard, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    vars(tensorboard).update(SummaryWriter=SummaryWriter)
    vars(wandb).update(init=mock.Mock(), finish=mock.Mock(), log=log, config=mock.Mock())
    for module in (tensorboard, wandb):
        module.__spec__ = ModuleSpec(module.__name__, None)  # read by Megatron's checks for installed packages
        sys.modules[module.__name__] = module


def main():
    install()
    cuda_graph_scalars.PAUSE = 0  # steps are short here
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
