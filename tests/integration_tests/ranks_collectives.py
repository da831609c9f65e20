"""Run collectives on two ranks of the CPU backend, for test_cpu_ranks.py."""

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


def results_are_held_until_wait() -> None:
    reduced, count, gathered, shard = contribution(), torch.ones(1, dtype=torch.int64, device="cuda"), *empties()
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.all_reduce(count, async_op=True),
        dist.all_gather_into_tensor(gathered, contribution(), async_op=True),
        dist.reduce_scatter_tensor(shard, contribution(), async_op=True),
    ]
    assert all(torch.isnan(tensor).all() for tensor in (reduced, gathered, shard))
    assert count.tolist() == [0]
    for work in works:
        assert work.wait()
        assert work.wait()  # a second wait has no effect
    assert reduced.tolist() == [1, 3, 5, 7]
    assert count.tolist() == [2]
    assert gathered.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert shard.tolist() == [[1, 3], [5, 7]][dist.get_rank()]


def empties() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8, device="cuda"), torch.zeros(2, device="cuda")


def coalesced_results_are_held_until_wait() -> None:
    outputs = [torch.zeros(8, device="cuda") for _ in range(2)]
    with _coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, contribution())
    assert all(torch.isnan(output).all() for output in outputs)
    manager.wait()
    assert all(output.tolist() == [0, 1, 2, 3, 1, 2, 3, 4] for output in outputs)


def in_place_gather_keeps_own_part() -> None:
    whole = torch.zeros(8, device="cuda")
    mine = whole.view(2, 4)[dist.get_rank()].copy_(contribution())
    work = dist.all_gather_into_tensor(whole, mine, async_op=True)
    assert torch.equal(mine, contribution())
    assert torch.isnan(whole.view(2, 4)[1 - dist.get_rank()]).all()
    work.wait()
    assert whole.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]


def result_does_not_bump_the_version() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    buffer = contribution()
    loss = (weight * buffer).sum()
    dist.all_reduce(buffer, async_op=True).wait()
    loss.backward()  # autograd saved the buffer, and NCCL would not bump its version either
    assert weight.grad.tolist() == [1, 3, 5, 7]


def polled_work_returns_results() -> None:
    tensor = contribution()
    work = dist.all_reduce(tensor, async_op=True)
    assert work.is_completed() and work.is_success()
    assert tensor.tolist() == [1, 3, 5, 7]
    for name in ("synchronize", "block_current_stream"):
        tensor = contribution()
        getattr(dist.all_reduce(tensor, async_op=True), name)()
        assert tensor.tolist() == [1, 3, 5, 7]


def send_without_wait_arrives() -> None:
    values = [1.0, 2.0, 3.0]
    if dist.get_rank() == 0:
        for value in values:
            dist.isend(torch.full((4,), value, device="cuda"), 1)
    dist.barrier()  # the sends only reach their receiver after this
    if dist.get_rank() == 1:
        for value in values:
            received = torch.zeros(4, device="cuda")
            dist.recv(received, 0)
            assert received.tolist() == [value] * 4


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
    side = torch.cuda.Stream()

    def exchange() -> torch.Tensor:
        y = x * 2
        dist.all_gather_into_tensor(gathered, y)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            reduction = dist.all_reduce(gathered, async_op=True)
        reduction.wait()  # also joins the side stream
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


def missing_wait_in_a_capture() -> None:
    x = contribution()
    graph, forgetful = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduced = x * 1
        work = dist.all_reduce(reduced, async_op=True)
        work.wait()
        out = reduced + 1
    with torch.cuda.graph(forgetful):
        reduced = x * 1
        dist.all_reduce(reduced, async_op=True)
        wrong = reduced + 1
    for _ in range(2):
        graph.replay()
        forgetful.replay()
        assert out.tolist() == [2, 4, 6, 8]
        assert torch.isnan(wrong).all()


def capture_does_not_wait_for_ranks() -> None:
    graph, counts = torch.cuda.CUDAGraph(), torch.full((1,), 7, device="cuda")
    if dist.get_rank() == 0:
        with torch.cuda.graph(graph):
            dist.all_reduce(counts)
            picked = torch.arange(3, device="cuda")[counts]  # a gathered tensor may be an index
    dist.barrier()
    assert counts.tolist() == [7]
    if dist.get_rank() == 1:
        dist.all_reduce(counts.fill_(-5))
    else:
        graph.replay()
        assert picked.tolist() == [2]
    assert counts.tolist() == [2]


def barrier_in_a_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        with pytest.raises(torch.AcceleratorError, match=r"c10d\.barrier"):
            dist.barrier()
        with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
            graph.capture_end()


CASES = [
    backends,
    premultiplied_sum,
    average,
    coalesced,
    results_are_held_until_wait,
    coalesced_results_are_held_until_wait,
    in_place_gather_keeps_own_part,
    result_does_not_bump_the_version,
    polled_work_returns_results,
    send_without_wait_arrives,
    low_precision,
    meshes,
    captured,
    missing_wait_in_a_capture,
    capture_does_not_wait_for_ranks,
    barrier_in_a_capture,
]

if __name__ == "__main__":
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    for case in CASES:
        case()
        if dist.get_rank() == 0:
            print(f"passed: {case.__name__}", flush=True)
    dist.destroy_process_group()
