"""Turns: with several micro-batches in flight graphs are replayed in the order of their capture."""

import pytest

from megatron.core.transformer._cuda_graphs.local.turns import Turn, Turns
from megatron.core.transformer.cuda_graphs import (
    _CudagraphGlobalRecord,
    create_cudagraphs,
)

from .local_graph_cases import (
    batch,
    runners,
    stack,
)

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestTurns:
    """The order of passes by itself."""

    def recorded(self, *passes):
        """Turns of a step with ``passes``, each of a letter and "F" or "B", and the turn of each letter."""
        turns, of = Turns(), {}
        for name, kind in passes:
            if kind == "F":
                of[name] = turns.record_forward(name)
            else:
                turns.record_backward(of[name])
        turns.in_flight = 0
        return turns, of

    def test_are_those_of_the_passes_recorded(self):
        _, of = self.recorded("aF", "bF", "cF", "aB", "bB")
        assert [of[name].bit for name in "abc"] == [1, 2, 4]
        assert [of[name].busy_at_forward for name in "abc"] == [0, 1, 3]
        assert [of[name].busy_at_backward for name in "abc"] == [6, 4, -1]  # c has no backward pass

    def test_of_a_runner_that_was_not_recorded_come_at_any_time(self):
        turns, of = self.recorded("aF", "aB")
        turns.begin(of["a"])
        turns.check_forward(Turn())
        turns.check_backward(Turn())

    def test_are_kept_in_every_order_that_has_no_more_in_flight_than_was_recorded(self):
        turns, of = self.recorded("aF", "bF", "aB", "bB")
        turns.check_forward(of["a"])
        turns.begin(of["a"])
        turns.check_forward(of["b"])
        turns.begin(of["b"])
        turns.check_backward(of["a"])
        turns.end(of["a"])
        assert turns.in_flight == of["b"].bit
        turns.check_backward(of["b"])
        with pytest.raises(RuntimeError, match=r"^a would overwrite memory of b,"):
            turns.check_forward(of["a"])
        turns.begin(of["a"])
        with pytest.raises(RuntimeError, match=r"^b would overwrite memory of a,"):
            turns.check_backward(of["b"])
        turns.in_flight = 0
        turns.check_forward(of["a"])


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
        with pytest.raises(RuntimeError, match=r"layer 1 .* would overwrite memory of layer 1"):
            self.run(True, "FFBFBB", later="FFF")

    def test_refuses_a_backward_pass_that_would_overwrite_memory_in_use(self):
        model = stack(pipeline=2)
        for _ in range(2):
            model(batch(0)).square().mean().backward()  # the first micro-batch is over before the second begins
        create_cudagraphs()
        first = model(batch(1)).square().mean()
        other = model.layers[0].cudagraph_manager.cudagraph_runners[0]
        _CudagraphGlobalRecord.session.turns.begin(other.turn)
        with pytest.raises(RuntimeError, match=r"layer 3 .* would overwrite memory of layer 1"):
            first.backward()

    def test_static_memory_of_a_microbatch_serves_a_later_one(self):
        _, model = self.run(True, "FFBFBFBFBB")
        first = model.layers[0].cudagraph_manager.cudagraph_runners
        assert len(first) == 5
        # the inputs of two micro-batches in flight and, while one of them goes back, the gradient of its output
        assert len(_CudagraphGlobalRecord.session.buffers.pool.tensor_strong_refs) == 3
        assert len({runner.fwd_graph_input_surface[0].data_ptr() for runner in first}) == 3
