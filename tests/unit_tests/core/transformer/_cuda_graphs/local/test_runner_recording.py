"""_CudaGraphRunner: what it notes in the tensors of a recorded step."""

import pytest
import torch

from .local_graph_cases import batch, stack

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestMetadata:
    def test_of_inputs_of_a_pass_with_gradients_says_that_they_are_saved(self):
        model, x = stack(), batch(0).requires_grad_()
        hidden, _ = model.layers[0](x)
        model.layers[1](hidden)
        assert x.cg_buffer_metadata.is_saved_for_backward
        assert (hidden.cg_buffer_metadata.is_cudagraph_output, hidden.cg_buffer_metadata.is_saved_for_backward) == (
            True,
            True,
        )

    def test_of_inputs_of_a_pass_without_gradients_says_that_they_are_not(self):
        model, x = stack(count=1), batch(0)
        with torch.no_grad():
            model.layers[0](x)
        assert not x.cg_buffer_metadata.is_saved_for_backward
