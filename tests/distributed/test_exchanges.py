"""Each exchange by itself, on strided and contiguous groups: values on every rank of every group, forward and backward.

Every group works on data of its own, so that a value read from the wrong group, or from the wrong owner, is seen.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from deltamesh.distributed.collectives import (
    Group,
    RowTransfer,
    collect_rows,
    collect_slices,
    copy_to_group,
    exchange_rows,
    gather_rows,
    reduce_from_group,
    scatter_rows,
)
from deltamesh.distributed.mesh import build_mesh
from deltamesh.ops.gated_delta_rule.scan_carrier import ScanCarrier
from deltamesh.plan import cut_forest, plan_links, plan_row_exchanges
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology

LAYOUTS = {
    "{0,2}/{1,3}": Topology(cp=2, tp=2),
    "{0,1}/{2,3}": Topology(dp=2, cp=2),
    "{0,2,4,6}/{1,3,5,7}": Topology(cp=4, tp=2),
}
layouts = pytest.mark.parametrize("topology", LAYOUTS.values(), ids=LAYOUTS.keys())


def _cp_group(topology: Topology, rank: int) -> tuple[int, ...]:
    return next(group for group in topology.groups("cp") if rank in group)


def whole(topology: Topology, rank: int, *shape: int) -> Tensor:
    """The data of a rank's cp group."""
    generator = torch.Generator().manual_seed(_cp_group(topology, rank)[0])
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# ---------------------------------------------------------------- rows


def run_row_exchange(topology: Topology, cuts: list[int], needs: list[list[int]]) -> tuple[Tensor, Tensor]:
    mesh = build_mesh(topology)
    stream = whole(topology, mesh.world.rank, cuts[-1], 3)
    arrays = [np.array(need, dtype=np.int64) for need in needs]
    plan = plan_row_exchanges(arrays, np.array(cuts))[mesh.cp.rank]
    own = stream[cuts[mesh.cp.rank] : cuts[mesh.cp.rank + 1]].clone().requires_grad_()
    got = exchange_rows(own, RowTransfer.from_plan(plan, torch.device("cpu")), mesh.cp)
    (got * weights(got, mesh.cp)).sum().backward()
    assert own.grad is not None
    return got.detach(), own.grad


def weights(x: Tensor, group: Group) -> Tensor:
    """Gradients that differ by receiving rank and by element."""
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype).view(x.shape) + 100 * group.rank)


@layouts
def test_row_exchange_brings_the_owners_rows_and_returns_their_gradients(
    rank_pool: RankPool, topology: Topology
) -> None:
    cuts = [0, 5, 9] if topology.cp == 2 else [0, 5, 5, 6, 9]
    needs = [[7], [0, 3]] if topology.cp == 2 else [[5, 8], [0, 5, 7], [1, 4, 6], [0, 1, 5]]
    results = rank_pool.run(run_row_exchange, topology.world_size, topology, cuts, needs)
    for rank, (got, _) in enumerate(results):
        place = topology.coordinate(rank).cp
        assert torch.equal(got, whole(topology, rank, cuts[-1], 3)[needs[place]])
    for rank, (_, grad) in enumerate(results):
        place, group = topology.coordinate(rank).cp, _cp_group(topology, rank)
        expected = torch.zeros(cuts[-1], 3, dtype=torch.float64)
        for peer, need in enumerate(needs):
            got = results[group[peer]][0]
            expected[need] += weights(got, Group(rank=peer, size=len(needs), handle=None))
        torch.testing.assert_close(grad, expected[cuts[place] : cuts[place + 1]], rtol=0, atol=1e-15)


# ---------------------------------------------------------------- shards of rows


