"""Test that static inference with local graphs is bit-identical to eager on a GPU."""

from tests.integration_tests.test_local_graph_inference import (
    generated,
    test_each_layer_has_one_graph_for_each_batch_size,
    test_layers_read_outputs_of_the_previous_layer_in_place,
    test_tokens_and_logits_are_bit_identical_to_eager,
)

__all__ = [
    "generated",
    "test_each_layer_has_one_graph_for_each_batch_size",
    "test_layers_read_outputs_of_the_previous_layer_in_place",
    "test_tokens_and_logits_are_bit_identical_to_eager",
]
