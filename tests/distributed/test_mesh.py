"""Groups of a topology: who is in them, in which order, and what travels through them on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deltamesh.distributed.collectives import Group, all_gather_object, all_reduce
from deltamesh.distributed.mesh import Mesh, build_mesh, mesh_device
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Coordinate, Topology

GROUPS = ("dp", "cp", "tp", "dp_cp", "cp_tp", "world")


def _members(topology: Topology) -> dict[str, Any]:
    """Each group's global ranks, as learnt through the group itself, and this rank's index in it."""
    mesh = build_mesh(topology)
    seen: dict[str, Any] = {"coordinate": mesh.coordinate}
    for name in GROUPS:
        group: Group = getattr(mesh, name)
        seen[name] = (group.rank, all_gather_object(dist.get_rank(), group))
        total = all_reduce(torch.tensor(2.0 ** dist.get_rank()), group)
        assert float(total) == sum(2.0**rank for rank in seen[name][1])
        assert group.size == len(seen[name][1])
    assert mesh.device_mesh is not None
    assert mesh.device_mesh.mesh_dim_names == ("dp", "cp", "tp")
    assert mesh_device() == torch.device("cpu")
    return seen


@pytest.mark.parametrize(
    ("topology", "cp_groups"),
    [
        (Topology(cp=2, tp=2), [[0, 2], [1, 3]]),
        (Topology(dp=2, cp=2), [[0, 1], [2, 3]]),
        (Topology(cp=4, tp=2), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (Topology(dp=2, cp=2, tp=2), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (Topology(dp=2, tp=3), [[0], [1], [2], [3], [4], [5]]),
        (Topology(cp=3), [[0, 1, 2]]),
        (Topology(), [[0]]),
    ],
    ids=str,
)
def test_every_group_holds_its_ranks_in_axis_order(
    rank_pool: RankPool, topology: Topology, cp_groups: list[list[int]]
) -> None:
    answers = rank_pool.run(_members, topology.world_size, topology)
    axes = {"dp": ("dp",), "cp": ("cp",), "tp": ("tp",), "dp_cp": ("dp", "cp"), "cp_tp": ("cp", "tp")}
    for rank, seen in enumerate(answers):
        assert seen["coordinate"] == topology.coordinate(rank)
        assert seen["cp"][1] == next(group for group in cp_groups if rank in group)
        assert seen["world"] == (rank, list(range(topology.world_size)))
        for name, named in axes.items():
            index, ranks = seen[name]
            assert ranks[index] == rank
            assert tuple(ranks) in topology.groups(*named)


def _handles_of_missing_axes(topology: Topology) -> list[bool]:
    mesh = build_mesh(topology)
    return [getattr(mesh, name).handle is None for name in GROUPS]


def test_missing_axis_is_this_process_alone_and_never_the_world(rank_pool: RankPool) -> None:
    assert rank_pool.run(_handles_of_missing_axes, 2, Topology(tp=2)) == [[True, True, False, True, False, False]] * 2


def test_one_process_needs_no_torch_distributed() -> None:
    mesh = build_mesh(Topology(sp=True))
    assert isinstance(mesh, Mesh)
    assert mesh.coordinate == Coordinate(dp=0, cp=0, tp=0)
    assert all(getattr(mesh, name).size == 1 and getattr(mesh, name).handle is None for name in GROUPS)
    assert mesh.device_mesh is None


def test_several_ranks_without_torch_distributed_are_refused() -> None:
    with pytest.raises(RuntimeError, match="dp=1 cp=2 tp=1 needs 2 ranks, but this is one process; start it with"):
        build_mesh(Topology(cp=2))


def _build(topology: Topology) -> None:
    build_mesh(topology)


def test_topology_of_another_size_than_the_world_is_refused_on_every_rank(rank_pool: RankPool) -> None:
    outcomes = rank_pool.outcomes(_build, 3, Topology(cp=2))
    assert {str(outcome) for outcome in outcomes} == {
        "dp=1 cp=2 tp=1 needs 2 ranks, but the world has 3; topologies of 3 ranks: "
        "(dp=3 cp=1 tp=1), (dp=1 cp=3 tp=1), (dp=1 cp=1 tp=3)"
    }
