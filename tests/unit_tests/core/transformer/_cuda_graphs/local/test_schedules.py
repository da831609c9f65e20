"""Test that training with local graphs equals eager training under random pipeline schedules.

On the CPU backend, graph memory contains NaN before and after its use.
"""

import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.core.transformer.cuda_graphs import (
    CudaGraphManager,
    _CudagraphGlobalRecord,
    create_cudagraphs,
    delete_cuda_graphs,
)

from .local_graph_cases import HIDDEN, Layer, batch, config, groups, stack, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class Parts(torch.nn.Module):
    """A layer with two graphs and an eager part in between, like a mixture of experts.

    The first graph also returns its input and a tensor without grad. The second only adds, so its input gradients
    are its output gradient.
    """

    def __init__(self, graphs, pipeline):
        super().__init__()
        self.config = config(cuda_graph_warmup_steps=1)
        self.first, self.middle = (torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        if graphs:
            for name in ("begin", "end"):
                setattr(
                    self, f"manager_{name}", CudaGraphManager(self.config, self, name, pg_collection=groups(pipeline))
                )

    def begin(self, x):
        return x, torch.tanh(self.first(x)), (x > 0).float()

    def end(self, x, y, mask):
        return x + y * mask

    def forward(self, x, scale=None):
        x, y, mask = self.begin(x)
        return self.end(x, torch.sigmoid(self.middle(y)), mask), None


class Gap(torch.nn.Module):
    """An eager layer that saves its input for the backward pass."""

    def forward(self, x, scale=None):
        return x * x.sigmoid(), None


class Model(torch.nn.Module):
    def __init__(self, kinds, graphs, pipeline):
        super().__init__()
        torch.manual_seed(5)
        use_graphable_rng()
        self.before = torch.nn.Linear(HIDDEN, HIDDEN)
        make = {
            "layer": lambda number: Layer(number, graphs, pipeline, dropout=0.5, cuda_graph_warmup_steps=1),
            "parts": lambda number: Parts(graphs, pipeline),
            "gap": lambda number: Gap(),
        }
        self.layers = torch.nn.ModuleList(make[kind](number) for number, kind in enumerate(kinds, 1))

    def forward(self, x, scale):
        x = self.before(x)
        for layer in self.layers:
            x, _ = layer(x, scale=scale)
        return x.square().mean()


def train(kinds, orders, graphs, pipeline, shares_scale):
    """Train one step per schedule in ``orders``, and return all losses and gradients.

    If ``shares_scale``, all forward passes get the same scale tensor.
    """
    model = Model(kinds, graphs, pipeline).cuda()
    torch.cuda.manual_seed(9)
    trace = []
    scale = torch.full((1, HIDDEN), 2.0).cuda() if shares_scale else None
    for step, order in enumerate(orders):
        waiting = []
        for index, kind in enumerate(order):
            if kind == "F":
                waiting.append(model(batch(step, index), scale))
            else:
                loss = waiting.pop(0)
                loss.backward()
                trace.append(loss.item())
        create_cudagraphs()
        for param in model.parameters():
            trace.append(param.grad.tolist())
            param.grad = None
    delete_cuda_graphs()
    return trace


@st.composite
def schedules(draw):
    """Draw a schedule, a string of F (forward) and B (backward), with at most three micro-batches in flight."""
    count = draw(st.integers(1, 5))
    order, forward, backward = "", 0, 0
    while backward < count:
        may_go_on = forward < count and forward - backward < 3
        if may_go_on and (forward == backward or draw(st.booleans())):
            order, forward = order + "F", forward + 1
        else:
            order, backward = order + "B", backward + 1
    return order


KINDS = st.lists(st.sampled_from(["layer", "parts", "gap"]), min_size=1, max_size=4)


@settings(max_examples=15)
@given(kinds=KINDS, order=schedules(), shares_scale=st.booleans())
@example(kinds=["layer", "parts", "gap", "parts"], order="FFFBFBFBBB"[:10], shares_scale=True)
@example(kinds=["parts", "parts"], order="FFBFBFBFBB", shares_scale=False)
def test_pipeline_training_equals_eager(kinds, order, shares_scale):
    arguments = kinds, [order] * 3
    graphed = train(*arguments, graphs=True, pipeline=2, shares_scale=shares_scale)
    assert graphed == train(*arguments, graphs=False, pipeline=2, shares_scale=shares_scale)


@settings(max_examples=10)
@given(kinds=KINDS, microbatches=st.integers(1, 3), shares_scale=st.booleans())
def test_training_without_pipeline_equals_eager(kinds, microbatches, shares_scale):
    arguments = kinds, ["FB" * microbatches, "FB", "FB" * microbatches]
    graphed = train(*arguments, graphs=True, pipeline=1, shares_scale=shares_scale)
    assert graphed == train(*arguments, graphs=False, pipeline=1, shares_scale=shares_scale)


@settings(max_examples=10)
@given(recorded=schedules(), later=schedules())
def test_other_schedule_equals_eager_or_is_refused(recorded, later):
    arguments = ["layer", "gap", "parts"], [recorded, later, recorded]
    eager = train(*arguments, graphs=False, pipeline=2, shares_scale=True)
    try:
        graphed = train(*arguments, graphs=True, pipeline=2, shares_scale=True)
    except RuntimeError as error:
        if later == recorded or not re.search("--global-batch-size|a later replay has overwritten", str(error)):
            raise
        delete_cuda_graphs()
    else:
        assert graphed == eager


class TestPipeline:
    """Test pipelines, where each micro-batch in flight has its own runners."""

    def run(self, graphs, order, later=None):
        """Train one step with the schedule ``order`` and two with ``later``; return the trace."""
        return train(["layer"] * 3, [order, *[later or order] * 2], graphs, pipeline=2, shares_scale=False)

    def test_fewer_microbatches_equal_eager(self):
        assert self.run(True, "FFBFBFBB", later="FFBB") == self.run(False, "FFBFBFBB", later="FFBB")

    def test_more_microbatches_in_flight_are_refused(self):
        with pytest.raises(
            RuntimeError, match=r"(?s)--global-batch-size.*it is waiting for the backward pass of its last call"
        ):
            self.run(True, "FFBB", later="FFF")

    def test_overwriting_memory_in_use_is_refused(self):
        with pytest.raises(RuntimeError, match=r"layer 3 .* a later replay has overwritten the activations"):
            self.run(True, "FFBFBB", later="FFFBBB")

    def test_microbatches_reuse_static_memory(self):
        model, waiting = stack(pipeline=2), []
        for microbatch, kind in enumerate("FFBFBFBFBB"):
            if kind == "F":
                waiting.append(model(batch(0, microbatch)).square().mean())
            else:
                waiting.pop(0).backward()
        create_cudagraphs()
        first = model.layers[0].cudagraph_manager.cudagraph_runners
        assert len(first) == 5
        # inputs of two micro-batches in flight and, during the backward pass of one, its output gradient
        assert len(_CudagraphGlobalRecord.recording.buffers.pool.tensor_strong_refs) == 3
        assert len({runner.graphs.inputs[0].data_ptr() for runner in first}) == 3
