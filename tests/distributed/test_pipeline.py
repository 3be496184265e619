"""The pipeline by itself: its messages on strided and contiguous groups, and the bits of one process."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deltamesh import ops
from deltamesh.distributed.mesh import build_mesh
from deltamesh.ops.gated_delta_rule import pipeline_carrier
from deltamesh.ops.gated_delta_rule.blocks import Heads
from deltamesh.ops.gated_delta_rule.pipeline_carrier import Mail
from deltamesh.plan import CutForest, cut_forest, plan_pipeline
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology
from tests.distributed.test_exchanges import layouts

# ---------------------------------------------------------------- messages by themselves

NUM_BLOCKS = 3


def comb(ranks: int) -> CutForest:
    """A chain over all slices, with a leaf on every later slice at every cut: most states go to several peers."""
    parent, chain = [-1], 0
    for _ in range(1, ranks):
        leaves = [chain] * 2
        parent += [*leaves, chain]
        chain = len(parent) - 1
    length = np.full(len(parent), 2)
    return cut_forest(
        np.array(parent), np.cumsum(length) - length, length, np.arange(ranks + 1) * (length.sum() // ranks)
    )


def content(group: Sequence[int], sender: int, stage: int, block: int, place: int) -> float:
    """What the sender says: different for every group, rank, stage, block and state."""
    return float(((group[0] * 10 + sender) * 10 + stage) * 1000 + block * 100 + place)


def run_mail(topology: Topology, direction: str) -> list[tuple[int, int, list[float]]]:
    """Everything that arrives at this rank: (block, position, values by sender, last first); two layers."""
    mesh = build_mesh(topology)
    cp = _cp_group(topology, mesh.world.rank)
    way = getattr(plan_pipeline(comb(topology.cp))[mesh.cp.rank], direction)
    like = [torch.empty(0, 1, 2, 1) for _ in range(NUM_BLOCKS)]
    arrived: dict[tuple[int, int], list[float]] = {}
    for _ in range(2):
        mail = Mail(way, mesh.cp, like)

        def parts(messages: Any, stage: int, block: int) -> list[Tensor]:
            values = [[content(cp, mesh.cp.rank, stage, block, s) for s in m.states.tolist()] for m in messages]
            return [torch.tensor(v).view(-1, 1, 1, 1).expand(-1, 1, 2, 1).contiguous() for v in values]

        for block in range(NUM_BLOCKS):
            mail.send_ready(block, parts(way.send_ready, 0, block))
        for block in range(NUM_BLOCKS):
            for places, states in mail.received(block):
                for place, state in zip(places, states, strict=True):
                    assert state.unique().numel() == 1
                    arrived.setdefault((block, place), []).append(float(state.flatten()[0]))
            mail.send_waiting(block, parts(way.send_waiting, 1, block))
        mail.close()
    return [(block, place, values) for (block, place), values in sorted(arrived.items())]


def _cp_group(topology: Topology, rank: int) -> tuple[int, ...]:
    return next(group for group in topology.groups("cp") if rank in group)


@layouts
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_state_arrives_from_its_sender_in_its_group(
    rank_pool: RankPool, topology: Topology, direction: str
) -> None:
    forest = comb(topology.cp)
    links = [getattr(link, direction) for link in plan_pipeline(forest)]
    exports = [forest.exports[forest.rank[forest.exports] == r] for r in range(topology.cp)]
    imports = [forest.imports(r) for r in range(topology.cp)]
    sent, got = (exports, imports) if direction == "forward" else (imports, exports)
    for rank, arrived in enumerate(rank_pool.run(run_mail, topology.world_size, topology, direction, timeout=20)):
        me, group = topology.coordinate(rank).cp, _cp_group(topology, rank)
        expected = []
        for block in range(NUM_BLOCKS):
            for place, state in enumerate(got[me].tolist()):
                once = []
                for sender in reversed(range(topology.cp)):
                    for stage, messages in enumerate((links[sender].send_ready, links[sender].send_waiting)):
                        for message in messages:
                            if message.peer == me:
                                once += [
                                    content(group, sender, stage, block, s)
                                    for s in message.states.tolist()
                                    if sent[sender][s] == state
                                ]
                assert once
                expected.append((block, place, once * 2))
        assert arrived == expected


# ---------------------------------------------------------------- bit for bit


def inputs(rows: int, H: int, Hk: int, K: int, V: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, rows, *shape, generator=rng)

    return {
        "q": draw(Hk, K),
        "k": 0.9 * torch.randn(1, 1, Hk, K, generator=rng) + 0.4 * draw(Hk, K),
        "v": draw(H, V),
        "g": -0.02 * draw(H).sigmoid() * torch.linspace(0, 1, H),
        "beta": 0.05 + 0.3 * draw(H).sigmoid(),
    }


def run_slice(
    cu_seqlens: list[int], parents: list[int], cuts: list[int] | None, dims: tuple[int, int, int, int], carrier: str
) -> tuple[slice, dict[str, Tensor], dict[int, Tensor], list[int]]:
    """Rows, results and final states of this rank, and the elements of every message that it sends."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    context = ops.context_parallel(group, cu_seqlens=cu_seqlens, parents=parents, cuts=cuts, carrier=carrier)  # type: ignore[arg-type]
    local = {n: x[:, context.rows].clone().requires_grad_() for n, x in inputs(cu_seqlens[-1], *dims).items()}
    sent: list[int] = []
    real = pipeline_carrier.start_send

    def counting(x: Tensor, *args: Any) -> Any:
        sent.append(x.numel())
        return real(x, *args)

    with mock.patch.object(pipeline_carrier, "start_send", counting):
        o, final = ops.gated_delta_rule(**local, output_final_state=True, use_qk_l2norm=True, context=context)
        assert final is not None
        places = torch.arange(cu_seqlens[-1])[context.rows]
        leaf = torch.tensor([s not in parents for s in context.final_segments], dtype=torch.float32)
        loss = (o * torch.cos(0.1 * places)[None, :, None, None]).sum() + (final * leaf[:, None, None, None]).sum()
        grads = torch.autograd.grad(loss, list(local.values()))
    named = {"o": o.detach(), **{f"d{n}": g for n, g in zip(local, grads, strict=True)}}
    return context.rows, named, dict(zip(context.final_segments, final.detach(), strict=True)), sent


