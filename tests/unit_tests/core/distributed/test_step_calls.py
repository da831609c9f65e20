"""Between the last backward pass of a step and the first forward pass of the next, no parameter costs Python calls."""

import sys

import pytest

from .fsdp_variants import Variant, small

GRAPH_MODE = {"megatron_fsdp_cuda_graph_mode": True}
CALLS_OF_A_BUCKET = 60  # its status is reset, its gradients are zeroed; a layer of 12 parameters has one


class Calls:
    """Counts calls of Python functions."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, arg):
        self.count += event == "call"


def between_passes(fsdp):
    """What a training step does then, but for the optimizer."""
    fsdp.finish_grad_sync()
    fsdp.param_and_grad_buffer.copy_main_weights_to_model_weights()
    fsdp.start_param_sync()
    fsdp.zero_grad_buffer()
    fsdp.zero_grad_buffer()


@pytest.fixture
def count(ranks):
    def count(layers, rounds_before):
        """The Python calls between two steps of a model with so many layers."""
        fsdp = Variant(small(layers=layers, dtype="bf16"), sharding=GRAPH_MODE).build().module
        for _ in range(rounds_before):
            between_passes(fsdp)
        with Calls() as calls:
            between_passes(fsdp)
        return calls.count

    return count


def calls_of_a_layer(count, rounds_before):
    return (count(6, rounds_before) - count(2, rounds_before)) / 4


def test_a_layer_costs_calls_for_its_bucket_only(count):
    assert calls_of_a_layer(count, rounds_before=2) <= CALLS_OF_A_BUCKET


def test_the_first_time_megatron_core_looks_at_each_parameter(count):
    """So the count above notices when it does again."""
    assert calls_of_a_layer(count, rounds_before=0) > 10 * CALLS_OF_A_BUCKET
