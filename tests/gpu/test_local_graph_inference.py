"""Static inference with local graphs generates on a GPU what eager inference does there, logit for logit."""

from tests.integration_tests.test_local_graph_inference import (
    generated,
    test_each_layer_has_one_graph_for_each_batch_size,
    test_layers_read_the_output_of_the_one_before_where_that_puts_it,
    test_tokens_and_logits_are_those_of_eager_inference,
)

__all__ = [
    "generated",
    "test_each_layer_has_one_graph_for_each_batch_size",
    "test_layers_read_the_output_of_the_one_before_where_that_puts_it",
    "test_tokens_and_logits_are_those_of_eager_inference",
]
