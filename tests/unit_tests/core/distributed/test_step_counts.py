"""Test the host costs of a training step with graphs: Megatron-FSDP's Python calls, and launches.

Counts start when gradients are zeroed and end after the last reduction. They exclude the optimizer. The bounds are
slightly above the measured counts.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.transformer._cuda_graphs import snapshot

from .captured_training import WARMED_UP, captured
from .fsdp_variants import small

MOE = {"experts": 4, "modules": ("attn", "moe_router", "moe_preprocess")}
GROUPED = {"experts": 4, "moe_use_grouped_tensor": True}
FSDP = "/core/distributed/fsdp/src/megatron_fsdp/"
NOT_LAUNCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "resize_"}


class Launches(TorchDispatchMode):
    """Counts operators that launch work on the device; a graph replay counts as one launch."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._replaying = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[-1]
        if not self._replaying and not func.is_view and name not in NOT_LAUNCHED:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def with_replays(self):
        replay = torch.cuda.CUDAGraph.replay

        def replayed(graph):
            self.counts["replay"] += 1
            self._replaying = True
            try:
                replay(graph)
            finally:
                self._replaying = False

        # Otherwise everything would run eagerly, because dispatch modes may change operators.
        unnoticed = mock.patch.dict(snapshot.CONTEXTS, {"TorchDispatchMode": lambda: 0})
        with mock.patch.object(torch.cuda.CUDAGraph, "replay", replayed), unnoticed, self:
            yield


@contextmanager
def hook_calls(counts):
    """Count calls of Python functions of Megatron-FSDP by name while in this context."""

    def note(frame, event, arg):
        if event == "call" and FSDP in frame.f_code.co_filename:
            counts[frame.f_code.co_name] += 1

    sys.setprofile(note)
    yield
    sys.setprofile(None)


@dataclass
class Counts:
    """Numbers of Megatron-FSDP's Python calls, of launches (including replays), and of replays in a step."""

    calls: float
    launches: float
    replays: float


def counts(layers, **case):
    """Count the Python calls of one step with graphs, and the launches and replays of the next."""
    with captured(small(layers=layers, warmup=WARMED_UP, **case)) as model:
        for _ in range(2):
            model.step()
        calls: Counter[str] = Counter()
        with hook_calls(calls):
            model.step()
        launches = Launches()
        with launches.with_replays():
            model.step()
    return Counts(calls.total(), launches.counts.total(), launches.counts["replay"])


@pytest.mark.parametrize(
    ("case", "of_two_layers", "of_a_layer"),
    [
        ({"holds": "model"}, Counts(112, 25, 3), Counts(5, 1, 0)),
        ({"holds": "layer"}, Counts(545, 86, 10), Counts(135, 10, 5)),
        (MOE, Counts(900, 224, 16), Counts(315, 80, 8)),
        # Each layer has a second bucket for experts, and the auxiliary loss has a scale.
        ({**GROUPED, "holds": "model"}, Counts(120, 27, 3), Counts(10, 2, 0)),
    ],
    ids=[
        *("dense, the whole model", "dense, a graph for each layer", "MoE in parts", "dropless MoE, the whole model"),
    ],
)
def test_calls_and_launches_of_a_step_stay_bounded(ranks, case, of_two_layers, of_a_layer):
    two, four = counts(2, **case), counts(4, **case)
    assert two.calls <= of_two_layers.calls
    assert two.launches <= of_two_layers.launches
    assert two.replays == of_two_layers.replays
    assert (four.calls - two.calls) / 2 <= of_a_layer.calls
    assert (four.launches - two.launches) / 2 <= of_a_layer.launches
    assert (four.replays - two.replays) / 2 == of_a_layer.replays
    assert two.replays < two.launches < two.calls  # the counters work
