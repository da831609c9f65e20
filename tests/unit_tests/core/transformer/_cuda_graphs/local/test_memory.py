"""memory: no static tensor serves two borrowers at a time, and the pool of the graphs outlives them."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.transformer._cuda_graphs.local.memory import StaticInput
from megatron.core.transformer.cuda_graphs import (
    ArgMetadata,
    CudaGraphManager,
    TensorReusePool,
    _CudagraphGlobalRecord,
    delete_cuda_graphs,
)
from megatron_fsdp_cuda_graphs.cpu_backend.memory import pool_of

from .local_graph_cases import Layer, batch, config, groups, use_graphable_rng


def NEVER():
    return False


def ALWAYS():
    return True


def meta(shape=(2, 3)):
    return ArgMetadata(torch.empty(shape))


class TestTensorReusePool:
    def test_lends_zeros_like_the_description(self):
        strided = torch.empty(3, 2, dtype=torch.bfloat16).t().requires_grad_()
        lent = TensorReusePool().get(ArgMetadata(strided))
        assert (lent.shape, lent.stride(), lent.dtype) == (strided.shape, strided.stride(), strided.dtype)
        assert lent.requires_grad
        assert not lent.any()

    @pytest.mark.parametrize("other", [{"shape": (3, 2)}, {"shape": (2, 3, 1)}])
    def test_lends_only_what_is_alike(self, other):
        pool = TensorReusePool()
        first = pool.get(meta())
        pool.insert(first)
        assert pool.get(meta(**other)).data_ptr() != first.data_ptr()

    def test_owns_what_it_has_made_and_nothing_else(self):
        pool = TensorReusePool()
        lent = pool.get(meta())
        assert pool.owns(lent)
        assert not pool.owns(torch.empty(2, 3))
        assert pool.tensor_strong_refs_dataptrs == {lent.data_ptr()}

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


class TestStaticInput:
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


def captured_and_gone() -> tuple:
    """Capture a graph and let it go with its module; return the pool."""
    use_graphable_rng()
    layer = Layer(1, graphs=False).cuda()
    manager = CudaGraphManager(config(), layer, "forward", False, groups(), inline_capture=True)
    with torch.no_grad():
        layer(batch(0))
    pool = CudaGraphManager.global_mempool
    assert pool is not None
    _CudagraphGlobalRecord.cudagraph_inference_record = []
    _CudagraphGlobalRecord.cudagraph_created = False
    del layer, manager
    gc.collect()
    return pool


@pytest.mark.usefixtures("cpu_backend", "no_graphs")
def test_a_pool_whose_graphs_are_gone_is_captured_into_again():
    pool = captured_and_gone()
    layer = Layer(1, graphs=False).cuda()
    CudaGraphManager(config(), layer, "forward", False, groups(), inline_capture=True)
    with torch.no_grad():
        replayed, eager = layer(batch(1)), layer(batch(1), eager=True)
    assert torch.equal(replayed[0], eager[0])
    assert CudaGraphManager.global_mempool == pool


@pytest.mark.usefixtures("cpu_backend", "no_graphs")
def test_deleting_graphs_lets_the_pool_go():
    pool = captured_and_gone()
    delete_cuda_graphs()
    assert CudaGraphManager.global_mempool is None
    with pytest.raises(RuntimeError, match="use_count"):
        pool_of(pool)
