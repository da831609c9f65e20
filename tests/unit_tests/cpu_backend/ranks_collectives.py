"""Two ranks: what is written for NCCL works on gloo. Run by test_distributed.py."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed import DeviceMesh, ReduceOp, _coalescing_manager, init_device_mesh


def contribution(size: int = 4) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32, device="cuda") + dist.get_rank()


def backends() -> None:
    assert dist.get_backend() == "gloo"
    assert dist.get_backend(dist.new_group([0, 1], backend="nccl")) == "gloo"
    with pytest.raises(ValueError, match="backend='mpi'"):
        dist.new_group([0, 1], backend="mpi")
    dist.barrier(device_ids=[0])


def premultiplied_sum() -> None:
    tensor, out = contribution(), torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(out, tensor, op=dist._make_nccl_premul_sum(0.5))
    assert out.tolist() == [[0.5, 1.5], [2.5, 3.5]][dist.get_rank()]
    assert torch.equal(tensor, contribution())  # the contribution is not scaled in place
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(2.0))
    assert tensor.tolist() == [2, 6, 10, 14]


def average() -> None:
    tensor, out = contribution(), torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(out, tensor, op=ReduceOp.AVG)
    assert out.tolist() == [[0.5, 1.5], [2.5, 3.5]][dist.get_rank()]
    dist.all_reduce(tensor, op=ReduceOp.AVG)
    assert tensor.tolist() == [0.5, 1.5, 2.5, 3.5]


def coalesced() -> None:
    for async_ops in (False, True):
        gathered = [torch.empty(8, device="cuda") for _ in range(2)]
        with _coalescing_manager(dist.group.WORLD, async_ops=async_ops) as manager:
            for out in gathered:
                dist.all_gather_into_tensor(out, contribution())
        if async_ops:
            manager.wait()
        assert all(out.tolist() == [0, 1, 2, 3, 1, 2, 3, 4] for out in gathered)
        for op, expected in ((ReduceOp.SUM, [[1, 3], [5, 7]]), (ReduceOp.AVG, [[0.5, 1.5], [2.5, 3.5]])):
            shards = [torch.empty(2, device="cuda") for _ in range(2)]
            with _coalescing_manager(dist.group.WORLD, async_ops=async_ops) as manager:
                for out in shards:
                    dist.reduce_scatter_tensor(out, contribution(), op=op)
            if async_ops:
                manager.wait()
            assert all(out.tolist() == expected[dist.get_rank()] for out in shards)


def low_precision() -> None:
    tensor = contribution().bfloat16()
    out = torch.empty(2, device="cuda", dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(out, tensor)
    assert out.tolist() == [[1, 3], [5, 7]][dist.get_rank()]


def meshes() -> None:
    for mesh in (
        init_device_mesh("cuda", (2,), mesh_dim_names=("dp",)),
        DeviceMesh("cuda", [0, 1]),
        DeviceMesh.from_group(dist.group.WORLD, "cuda"),
    ):
        shards = torch.distributed.tensor.distribute_tensor(torch.arange(4.0, device="cuda"), mesh)
        assert shards.full_tensor().tolist() == [0, 1, 2, 3]


def captured() -> None:
    x, gathered, shard = contribution(2), torch.zeros(4, device="cuda"), torch.zeros(2, device="cuda")

    def exchange() -> torch.Tensor:
        y = x * 2
        dist.all_gather_into_tensor(gathered, y)
        dist.all_reduce(gathered, async_op=True).wait()
        dist.reduce_scatter_tensor(shard, gathered)
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, shard)
        return swapped + 1

    x.add_(10)
    eager = exchange(), gathered.clone(), shard.clone()
    x.sub_(10)
    gathered.zero_()
    shard.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = exchange()
    assert torch.isnan(out).all()
    assert gathered.tolist() == [0, 0, 0, 0]
    assert shard.tolist() == [0, 0]
    x.add_(10)
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, (out, gathered, shard), eager))


def barrier_in_a_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        with pytest.raises(torch.AcceleratorError, match=r"c10d\.barrier"):
            dist.barrier()
        with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
            graph.capture_end()


CASES = [backends, premultiplied_sum, average, coalesced, low_precision, meshes, captured, barrier_in_a_capture]

if __name__ == "__main__":
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    for case in CASES:
        case()
        if dist.get_rank() == 0:
            print(f"passed: {case.__name__}", flush=True)
    dist.destroy_process_group()