def run_shards(topology: Topology, num_rows: int) -> dict[str, Tensor]:
    """Every sharding collective on the cp group; returns outputs and input gradients by name."""
    mesh = build_mesh(topology)
    group, seen = mesh.cp, {}
    full = whole(topology, mesh.world.rank, group.size, num_rows, 2)  # one [num_rows, 2] for each rank
    each = -(-num_rows // group.size)
    shard = torch.nn.functional.pad(full[0], (0, 0, 0, each * group.size - num_rows)).chunk(group.size)[group.rank]
    calls = {
        "copy": (full[group.rank], lambda x: copy_to_group(x, group)),
        "reduce": (full[group.rank], lambda x: reduce_from_group(x, group)),
        "gather": (shard, lambda x: gather_rows(x, num_rows, group)),
        "scatter": (full[group.rank], lambda x: scatter_rows(x, group)),
        "collect": (shard, lambda x: collect_rows(x, num_rows, group)),
    }
    for name, (value, call) in calls.items():
        x = value.clone().requires_grad_()
        y = call(x)
        weight = weights(y, group) if name not in ("reduce", "collect") else weights(y, Group.single())
        (y * weight).sum().backward()
        seen[name], seen[f"{name}.grad"] = y.detach(), x.grad
    return seen


@layouts
@pytest.mark.parametrize("num_rows", [0, 1, 7, 8])
def test_row_shards_are_gathered_summed_and_dealt_inside_their_group(
    rank_pool: RankPool, topology: Topology, num_rows: int
) -> None:
    results = rank_pool.run(run_shards, topology.world_size, topology, num_rows)
    for rank, seen in enumerate(results):
        place, size = topology.coordinate(rank).cp, topology.cp
        full = whole(topology, rank, size, num_rows, 2)
        each = -(-num_rows // size)

        def shard(x: Tensor, each: int = each, size: int = size, place: int = place) -> Tensor:
            return torch.nn.functional.pad(x, (0, 0, 0, each * size - len(x)))[place * each : (place + 1) * each]

        def weight(shape: torch.Size, peer: int) -> Tensor:
            return weights(torch.empty(shape, dtype=torch.float64), Group(rank=peer, size=1, handle=None))

        rows, part = torch.Size((num_rows, 2)), torch.Size((each, 2))
        sharded = torch.cat([weight(part, peer) for peer in range(size)])[:num_rows]
        expected = {
            "copy": full[place],
            "copy.grad": sum(weight(rows, peer) for peer in range(size)),
            "reduce": full.sum(0),
            "reduce.grad": weight(rows, 0),
            "gather": full[0],
            "gather.grad": shard(sum(weight(rows, peer) for peer in range(size))),
            "scatter": shard(full.sum(0)),
            "scatter.grad": sharded,
            "collect": full[0],
            "collect.grad": shard(weight(rows, 0)),
        }
        for name, value in expected.items():
            torch.testing.assert_close(seen[name], value, rtol=0, atol=1e-14, msg=f"{name} on rank {rank}")


def run_slices(topology: Topology, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    mesh = build_mesh(topology)
    full = whole(topology, mesh.world.rank, sum(counts), 2)
    own = full.split(counts)[mesh.cp.rank].clone().requires_grad_()
    every = collect_slices(own, counts, mesh.cp)
    (every * weights(every, Group.single())).sum().backward()
    assert own.grad is not None
    return every.detach(), own.grad


@layouts
def test_slices_of_unequal_length_are_collected_and_each_gradient_counts_once(
    rank_pool: RankPool, topology: Topology
) -> None:
    counts = (3, 0) if topology.cp == 2 else (0, 4, 1, 2)
    for rank, (every, grad) in enumerate(rank_pool.run(run_slices, topology.world_size, topology, counts)):
        full = whole(topology, rank, sum(counts), 2)
        assert torch.equal(every, full)
        assert torch.equal(grad, weights(full, Group.single()).split(counts)[topology.coordinate(rank).cp])


# ---------------------------------------------------------------- states


def run_carrier(topology: Topology) -> tuple[Tensor, Tensor, int]:
    """A chain of one node over all slices: each slice's transition and state are the group's."""
    mesh = build_mesh(topology)
    P, me = topology.cp, mesh.cp.rank
    cuts = np.arange(P + 1) * 3
    links = plan_links(cut_forest(np.array([-1]), np.array([0]), np.array([3 * P]), cuts))[me]
    states, moves, grads = carrier_data(topology, mesh.world.rank)
    carrier = ScanCarrier(links, mesh.cp, torch.device("cpu"))
    exports, through = int(me < P - 1), int(0 < me < P - 1)
    incoming = carrier.incoming(states[me : me + exports], moves[me : me + through])()
    outgoing = carrier.outgoing_gradient(grads[me : me + int(me > 0)], moves[me : me + through])()
    sent = sum(len(part) for part in links.forward.send_transitions)
    return incoming, outgoing, sent


def carrier_data(topology: Topology, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    P = topology.cp
    data = whole(topology, rank, P, 2, 5, 3 + 5 + 3)
    return data[..., :3], data[..., 3:8], data[..., 8:]


@layouts
def test_boundary_states_and_their_gradients_fold_along_the_group_order(
    rank_pool: RankPool, topology: Topology
) -> None:
    P = topology.cp
    for rank, (incoming, outgoing, sent) in enumerate(rank_pool.run(run_carrier, topology.world_size, topology)):
        me = topology.coordinate(rank).cp
        E, M, D = carrier_data(topology, rank)
        S, state = [], torch.zeros_like(E[0])
        for r in range(P):
            S.append(state)  # what enters slice r
            state = E[r] + (M[r] @ state if r else 0)
        dS, grad = [torch.zeros_like(D[0])] * P, torch.zeros_like(D[0])
        for r in range(P - 1, 0, -1):
            grad = D[r] + (M[r].mT @ grad if r < P - 1 else 0)
            dS[r - 1] = grad  # what leaves slice r - 1
        torch.testing.assert_close(incoming, S[me][None][: int(me > 0)], rtol=0, atol=1e-13)
        torch.testing.assert_close(outgoing, dS[me][None][: int(me < P - 1)], rtol=0, atol=1e-13)
        assert sent == (P - 1 - me if 0 < me < P - 1 else 0)
