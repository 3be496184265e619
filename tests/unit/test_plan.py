"""Plans against brute force: every index table equals what walking the paths row by row gives."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from deltamesh.plan import CostModel, cut_forest, plan_links, plan_micro_batch, quantile_cuts
from deltamesh.plan.ancestors import plan_ancestors
from deltamesh.plan.cuts import through_rows
from deltamesh.plan.exchange import RowExchange
from deltamesh.plan.halos import plan_halos
from deltamesh.plan.slices import CutForest
from deltamesh.tree import build_prefix_tree
from tests.forests import Forest, forests

NOTHING = np.zeros(0, dtype=np.int64)


def cut(forest: Forest) -> CutForest:
    return cut_forest(forest.parent, forest.start, forest.length, forest.cuts)


def received_rows(exchanges: list[RowExchange], cuts: np.ndarray, rank: int) -> list[int]:
    """Stream rows that arrive at a rank, by running the exchange on row numbers."""
    arrived: list[int] = []
    for peer, exchange in enumerate(exchanges):
        starts = np.cumsum([0, *exchange.send_splits])
        sent = exchange.send_rows[starts[rank] : starts[rank + 1]] + cuts[peer]
        assert len(sent) == exchanges[rank].recv_splits[peer]
        assert len(np.unique(sent)) == len(sent)
        arrived += sent.tolist()
    return arrived


@given(forests())
def test_pieces_tile_the_slices_and_continue_their_paths(forest: Forest) -> None:
    pieces = cut(forest)
    before = forest.predecessors()
    assert pieces.start.tolist() == np.cumsum([0, *pieces.length])[:-1].tolist()
    assert pieces.length.sum() == forest.num_rows
    for i, start in enumerate(pieces.start.tolist()):
        rows = range(start, start + int(pieces.length[i]))
        rank = int(pieces.rank[i])
        assert all(forest.cuts[rank] <= row < forest.cuts[rank + 1] for row in rows)
        assert [before[row] for row in rows[1:]] == list(rows[:-1])
        parent = int(pieces.parent[i])
        expected = int(pieces.start[parent] + pieces.length[parent] - 1) if parent >= 0 else -1
        assert before[start] == expected


@given(forests())
def test_slots_and_exports_of_a_slice_name_the_states_that_cross_its_borders(forest: Forest) -> None:
    whole = cut(forest)
    for rank in range(whole.num_slices):
        pieces = whole.slice_pieces(rank, NOTHING)
        first = int(np.searchsorted(whole.rank, rank))
        imports = whole.imports(rank)
        assert pieces.num_slots == len(imports)
        for i in range(len(pieces.start)):
            parent = int(whole.parent[first + i])
            local = parent >= 0 and whole.rank[parent] == rank
            assert pieces.parent[i] == (parent - first if local else -1)
            assert (imports[pieces.slot[i]] if pieces.slot[i] >= 0 else -1) == (-1 if local else parent)
        crossing = {int(p) for c, p in enumerate(whole.parent) if p >= 0 and whole.rank[p] == rank != whole.rank[c]}
        assert set((pieces.exports + first).tolist()) == crossing


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@given(forest=forests(max_length=4))
def test_halo_taps_are_the_rows_before_on_the_path(width: int, forest: Forest) -> None:
    plans = plan_halos(cut(forest), width)
    for rank, plan in enumerate(plans):
        first, stop = forest.cuts[rank : rank + 2]
        rows = [*range(first, stop), *received_rows([p.exchange for p in plans], forest.cuts, rank), -1]
        listed = dict(zip(plan.head_rows.tolist(), plan.head_taps.tolist(), strict=True))
        for row in range(first, stop):
            path = [row, *forest.path(row)][:width]
            expected = [-1] * (width - len(path)) + path[::-1]
            taps = listed.get(row - first)
            if taps is None:
                assert expected == list(range(row - width + 1, row + 1))
                assert row - first >= width - 1
            else:
                assert [rows[tap] for tap in taps] == expected


@given(forests())
def test_attention_receives_exactly_the_ancestors_outside_the_slice(forest: Forest) -> None:
    plans = plan_ancestors(cut(forest))
    for rank, plan in enumerate(plans):
        first, stop = forest.cuts[rank : rank + 2].tolist()
        received = received_rows([p.exchange for p in plans], forest.cuts, rank)
        outside = {a for row in range(first, stop) for a in forest.path(row) if a < first}
        assert received == sorted(outside)
        keys = [*received, *range(first, stop)]
        assert plan.segment_length.sum() == len(keys)
        for s, (start, length) in enumerate(zip(plan.segment_start, plan.segment_length, strict=True)):
            above: list[int] = []
            parent = int(plan.segment_parent[s])
            while parent >= 0:
                assert parent < s
                at = int(plan.segment_start[parent])
                above += keys[at : at + int(plan.segment_length[parent])]
                parent = int(plan.segment_parent[parent])
            for i in range(start, start + length):
                if i >= len(received):
                    assert sorted([*above, *keys[start:i]]) == sorted(forest.path(keys[i]))


@given(forests())
def test_only_what_later_slices_continue_travels(forest: Forest) -> None:
    """The first slice never sends a transition, the last one sends nothing forward; counts match on both sides."""
    whole = cut(forest)
    links = plan_links(whole)
    nonempty = np.flatnonzero(np.diff(forest.cuts))
    assert not any(len(part) for part in links[int(nonempty[0])].forward.send_transitions)
    assert not any(len(part) for part in links[int(nonempty[-1])].forward.send_states)
    for me, link in enumerate(links):
        for peer, other in enumerate(links):
            for mine, theirs in ((link.forward, other.forward), (link.backward, other.backward)):
                assert len(mine.send_states[peer]) == len(theirs.recv_states[me])
                assert len(mine.send_transitions[peer]) == len(theirs.recv_transitions[me])
            assert peer > me or not len(link.forward.send_states[peer])
            assert peer < me or not len(link.backward.send_states[peer])


def test_a_prompt_whose_completions_live_elsewhere_costs_only_its_state() -> None:
    forest = cut_forest(
        np.array([-1, 0, 0, 0]), np.array([0, 8, 12, 16]), np.array([8, 4, 4, 4]), np.array([0, 8, 12, 20])
    )
    ways = [link.forward for link in plan_links(forest)]
    sent = [(sum(map(len, way.send_states)), sum(map(len, way.send_transitions))) for way in ways]
    assert sent == [(2, 0), (0, 0), (0, 0)]


def test_plans_are_pure_and_their_digest_sees_every_input() -> None:
    base = {"num_slices": 2, "conv_width": 4, "cost": CostModel()}
    tokens, targets = [[1, 2, 3, 4], [1, 2, 5]], [[2, 3, 4, -100], [2, 5, -100]]
    digest = plan_micro_batch(tokens, targets, **base).digest
    assert plan_micro_batch(tokens, targets, **base).digest == digest
    others = [
        plan_micro_batch([[1, 2, 3, 4], [1, 2, 6]], targets, **base),
        plan_micro_batch(tokens, [[2, 3, 4, -100], [2, 6, -100]], **base),
        plan_micro_batch(tokens, targets, **base | {"num_slices": 3}),
        plan_micro_batch(tokens, targets, **base, hidden_wanted=[True, False]),
        plan_micro_batch(tokens, targets, **base, cuts=lambda tree, n: np.array([0, 1, 5])),
    ]
    assert len({digest, *(plan.digest for plan in others)}) == 6


def test_balanced_cuts_weigh_attention_by_path_position() -> None:
    positions = np.arange(4096)
    cost = CostModel(row=100.0, key=1.0).rows(positions, NOTHING)
    cuts = quantile_cuts(cost, 4)
    work = [cost[a:b].sum() for a, b in pairwise(cuts)]
    assert max(work) / np.mean(work) < 1.01
    assert cuts[1] > 1024 > cuts[4] - cuts[3]


@pytest.mark.parametrize("num_slices", [2, 4, 8])
@pytest.mark.parametrize(
    ("sequences", "bound"),
    [([list(range(4096))], 1.1), ([[*range(512), *range(i, i + 160)] for i in range(600, 616)], 1.05)],
    ids=["chain", "group"],
)
def test_cuts_balance_rows_attention_heads_and_transitions(
    sequences: list[list[int]], bound: float, num_slices: int
) -> None:
    """Also where transitions cost half as much as everything else of a row."""
    cost = CostModel(row=1000.0, key=2.0, head=300.0, through=500.0)
    targets = [np.where(np.arange(len(s)) < 500, -100, 1) for s in sequences]
    plan = plan_micro_batch(sequences, targets, num_slices=num_slices, conv_width=4, cost=cost)
    assert plan.busiest_over_mean <= bound
    assert sum(plan.work) >= cost.rows(np.concatenate([s.positions for s in plan.slices]), plan.edges.row_E).sum()


def test_rows_on_a_through_path_are_those_between_an_entering_and_a_leaving_state() -> None:
    """A chain with a branch in each slice: the branch's rows are crossed by no path."""
    forest = cut_forest(
        np.array([-1, 0, 0, 2, 2]), np.array([0, 4, 6, 10, 12]), np.array([4, 2, 4, 2, 4]), np.array([0, 3, 9, 16])
    )
    assert through_rows(forest).tolist() == [0, 0, 0, 1, 0, 0, 1, 1, 1, *[0] * 7]


def test_more_slices_than_rows_leaves_some_empty() -> None:
    plan = plan_micro_batch([[7, 8]], [None], num_slices=5, conv_width=4, cost=CostModel())
    assert sorted(s.stop - s.start for s in plan.slices) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("cuts", [[0, 5, 3, 8], [1, 8], [0, 7], [0, 9], [0]])
def test_impossible_cuts_are_refused(cuts: list[int]) -> None:
    tree = build_prefix_tree([list(range(8))])
    with pytest.raises(ValueError, match=r"non-decreasing, from 0 to the number of rows, 8"):
        cut_forest(tree.node_parent, tree.node_start, tree.node_length, np.array(cuts))
