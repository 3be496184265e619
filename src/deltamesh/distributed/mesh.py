"""The process groups of a topology. Creates groups; sends nothing through them.

`build_mesh` is called by all ranks at the same time, once, and its groups are passed to whatever needs them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deltamesh.distributed.collectives import Group
from deltamesh.topology import AXES, Axis, Coordinate, Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class Mesh:
    """A topology's groups, as this rank sees them. An axis of degree 1 is a group of this process alone.

    Attributes:
        topology: the sizes.
        coordinate: this rank's index on each axis.
        device_mesh: torch's mesh with the dimensions "dp", "cp", "tp", or None without torch.distributed.
        dp, cp, tp: the ranks along one axis, in the order of their index on it.
        dp_cp: the ranks with the same tp index, dp slowest: gradients are summed over them.
        cp_tp: the ranks of one dp index, cp slowest: they hold one micro-batch and must agree on its plan.
        world: all ranks.
    """

    topology: Topology
    coordinate: Coordinate
    device_mesh: DeviceMesh | None
    dp: Group
    cp: Group
    tp: Group
    dp_cp: Group
    cp_tp: Group
    world: Group


def world_group() -> Group:
    """All ranks, before there is a mesh: this process alone without torch.distributed."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Group.single()
    return Group(rank=dist.get_rank(), size=dist.get_world_size(), handle=dist.group.WORLD)


def build_mesh(topology: Topology) -> Mesh:
    """Builds the groups of `topology` over the initialised default group, all ranks together.

    One rank needs no torch.distributed. Where the default group is NCCL, the groups that compare plans (world and
    cp_tp) get a gloo twin for Python objects, so that agreeing never waits for the GPU.

    Raises:
        RuntimeError: the topology has several ranks and torch.distributed is not initialised.
        ValueError: the topology does not have as many ranks as the world; lists those that do.

    Example:
        >>> build_mesh(Topology()).cp.size
        1
    """
    if not dist.is_initialized():
        if topology.world_size > 1:
            raise RuntimeError(
                f"{topology} needs {topology.world_size} ranks, but this is one process; start it with "
                f"`torchrun --nproc-per-node {topology.world_size} SCRIPT`"
            )
        alone = Group.single()
        return Mesh(
            topology=topology,
            coordinate=Coordinate(dp=0, cp=0, tp=0),
            device_mesh=None,
            **dict.fromkeys(("dp", "cp", "tp", "dp_cp", "cp_tp", "world"), alone),
        )
    topology.check_world(dist.get_world_size())
    backend = dist.get_backend()
    device_mesh = init_device_mesh(
        "cuda" if backend == "nccl" else "cpu", (topology.dp, topology.cp, topology.tp), mesh_dim_names=AXES
    )
    return Mesh(
        topology=topology,
        coordinate=topology.coordinate(dist.get_rank()),
        device_mesh=device_mesh,
        dp=_group(topology, ("dp",), device_mesh),
        cp=_group(topology, ("cp",), device_mesh),
        tp=_group(topology, ("tp",), device_mesh),
        dp_cp=_group(topology, ("dp", "cp"), device_mesh),
        cp_tp=_group(topology, ("cp", "tp"), device_mesh, control=backend == "nccl"),
        world=_group(topology, ("dp", "cp", "tp"), device_mesh, control=backend == "nccl"),
    )


def mesh_device() -> torch.device:
    """The device of this rank's tensors: the current CUDA device under NCCL, otherwise the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _group(topology: Topology, axes: tuple[Axis, ...], device_mesh: DeviceMesh, *, control: bool = False) -> Group:
    """This rank's group along `axes`. Every rank takes the same branch, as it depends on sizes only."""
    wide = [axis for axis in axes if topology.size(axis) > 1]
    if not wide:
        return Group.single()
    groups = topology.groups(*axes)
    if len(groups) == 1:
        handle = dist.group.WORLD
    elif len(wide) == 1:
        handle = device_mesh.get_group(wide[0])
    else:
        handle = _new_groups(groups)
    rank = dist.get_rank()
    ranks = next(group for group in groups if rank in group)
    assert handle is not None
    assert dist.get_process_group_ranks(handle) == list(ranks), "torch's group has other ranks, or another order"
    return Group(
        rank=ranks.index(rank),
        size=len(ranks),
        handle=handle,
        control=_new_groups(groups, backend="gloo") if control else None,
    )


def _new_groups(groups: tuple[tuple[int, ...], ...], backend: str | None = None) -> dist.ProcessGroup:
    """Creates all groups of an axis, on all ranks and in the same order, and returns the one that this rank is in."""
    mine: dist.ProcessGroup | None
    mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], backend=backend)
    assert mine is not None, "the groups of an axis hold every rank"
    return mine
