"""memory: no static tensor serves two at a time, and none too many are made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.transformer._cuda_graphs.local import memory
from megatron.core.transformer._cuda_graphs.local.arguments import ArgMetadata, CudagraphBufferMetadata
from megatron.core.transformer._cuda_graphs.local.memory import (
    StaticBuffers,
    StaticInput,
    TensorReusePool,
    reset_counts,
)


def NEVER():
    return False


def ALWAYS():
    return True


def meta(shape=(2, 3), uses=1, **changes):
    described = ArgMetadata(torch.empty(shape, requires_grad=changes.pop("requires_grad", False)))
    described.cg_buffer_metadata = CudagraphBufferMetadata(is_cudagraph_input=True, input_use_count=uses, **changes)
    return described


class TestTensorReusePool:
    def test_lends_zeros_like_the_description(self):
        strided = torch.empty(3, 2, dtype=torch.bfloat16).t().requires_grad_()
        lent = TensorReusePool().get(ArgMetadata(strided))
        assert (lent.shape, lent.stride(), lent.dtype) == (strided.shape, strided.stride(), strided.dtype)
        assert lent.requires_grad
        assert not lent.any()

    def test_lends_again_what_was_given_back(self):
        pool = TensorReusePool()
        first = pool.get(meta())
        pool.insert(first)
        assert pool.get(meta()).data_ptr() == first.data_ptr()

    @pytest.mark.parametrize("other", [{"shape": (3, 2)}, {"shape": (2, 3, 1)}])
    def test_lends_only_what_is_alike(self, other):
        pool = TensorReusePool()
        first = pool.get(meta())
        pool.insert(first)
        assert pool.get(meta(**other)).data_ptr() != first.data_ptr()

    def test_lends_nothing_twice(self):
        pool = TensorReusePool()
        assert pool.get(meta()).data_ptr() != pool.get(meta()).data_ptr()

    def test_owns_what_it_has_made_and_nothing_else(self):
        pool = TensorReusePool()
        lent = pool.get(meta())
        assert pool.owns(lent)
        assert not pool.owns(torch.empty(2, 3))
        assert pool.tensor_strong_refs_dataptrs == {lent.data_ptr()}

    def test_keeps_what_it_has_made(self):
        pool = TensorReusePool()
        address = pool.get(meta()).data_ptr()
        assert [tensor.data_ptr() for tensor in pool.tensor_strong_refs] == [address]

    def test_refuses_what_it_did_not_lend(self):
        with pytest.raises(ValueError, match=r"shape \(2, 3\) is returned to a pool that did not lend it"):
            TensorReusePool().insert(torch.empty(2, 3))

    def test_refuses_what_was_given_back(self):
        pool = TensorReusePool()
        lent = pool.get(meta())
        pool.insert(lent)
        with pytest.raises(ValueError, match="given back twice"):
            pool.insert(lent)

    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from([(2, 3), (3, 2), (4,)]))))
    def test_makes_as_many_tensors_of_a_kind_as_are_lent_at_once(self, steps):
        pool = TensorReusePool()
        lent: list[torch.Tensor] = []
        most: dict[tuple, int] = {}
        for gives_back, which, shape in steps:
            if gives_back and lent:
                pool.insert(lent.pop(which % len(lent)))
            else:
                lent.append(pool.get(meta(shape)))
                addresses = [tensor.data_ptr() for tensor in lent]
                assert len(set(addresses)) == len(addresses)
                most[shape] = max(most.get(shape, 0), sum(tensor.shape == torch.Size(shape) for tensor in lent))
        assert len(pool.tensor_strong_refs) == sum(most.values())


class Simulation:
    """Graphs that read and write static tensors as ``_CudaGraphRunner`` has them do, and what each tensor holds."""

    def __init__(self):
        reset_counts()
        self.buffers = StaticBuffers()
        self.holds: dict[int, object] = {}
        self.owned: list[torch.Tensor] = []

    def forward(self, graph):
        for tensor, value in zip(self.buffers.inputs(graph.inputs), graph.input_values, strict=True):
            self.holds[tensor.data_ptr()] = value
            graph.static.append((tensor.data_ptr(), value))
        outputs = [torch.empty(2, 3) for _ in graph.outputs]
        self.owned += outputs
        self.buffers.lend_outputs(graph.outputs, outputs)
        for output, value in zip(outputs, graph.output_values, strict=True):
            self.holds[output.data_ptr()] = value
        graph.made = outputs

    def backward(self, graph):
        grads = self.buffers.grads_of_outputs(graph.outputs)
        for grad in grads:
            self.holds[grad.data_ptr()] = (graph, "gradient")
        for address, value in graph.static:
            assert self.holds[address] == value, "an input was overwritten before the backward pass"
        self.buffers.grads_of_outputs_read(graph.outputs, grads)
        made = [torch.empty(2, 3) for _ in graph.inputs]
        self.owned += made
        for index in self.buffers.lend_grads(graph.inputs, made):
            self.buffers.pool.release(made[index])
        self.buffers.inputs_read(graph.inputs)
        for output in graph.made:
            self.buffers.pool.release(output)


@st.composite
def pipelines(draw):
    """Chains of graphs for some micro-batches, and an order of passes with at most four in flight."""
    layers, count = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    gaps = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    order, forward, backward = [], 0, 0
    while backward < count:
        if forward < count and forward - backward < 4 and (forward == backward or draw(st.booleans())):
            order.append(("F", forward))
            forward += 1
        else:
            order.append(("B", backward))
            backward += 1
    return layers, gaps, order


@given(pipelines())
def test_no_static_tensor_is_overwritten_while_it_is_needed_and_no_more_are_made_than_that_takes(pipeline):
    layers, gaps, order = pipeline
    simulation = Simulation()
    chains: dict[int, list] = {}
    live = most = 0
    for kind, microbatch in order:
        if kind == "F":
            chain: list = []
            hidden: Any = None
            for layer in range(layers):
                linked = hidden is not None and not gaps[layer]
                if linked:
                    hidden.cg_buffer_metadata.is_cudagraph_input = True
                    hidden.cg_buffer_metadata.cudagraph_reuse_ref_count = 1
                    hidden.cg_buffer_metadata.input_use_count = 1
                taken = hidden if linked else meta(requires_grad=True)
                live += not linked
                hidden = meta(uses=0, is_cudagraph_output=True, requires_grad=True)
                value = (microbatch, layer)
                chain.append(
                    SimpleNamespace(
                        inputs=[taken],
                        input_values=[value],
                        outputs=[hidden],
                        output_values=[(microbatch, layer + 1)],
                        static=[],
                        linked=linked,
                    )
                )
            chains[microbatch] = chain
            for graph in chain:
                simulation.forward(graph)
            most = max(most, live)
        else:
            linked_after = False
            for graph in reversed(chains[microbatch]):
                most = max(most, live + (not linked_after))
                simulation.backward(graph)
                live -= not graph.linked
                linked_after = graph.linked
    assert len(simulation.buffers.pool.tensor_strong_refs) == most
    assert len(simulation.buffers.pool.pool) == most
    assert memory.fwd_buffer_reuse_ref_count == 0
    assert memory.bwd_buffer_reuse_ref_count == 0


class TestStaticBuffers:
    def test_a_tensor_that_several_graphs_take_has_one_place_until_the_last_has_read_it(self):
        buffers, shared = StaticBuffers(), meta(uses=2)
        (first,), (second,) = buffers.inputs([shared]), buffers.inputs([shared])
        assert first.data_ptr() == second.data_ptr()
        buffers.inputs_read([shared])
        assert not buffers.pool.pool
        buffers.inputs_read([shared])
        assert [tensor.data_ptr() for tensor in buffers.pool.pool] == [first.data_ptr()]

    def test_memory_that_a_graph_hands_on_is_not_given_back_before_that_is_let_go(self):
        buffers, given_in = StaticBuffers(), meta()
        (static,) = buffers.inputs([given_in])
        output = meta(is_cudagraph_output=True)
        buffers.lend_outputs([output], [static])
        buffers.inputs_read([given_in])
        assert not buffers.pool.pool
        buffers.pool.release(static)
        assert len(buffers.pool.pool) == 1

    def test_memory_that_was_given_back_cannot_be_held(self):
        buffers, given_in = StaticBuffers(), meta()
        (static,) = buffers.inputs([given_in])
        buffers.inputs_read([given_in])
        with pytest.raises(ValueError, match="used after it was given back"):
            buffers.pool.hold(static)

    def test_a_gradient_that_is_handed_on_is_not_given_back_before_it_was_read(self):
        buffers = StaticBuffers()
        output, following = meta(is_cudagraph_output=True), meta(is_cudagraph_output=True)
        (grad,) = buffers.grads_of_outputs([following])
        assert buffers.lend_grads([output], [grad]) == set()
        buffers.grads_of_outputs_read([following], [grad])
        assert not buffers.pool.pool
        (read,) = buffers.grads_of_outputs([output])
        assert read.data_ptr() == grad.data_ptr()
        buffers.grads_of_outputs_read([output], [read])
        assert len(buffers.pool.pool) == 1

    def test_an_input_requires_grad_as_the_recorded_one_did(self):
        buffers = StaticBuffers()
        wants, wants_not = buffers.inputs([meta(requires_grad=True), meta()])
        assert wants.requires_grad
        assert not wants_not.requires_grad


class TestStaticInput:
    def test_takes_the_value_of_a_tensor(self):
        static = StaticInput(torch.zeros(2), only_copied_to=True)
        assert static.put(torch.ones(2), in_use=NEVER)
        assert static.tensor.tolist() == [1, 1]

    def test_copies_nothing_that_is_there(self):
        static = StaticInput(torch.zeros(2), only_copied_to=True)
        value = torch.ones(2)
        static.put(value, in_use=NEVER)
        static.tensor.fill_(7)
        static.put(value, in_use=NEVER)
        assert static.tensor.tolist() == [7, 7]

    def test_copies_anew_what_was_changed(self):
        static = StaticInput(torch.zeros(2), only_copied_to=True)
        value = torch.ones(2)
        static.put(value, in_use=NEVER)
        value.add_(1)
        static.put(value, in_use=NEVER)
        assert static.tensor.tolist() == [2, 2]

    def test_copies_anew_where_a_graph_writes(self):
        static = StaticInput(torch.zeros(2), only_copied_to=False)
        value = torch.ones(2)
        static.put(value, in_use=NEVER)
        static.tensor.fill_(7)
        static.put(value, in_use=NEVER)
        assert static.tensor.tolist() == [1, 1]

    def test_copies_inference_tensors_always(self):
        static = StaticInput(torch.zeros(2), only_copied_to=True)
        with torch.inference_mode():
            value = torch.ones(2)
            static.put(value, in_use=NEVER)
            value.add_(1)
            static.put(value, in_use=NEVER)
        assert static.tensor.tolist() == [2, 2]

    def test_takes_no_other_value_while_one_is_in_use(self):
        static = StaticInput(torch.zeros(2), only_copied_to=True)
        value = torch.ones(2)
        static.put(value, in_use=NEVER)
        assert static.put(value, in_use=ALWAYS)
        assert static.put(static.tensor, in_use=ALWAYS)
        assert not static.put(torch.ones(2), in_use=ALWAYS)

    def test_takes_another_view_of_its_own_memory(self):
        static = StaticInput(torch.arange(4.0).view(2, 2), only_copied_to=True)
        static.put(static.tensor.t(), in_use=NEVER)
        assert static.tensor.tolist() == [[0, 2], [1, 3]]

    @pytest.mark.parametrize("view", [torch._neg_view, torch.conj])
    def test_takes_a_view_of_its_own_memory_with_other_values(self, view):
        static = StaticInput(torch.tensor([1 + 2j, 3 - 1j]), only_copied_to=True)
        expected = view(static.tensor).tolist()
        assert static.put(view(static.tensor), in_use=NEVER)
        assert static.tensor.tolist() == expected
