"""Run ``examples/pretrain_gpt.py``, routing all tokens of some ranks to the first rank's experts in some steps.

The JSON in OVERFLOWS maps steps, counted from 1, to the ranks that overflow. Each rank writes JSON lines to
NOTES_PATH.RANK: ``[step, overflowed]`` after each attempt at a step, and checksums of the routers' buffers at the end.
"""

import json
import os
import runpy
import sys
from unittest import mock

from megatron.core.token_bounds import TokenBounds
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import training
from tests.support.pretraining.pretrain import SCRIPT

MUCH = 10.0  # large compared with sigmoid scores
step = 0


def note(*values):
    with open(f"{os.environ['NOTES_PATH']}.{os.environ['RANK']}", "a") as file:
        file.write(json.dumps(values) + "\n")


def main():
    overflowing = {int(number): ranks for number, ranks in json.loads(os.environ["OVERFLOWS"]).items()}
    rank = int(os.environ["RANK"])
    routers: list[TopKRouter] = []
    train_step, exceeded = training.train_step, TokenBounds.exceeded

    def train_step_of_biased_routers(forward_step, data, model, *args, iteration, **kwargs):
        global step
        step = iteration + 1
        routers[:] = [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]
        biases = [router.expert_bias for router in routers if rank in overflowing.get(step, ())]
        for bias in biases:
            bias[: len(bias) // 2] += MUCH
        result = train_step(forward_step, data, model, *args, iteration=iteration, **kwargs)
        for bias in biases:
            bias[: len(bias) // 2] -= MUCH
        return result

    def noted(bounds):
        found = exceeded(bounds)
        note(step, found)
        return found

    sys.path.insert(0, str(SCRIPT.parent))
    with (
        mock.patch.object(training, "train_step", train_step_of_biased_routers),
        mock.patch.object(TokenBounds, "exceeded", noted),
    ):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    note([value.double().sum().item().hex() for router in routers for _, value in sorted(router.named_buffers())])


if __name__ == "__main__":
    main()
