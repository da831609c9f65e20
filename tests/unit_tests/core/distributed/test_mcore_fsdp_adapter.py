"""Test that Megatron-FSDP's device meshes contain only the ranks of one pipeline stage."""

from itertools import product

import pytest

pytest.importorskip("megatron.core")

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron_fsdp_cuda_graphs.overlay import upstream


class Group(list):
    """A stand-in for a process group: the list of its ranks."""

    def size(self):
        return len(self)


def groups(rank, **sizes):
    """Return the groups of ``rank`` by dimension. ``sizes`` are the dimensions' sizes, outermost first."""
    places = torch.arange(torch.tensor([*sizes.values()]).prod()).view(*sizes.values())
    ((*place,),) = (places == rank).nonzero().tolist()
    return {
        name: Group(places[(*place[:side], slice(None), *place[side + 1 :])].tolist())
        for side, name in enumerate(sizes)
    }


@pytest.fixture
def world(monkeypatch):
    """Return a function that sets the rank of this process and the world size."""

    def enter(rank, size):
        monkeypatch.setattr(dist, "get_rank", lambda *group: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: size if group is None else len(group))
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(group))

    return enter


@pytest.mark.parametrize(("dp", "ep", "tp"), product((1, 2, 3), (1, 2), (1, 2)))
def test_mesh_without_stages_matches_megatron_core(world, dp, ep, tp):
    for rank in range(dp * ep * tp):
        world(rank, dp * ep * tp)
        of = groups(rank, dp=dp, ep=ep, tp=tp)
        expected = upstream(mcore_fsdp_adapter.__name__)._get_dp_tp_mesh(of["dp"], of["tp"], ep_size=ep)
        mesh = mcore_fsdp_adapter._get_dp_tp_mesh(of["dp"], of["tp"], ep_size=ep)
        assert torch.equal(mesh, expected)
        assert mesh.dtype == expected.dtype


@pytest.mark.parametrize(("outer", "dp", "tp"), product((2, 3), (1, 2), (1, 2)))
def test_hsdp_mesh_without_stages_matches_megatron_core(world, outer, dp, tp):
    for rank in range(outer * dp * tp):
        world(rank, outer * dp * tp)
        of = groups(rank, outer=outer, dp=dp, tp=tp)
        expected = upstream(mcore_fsdp_adapter.__name__)._get_hsdp_tp_mesh(of["outer"], of["dp"], of["tp"])
        assert torch.equal(mcore_fsdp_adapter._get_hsdp_tp_mesh(of["outer"], of["dp"], of["tp"]), expected)


@pytest.mark.parametrize("order", [("pp", "dp", "tp"), ("dp", "pp", "tp")])
def test_mesh_of_a_stage_contains_only_its_ranks(world, order):
    sizes = {"pp": 2, "dp": 3, "tp": 2}
    for rank in range(12):
        world(rank, 12)
        of = groups(rank, **{name: sizes[name] for name in order})
        mesh = mcore_fsdp_adapter._get_dp_tp_mesh(of["dp"], of["tp"])
        assert mesh.shape == (3, 2)
        assert (mesh == rank).sum() == 1
        for row in mesh.tolist():  # the tensor-parallel group of one data-parallel rank
            assert groups(row[0], **{name: sizes[name] for name in order})["tp"] == row
        for column in mesh.t().tolist():
            assert groups(column[0], **{name: sizes[name] for name in order})["dp"] == column
