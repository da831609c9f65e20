"""memory: weak references do not hold memory; a pool's memory is told from all other."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.engine.memory import (
    REUSE_OPTION,
    PoolMemory,
    allocator_settings,
    reuse_across_streams,
    storage_address,
    weak_reference,
)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0),
        torch.arange(12.0).view(3, 4)[1:, ::2],
        torch.arange(12.0, dtype=torch.bfloat16).view(3, 4).t(),
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.arange(12.0).view(3, 2, 2).view(torch.complex64).conj(),
        torch._neg_view(torch.arange(3.0)),
    ],
    ids=["whole", "part", "transposed bf16", "a number", "empty", "conjugate", "negative"],
)
def test_it_has_the_same_memory_shape_strides_and_dtype(tensor):
    weak = weak_reference(tensor)
    assert weak.data_ptr() == tensor.data_ptr()
    assert (weak.shape, weak.stride(), weak.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(weak, tensor)


def test_it_does_not_hold_the_memory():
    tensor = torch.zeros(4)
    storage = StorageWeakRef(tensor.untyped_storage())
    weak = weak_reference(tensor)
    del tensor
    gc.collect()
    assert storage.expired()
    assert weak.shape == (4,)


def test_it_takes_no_part_in_autograd():
    assert not weak_reference(torch.ones(2, requires_grad=True) * 2).requires_grad


# ----------------------------------------------------------------------------------------------- memory of a pool


def captured(pool, make):
    """A graph of ``pool`` that records ``make``, and what that returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        made = make()
    return graph, made


@pytest.fixture
def snapshots(cpu_backend, monkeypatch) -> list[int]:
    """The number of segments of each ``torch.cuda.memory_snapshot``."""
    sizes: list[int] = []
    take = torch.cuda.memory_snapshot

    def counting(mempool_id=None, include_traces=True):
        segments = take(mempool_id, include_traces)
        sizes.append(len(segments))
        return segments

    monkeypatch.setattr(torch.cuda, "memory_snapshot", counting)
    return sizes


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, placeholder):
        ctx.save_for_backward(weight)
        ctx.placeholder = placeholder
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], ctx.placeholder, None


class Placeholder(torch.nn.Module):
    """Returns a tensor, and a gradient of its weight, that no graph allocates; fused weight gradients are like that."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6, device="cuda"))
        self.register_buffer("table", torch.ones(6, device="cuda"))
        self.placeholder = torch.ones(6, device="cuda")

    def forward(self, x):
        return _Product.apply(x, self.weight, self.placeholder), self.table


@pytest.mark.usefixtures("cpu_backend")
class TestPoolMemory:
    def test_owns_what_was_allocated_while_a_graph_recorded_and_nothing_else(self):
        before = torch.ones(3, device="cuda")
        graph, made = captured(torch.cuda.graph_pool_handle(), lambda: (before * 2, before.view(3, 1)))
        after = torch.ones(3, device="cuda")
        assert PoolMemory.of(graph).owned([before, *made, after]) == {storage_address(made[0])}

    def test_owns_what_a_later_capture_of_the_pool_allocates(self):
        pool, x = torch.cuda.graph_pool_handle(), torch.ones(3, device="cuda")
        first, one = captured(pool, lambda: x * 2)
        memory = PoolMemory.of(first)
        memory.owned([one])
        _second, other = captured(pool, lambda: x * 3)
        assert memory.owned([one, other]) == {storage_address(one), storage_address(other)}

    def test_does_not_own_memory_of_another_pool(self):
        x = torch.ones(3, device="cuda")
        graph, _one = captured(torch.cuda.graph_pool_handle(), lambda: x * 2)
        _graph, other = captured(torch.cuda.graph_pool_handle(), lambda: x * 2)
        assert PoolMemory.of(graph).owned([other]) == set()

    def test_asks_the_allocator_at_most_once_a_graph(self, snapshots):
        layers = tuple(Placeholder() for _ in range(16))
        samples = [(torch.ones(4, 6, device="cuda", requires_grad=True),) for _ in layers]
        make_graphed_callables(
            layers, samples, _order=[1, -1], _num_layers_per_chunk=[16], _reuse_graph_input_output_buffers=True
        )
        assert len(snapshots) <= 16  # memory is released after each backward graph

    @pytest.mark.parametrize(("number", "asks_for_it"), [(256, True), (257, False)])
    def test_asks_torch_for_no_pool_whose_number_it_would_free(self, monkeypatch, number, asks_for_it):
        asked = []

        def snapshot(mempool_id, include_traces):
            asked.append(mempool_id)
            return []

        monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
        PoolMemory((0, number)).size()
        assert asked == [(0, number) if asks_for_it else None]


# ------------------------------------------------------------------------------------ memory that several streams used


@pytest.fixture
def configure():
    """Configures the allocator, and gives it its defaults back at the end."""
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(f"{REUSE_OPTION}:False")
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("configured", ["", "max_split_size_mb:512,garbage_collection_threshold:0.5"])
def test_memory_of_several_streams_is_used_again_in_captures_only(configure, configured, error):
    configure(configured)
    before = allocator_settings()
    with pytest.raises(ZeroDivisionError) if error else nullcontext(), reuse_across_streams():
        assert allocator_settings() == before | {
            REUSE_OPTION: True,
            "PYTORCH_CUDA_ALLOC_CONF": ",".join(filter(None, [configured, f"{REUSE_OPTION}:True"])),
        }
        assert not error or 1 / 0
    assert allocator_settings() == before
    assert not before[REUSE_OPTION]


@pytest.mark.parametrize("wanted", [False, True])
def test_what_the_environment_says_of_it_holds(configure, wanted):
    configure(f"{REUSE_OPTION}:{wanted}")
    with reuse_across_streams():
        assert allocator_settings()[REUSE_OPTION] is wanted
    assert allocator_settings()[REUSE_OPTION] is wanted
