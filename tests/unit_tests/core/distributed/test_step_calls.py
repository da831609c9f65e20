"""The number of Python calls between backward and the next step does not depend on the number of parameters."""

import sys

import pytest

from .fsdp_variants import Variant, small

GRAPH_MODE = {"megatron_fsdp_cuda_graph_mode": True}
CALLS_OF_A_BUCKET = 60  # reset its status and zero its gradients; a layer of 12 parameters has one bucket


class Calls:
    """Counts Python function calls."""

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
    """Run the work between two steps, except the optimizer step."""
    fsdp.finish_grad_sync()
    fsdp.param_and_grad_buffer.copy_main_weights_to_model_weights()
    fsdp.start_param_sync()
    fsdp.zero_grad_buffer()
    fsdp.zero_grad_buffer()


@pytest.fixture
def count(ranks):
    def count(layers, rounds_before):
        """Count the Python calls between two steps for a model with ``layers`` layers."""
        fsdp = Variant(small(layers=layers, dtype="bf16"), sharding=GRAPH_MODE).build().module
        for _ in range(rounds_before):
            between_passes(fsdp)
        with Calls() as calls:
            between_passes(fsdp)
        return calls.count

    return count


def calls_of_a_layer(count, rounds_before):
    return (count(6, rounds_before) - count(2, rounds_before)) / 4


def test_python_calls_between_steps_do_not_grow_with_parameters(count):
    assert calls_of_a_layer(count, rounds_before=2) <= CALLS_OF_A_BUCKET


def test_first_step_costs_python_calls_per_parameter(count):
    """Negative control: the test above fails if each parameter adds calls."""
    assert calls_of_a_layer(count, rounds_before=0) > 10 * CALLS_OF_A_BUCKET
