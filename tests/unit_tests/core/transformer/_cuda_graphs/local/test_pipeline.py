"""Local graphs of several micro-batches in flight: each has runners of its own."""

import pytest

from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord, create_cudagraphs

from .local_graph_cases import batch, runners, stack

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestPipeline:
    """Several micro-batches in flight: each has runners of its own."""

    def run(self, graphs, order, steps=3, dropout=0.5, later=None):
        model = stack(graphs=graphs, pipeline=2, dropout=dropout)
        trace = []
        for step in range(steps):
            waiting = []
            for microbatch, kind in enumerate(order if step == 0 or later is None else later):
                if kind == "F":
                    waiting.append(model(batch(step, microbatch)).square().mean())
                else:
                    loss = waiting.pop(0)
                    loss.backward()
                    trace.append(loss.item())
            create_cudagraphs()
            trace += [param.grad.tolist() for param in model.parameters()]
        return trace, model

    @pytest.mark.parametrize("order", ["FB", "FFBB", "FFBFBB", "FFFBFBFBBB"])
    def test_is_bit_for_bit_eager(self, order):
        graphed, model = self.run(True, order)
        assert graphed == self.run(False, order)[0]
        assert len(runners(model)) == 3 * order.count("F")

    def test_takes_fewer_microbatches_than_were_recorded(self):
        graphed, _ = self.run(True, "FFBFBFBB", later="FFBB")
        assert graphed == self.run(False, "FFBFBFBB", later="FFBB")[0]

    def test_refuses_more_microbatches_in_flight_than_were_recorded(self):
        with pytest.raises(RuntimeError, match=r"(?s)--global-batch-size.*it waits for its backward pass"):
            self.run(True, "FFBB", later="FFF")

    def test_refuses_a_forward_pass_that_would_overwrite_memory_in_use(self):
        with pytest.raises(RuntimeError, match=r"layer 3 .* a later replay has overwritten, that of layer 3"):
            self.run(True, "FFBFBB", later="FFFBBB")

    def test_static_memory_of_a_microbatch_serves_a_later_one(self):
        _, model = self.run(True, "FFBFBFBFBB")
        first = model.layers[0].cudagraph_manager.cudagraph_runners
        assert len(first) == 5
        # the inputs of two micro-batches in flight and, while one of them goes back, the gradient of its output
        assert len(_CudagraphGlobalRecord.recording.buffers.pool.tensor_strong_refs) == 3
        assert len({runner.graphs.inputs[0].data_ptr() for runner in first}) == 3