def assert_equal_bits(rank_pool: RankPool, cu: list[int], parents: list[int], cuts: list[int], dims: Any) -> None:
    _, alone, alone_final, _ = rank_pool.run(run_slice, 1, cu, parents, None, dims, "scan")[0]
    ranks = rank_pool.run(run_slice, len(cuts) - 1, cu, parents, cuts, dims, "pipeline")
    for rank, (rows, named, final, _) in enumerate(ranks):
        for name, x in named.items():
            assert torch.equal(x, alone[name][:, rows]), (name, rank)
        for segment, state in final.items():
            assert torch.equal(state, alone_final[segment]), ("final", segment, rank)


@pytest.mark.parametrize("dims", [(4, 2, 16, 24), (8, 8, 32, 32), (8, 4, 128, 128), (6, 3, 16, 48)], ids=str)
@pytest.mark.parametrize("cuts", [[0, 256, 650], [0, 128, 320, 650], [0, 64, 192, 512, 650], [0, 64, 64, 640, 650]])
def test_a_chain_cut_on_chunk_borders_has_the_bits_of_one_process(
    rank_pool: RankPool, cuts: list[int], dims: tuple[int, int, int, int]
) -> None:
    """fp32: output, final state and all gradients; empty slices and a last chunk of few rows included.

    K and V are multiples of 16: operands that begin at odd places of a cache line may be summed in another order.
    """
    assert_equal_bits(rank_pool, [0, 650], [-1], cuts, dims)


@pytest.mark.parametrize("cuts", [[0, 192, 576], [0, 192, 320, 448, 576], [0, 64, 128, 192, 576]], ids=str)
def test_a_group_cut_on_chunk_borders_has_the_bits_of_one_process(rank_pool: RankPool, cuts: list[int]) -> None:
    """A prompt and three completions: all on one later slice, or each on one of its own.

    Where two of them share a slice that is not the third's, the gradient of the prompt's state is the same sum in
    another order.
    """
    assert_equal_bits(rank_pool, [0, 192, 320, 448, 576], [-1, 0, 0, 0], cuts, (8, 4, 32, 64))


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize(
    ("cu", "parents", "cuts"),
    [
        ([0, 230], [-1], [0, 60, 60, 150, 230]),
        ([0, 66, 67, 140, 200, 230], [-1, 0, 1, 1, 0], [0, 30, 150, 150, 230]),
        ([0, 40, 90, 140, 190], [-1, 0, 0, 0], [0, 50, 100, 150, 190]),
    ],
)
def test_every_rank_sends_each_exported_state_once_to_each_direct_importer(
    rank_pool: RankPool, cu: list[int], parents: list[int], cuts: list[int]
) -> None:
    """No transitions, nothing empty: per block of heads one message for each planned one, forward and backward."""
    dims = H, Hk, K, V = 6, 3, 5, 7
    forest = cut_forest(np.array(parents), np.array(cu[:-1]), np.diff(cu), np.array(cuts))
    heads = [h.value.stop - h.value.start for h in Heads.split(Hk, H, plan_pipeline(forest)[0].num_blocks)]
    assert len(heads) == 3
    last = forest.start + forest.length - 1
    for rank, (_, _, _, sent) in enumerate(rank_pool.run(run_slice, 4, cu, parents, cuts, dims, "pipeline")):
        link = plan_pipeline(forest)[rank]
        messages = [*link.forward.send_ready, *link.forward.send_waiting]
        messages += [*link.backward.send_ready, *link.backward.send_waiting]
        assert sorted(sent) == sorted(len(m.states) * h * K * V for m in messages for h in heads)
        # by brute force: pairs of a boundary state and a slice that continues it
        pairs = {
            (int(last[p]), int(forest.rank[p]), int(forest.rank[n]))
            for n, p in enumerate(forest.parent)
            if p >= 0 and forest.rank[p] != forest.rank[n]
        }
        forward = sum(owner == rank for _, owner, _ in pairs)
        backward = sum(importer == rank for _, _, importer in pairs)
        assert sum(sent) == (forward + backward) * H * K * V
