"""Run a mix of replayed and eager forward passes, then their backward passes, on two ranks.

Run by test_kinds_of_passes.py. The argument lists kinds of graphs and patterns of passes as JSON.
"""

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.unit_tests.core.distributed.captured_training import CapturedTraining
from tests.unit_tests.core.distributed.kinds_of_passes import PASSES, SCOPES, gradients_of


def differences(case: Any, passes: Any) -> Any:
    """Return how many of this rank's gradients differ from eager, or the traceback of a failure."""
    try:
        eager, graphs = (gradients_of(CapturedTraining(case, on), passes) for on in (False, True))
    except Exception:
        return traceback.format_exc()[-1500:]
    return sum(not torch.equal(one, other) for one, other in zip(eager, graphs, strict=True))


def main() -> None:
    """Run the patterns given on the command line and print a JSON line for each."""
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    for scope, name in json.loads(sys.argv[1]):
        gc.collect()
        gc.freeze()  # exclude live objects from garbage collection during captures
        of_ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, differences(SCOPES[scope], PASSES[name]))
        if dist.get_rank() == 0:
            print(json.dumps({"scope": scope, "passes": name, "ranks": of_ranks}), flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
