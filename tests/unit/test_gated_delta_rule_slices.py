"""A stream cut into slices that exchange (E, M) in memory gives the result of one process, values and gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltamesh.ops.gated_delta_rule import ExchangeCarrier, LocalCarrier, ScanContext, gated_delta_rule
from deltamesh.plan.pieces import Pieces, chain_pieces
from deltamesh.plan.slices import CutForest, cut_forest
from tests.forests import Forest, forests, make_forest
from tests.unit.gated_delta_rule_common import Inputs, assert_close, make_inputs, nan_in_fresh_memory

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")
__all__ = ["nan_in_fresh_memory"]

NAMES = ["o", "q", "k", "v", "g", "beta", "initial_state"]


@dataclass(kw_only=True)
class Board:
    """What all slices have published: boundary states (by piece of the whole stream) and their gradients."""

    forest: CutForest
    states: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)


class BoardCarrier(ExchangeCarrier):
    """Slices run in order, so everything that a slice needs is on the board when it asks."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        forest = board.forest
        self.exports = forest.exports[forest.rank[forest.exports] == rank].tolist()
        self.imports = forest.imports(rank).tolist()
        self.through = [n for n, b in enumerate(self.exports) if forest.entry[b] >= 0]

    def incoming(self, states: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        self.board.calls.append(("incoming", self.rank))
        assert len(transitions) == len(self.through)
        M = dict(zip(self.through, transitions, strict=True))
        for n, (b, state) in enumerate(zip(self.exports, states, strict=True)):
            source = int(self.board.forest.entry[b])
            self.board.states[b] = state + M[n] @ self.board.states[source] if n in M else state.clone()
        known = [self.board.states[b] for b in self.imports]
        found = torch.stack(known) if known else states.new_empty(0, *states.shape[1:])
        return lambda: found

    def outgoing_gradient(self, d_incoming: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        self.board.calls.append(("outgoing_gradient", self.rank))
        gradients = self.board.gradients
        for b, gradient in zip(self.imports, d_incoming, strict=True):
            gradients[b] = gradients.get(b, 0) + gradient
        whole = [gradients[b] for b in self.exports]  # later slices ran before
        for t, n in enumerate(self.through):
            source = int(self.board.forest.entry[self.exports[n]])
            gradients[source] = gradients.get(source, 0) + transitions[t].mT @ whole[n]
        found = torch.stack(whole) if whole else d_incoming.new_empty(0, *d_incoming.shape[1:])
        return lambda: found


def _run_sliced(forest: Forest, x: Inputs, d_out: Tensor, given_nodes: list[int], initial: Tensor) -> list[Tensor]:
    cut = cut_forest(forest.parent, forest.start, forest.length, forest.cuts)
    starts_node = cut.start == forest.start[cut.node]
    given = np.array([p for n in given_nodes for p in np.flatnonzero(starts_node & (cut.node == n))], dtype=np.int64)
    board = Board(forest=cut)
    runs = []
    for r in range(cut.num_slices):
        a, b = int(cut.cuts[r]), int(cut.cuts[r + 1])
        part = Inputs(**{n: t.detach()[:, a:b].requires_grad_() for n, t in vars(x).items()})
        own = np.flatnonzero(cut.rank[given] == r)
        s = initial.detach()[own].requires_grad_()
        context = ScanContext.build(cut.slice_pieces(r, given), carrier=BoardCarrier(board, r), num_given=len(own))
        o, _ = gated_delta_rule(*part.leaves(), initial_state=s, use_qk_l2norm=True, context=context)
        runs.append((o, [*part.leaves(), s], d_out[:, a:b]))
    grads = [torch.autograd.grad((o * d).sum(), leaves) for o, leaves, d in reversed(runs)][::-1]
    ranks = list(range(cut.num_slices))
    assert board.calls == [("incoming", r) for r in ranks] + [("outgoing_gradient", r) for r in reversed(ranks)]
    joined = [torch.cat([g[i] for g in grads], 1) for i in range(5)]
    return [torch.cat([o for o, _, _ in runs], 1), *joined, torch.cat([g[5] for g in grads])]


def _run_whole(forest: Forest, x: Inputs, d_out: Tensor, given_nodes: list[int], initial: Tensor) -> list[Tensor]:
    slot = np.full(len(forest.parent), -1)
    slot[given_nodes] = np.arange(len(given_nodes))
    pieces = Pieces(
        start=forest.start,
        length=forest.length,
        parent=forest.parent,
        slot=slot,
        num_slots=len(given_nodes),
        exports=np.zeros(0, dtype=np.int64),
    )
    context = ScanContext.build(pieces, num_given=len(given_nodes))
    o, _ = gated_delta_rule(*x.leaves(), initial_state=initial, use_qk_l2norm=True, context=context, backend="naive")
    return [o, *torch.autograd.grad((o * d_out).sum(), [*x.leaves(), initial], allow_unused=True)]


def _check(forest: Forest, *, given_nodes: list[int], regime: str, seed: int = 0) -> None:
    x = make_inputs(forest.num_rows, regime=regime, Hk=1, H=2, K=5, V=3, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    d_out = torch.randn(x.v.shape, generator=rng, dtype=torch.float64)
    initial = torch.randn(len(given_nodes), 2, 5, 3, generator=rng, dtype=torch.float64).requires_grad_()
    want = _run_whole(forest, x, d_out, given_nodes, initial)
    if want[-1] is None:
        want[-1] = torch.zeros_like(initial)
    assert_close(NAMES, _run_sliced(forest, x, d_out, given_nodes, initial), want, 1e-10)


@settings(max_examples=60, deadline=None)
@given(forest=forests(), regime=st.sampled_from(["plain", "retention"]), data=st.data())
def test_random_forests_cut_anywhere_equal_one_process(forest: Forest, regime: str, data: st.DataObject) -> None:
    roots = np.flatnonzero(forest.parent < 0).tolist()
    given_nodes = [n for n in roots if data.draw(st.booleans())]
    _check(forest, given_nodes=given_nodes, regime=regime)


@settings(max_examples=20, deadline=None)
@given(forest=forests())
def test_slices_without_gradients_give_the_outputs_of_slices_with_them(forest: Forest) -> None:
    x = make_inputs(forest.num_rows, Hk=1, H=2, K=5, V=3)
    cut = cut_forest(forest.parent, forest.start, forest.length, forest.cuts)
    outputs = []
    for wanted in (True, False):
        board = Board(forest=cut)
        with torch.set_grad_enabled(wanted):
            for r in range(cut.num_slices):
                part = [t.detach()[:, cut.cuts[r] : cut.cuts[r + 1]].requires_grad_(wanted) for t in x.leaves()]
                pieces = cut.slice_pieces(r, np.zeros(0, np.int64))
                o, _ = gated_delta_rule(*part, context=ScanContext.build(pieces, carrier=BoardCarrier(board, r)))
                outputs.append(o.detach())
    half = len(outputs) // 2
    for with_gradients, without in zip(outputs[:half], outputs[half:], strict=True):
        torch.testing.assert_close(without, with_gradients, rtol=1e-12, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(forest=forests(max_nodes=8, max_length=90, max_slices=5), regime=st.sampled_from(["plain", "retention"]))
def test_forests_of_long_nodes_cut_anywhere_equal_one_process(forest: Forest, regime: str) -> None:
    _check(forest, given_nodes=[], regime=regime)


@pytest.mark.parametrize("regime", ["plain", "retention", "decay"])
@pytest.mark.parametrize("cuts", [[0.25, 0.5, 0.75], [0.0, 0.0, 0.5, 0.501, 0.505, 1.0], [0.1, 0.1, 0.1, 0.9]])
def test_a_chain_over_many_slices_equals_one_process(cuts: list[float], regime: str) -> None:
    _check(make_forest([-1], [300], cuts), given_nodes=[0], regime=regime)


def test_siblings_on_other_slices_add_up_in_their_prefix() -> None:
    forest = make_forest([-1, *[0] * 5, 3, 3], [130, 70, 1, 66, 30, 2, 64, 65], [0.2, 0.45, 0.5, 0.8])
    _check(forest, given_nodes=[], regime="retention")


def test_transitions_are_computed_for_through_paths_only() -> None:
    forest = cut_forest(
        np.array([-1, 0, 0]), np.array([0, 100, 150]), np.array([100, 50, 50]), np.array([0, 60, 120, 200])
    )
    through = [len(ScanContext.build(forest.slice_pieces(r, np.zeros(0, np.int64))).schedule.through) for r in range(3)]
    assert through == [0, 2, 0]


def test_local_carrier_refuses_slices_with_neighbours() -> None:
    forest = cut_forest(np.array([-1]), np.array([0]), np.array([8]), np.array([0, 4, 8]))
    x = make_inputs(4)
    for rank in range(2):
        pieces = forest.slice_pieces(rank, np.zeros(0, np.int64))
        context = ScanContext.build(pieces, carrier=LocalCarrier())
        with pytest.raises(
            ValueError, match=r"exports 1 states but LocalCarrier|LocalCarrier brought states of shape \(0, 6, 7, 5\)"
        ):
            gated_delta_rule(*x.leaves(), context=context)


def test_an_empty_slice_calls_its_carrier_both_ways() -> None:
    forest = cut_forest(np.array([-1]), np.array([0]), np.array([8]), np.array([0, 8, 8]))
    board = Board(forest=forest)
    x = make_inputs(0)
    pieces = forest.slice_pieces(1, np.zeros(0, np.int64))
    o, _ = gated_delta_rule(*x.leaves(), context=ScanContext.build(pieces, carrier=BoardCarrier(board, 1)))
    o.sum().backward()
    assert board.calls == [("incoming", 1), ("outgoing_gradient", 1)]
    assert x.q.grad is not None


def test_heads_run_in_blocks_with_equal_bits() -> None:
    x = make_inputs(150, Hk=2, H=4)
    context = ScanContext.build(chain_pieces(150))
    o, _ = gated_delta_rule(*x.leaves(), context=context)
    blocks = [
        gated_delta_rule(
            x.q[:, :, i : i + 1],
            x.k[:, :, i : i + 1],
            *(t[:, :, 2 * i : 2 * i + 2] for t in (x.v, x.g, x.beta)),
            context=context,
        )[0]
        for i in range(2)
    ]
    assert_close(["o"], [torch.cat(blocks, 2)], [o], 1e-13)
