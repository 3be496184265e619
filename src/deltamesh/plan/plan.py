"""The plan of a micro-batch: everything index-like that its layers need, for every slice.

A pure function of token ids, targets and the degree: each rank computes the same plan and compares only its digest.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltamesh.plan.ancestors import AncestorPlan, plan_ancestors
from deltamesh.plan.carrier import CarrierName, RuleShape, StateLinks, choose_carrier, plan_carrier
from deltamesh.plan.cost import CostModel
from deltamesh.plan.cuts import balanced_cuts, slice_work, through_rows
from deltamesh.plan.halos import HaloPlan, plan_halos
from deltamesh.plan.pieces import Ints, Pieces
from deltamesh.plan.slices import CutForest, cut_forest
from deltamesh.tree import (
    Edges,
    PrefixTree,
    SequenceRows,
    all_sequence_rows,
    build_edges,
    build_prefix_tree,
    build_stream,
)

CutRule = Callable[[PrefixTree, int], Ints]
"""From a tree and the number of slices to cuts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlicePlan:
    """One cp rank's part of a micro-batch.

    Attributes:
        start, stop: rows of the stream that the slice owns.
        tokens: int64 [T], their token ids.
        positions: int64 [T], their depth on the path (rotary positions).
        pieces, links: the scan of this slice and the messages of its carrier.
        halo: the convolution's exchange and taps.
        ancestors: attention's exchange and segments.
        edge_rows: int64 [e], local row of each edge of this slice.
        edge_targets: int64 [e], target token of each edge.
        hidden_rows: int64 [h], local rows whose hidden states are wanted.
    """

    start: int
    stop: int
    tokens: Ints
    positions: Ints
    pieces: Pieces
    links: StateLinks
    halo: HaloPlan
    ancestors: AncestorPlan
    edge_rows: Ints
    edge_targets: Ints
    hidden_rows: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatchPlan:
    """A planned micro-batch.

    Attributes:
        tree, edges: what is computed.
        forest: the cut tree.
        slices: one part per cp rank.
        edge_counts, hidden_counts: edges and wanted hidden rows of each slice (output routes).
        hidden_of: per sequence, index of each position into the wanted hidden rows of all slices; None if not wanted.
        carrier: how boundary states are carried.
        work: planned cost of each slice.
        digest: hex digest of all of it; equal digests mean equal plans.
    """

    tree: PrefixTree
    edges: Edges
    forest: CutForest
    slices: tuple[SlicePlan, ...]
    edge_counts: tuple[int, ...]
    hidden_counts: tuple[int, ...]
    hidden_of: tuple[Ints | None, ...]
    carrier: Literal["scan", "pipeline"]
    work: tuple[float, ...]
    digest: str

    @property
    def busiest_over_mean(self) -> float:
        """Work of the busiest slice over the mean: 1 is perfect balance."""
        return max(self.work) * len(self.work) / sum(self.work)


def plan_micro_batch(
    sequences: Sequence[npt.ArrayLike],
    targets: Sequence[npt.ArrayLike | None],
    *,
    num_slices: int,
    conv_width: int,
    cost: CostModel,
    hidden_wanted: Sequence[bool] | None = None,
    cuts: CutRule | None = None,
    carrier: CarrierName = "scan",
    shape: RuleShape | None = None,
) -> MicroBatchPlan:
    """Plans a micro-batch for `num_slices` cp ranks.

    Args:
        sequences: token ids of each sequence.
        targets: target ids of each sequence (-100 ignored), or None.
        num_slices: cp degree.
        conv_width: taps of the causal convolution.
        cost: how rows are weighed when the cuts are chosen.
        hidden_wanted: whether the hidden states of each sequence are wanted.
        cuts: places the cuts instead of the cost; given the tree and `num_slices`, returns int64 [num_slices + 1].
        carrier: how boundary states are carried; "auto" compares costs, see `plan.carrier`.
        shape: of the gated delta rule, for that comparison.

    Raises:
        ValueError: an empty sequence, targets of another shape, impossible cuts, an unknown carrier.

    Example:
        >>> plan = plan_micro_batch([[5, 6, 7], [5, 6, 8]], [None, None], num_slices=2, conv_width=4, cost=CostModel())
        >>> [(s.start, s.stop) for s in plan.slices]
        [(0, 2), (2, 4)]
    """
    tree = build_prefix_tree(sequences)
    edges = build_edges(tree, targets)
    stream = build_stream(tree)
    cost_T = cost.rows(stream.position_T, edges.row_E)
    free = replace(cost, through=0.0)  # a pipeline computes no transitions
    forest = _cut(tree, cost_T, free, num_slices, cuts)
    carried_by = choose_carrier(forest, carrier, shape or RuleShape())
    if carried_by == "pipeline":
        cost = free
    else:
        forest = _cut(tree, cost_T, cost, num_slices, cuts)
    chosen = forest.cuts
    wanted = [False] * tree.num_sequences if hidden_wanted is None else list(hidden_wanted)
    rows = all_sequence_rows(tree)
    hidden_rows = _hidden_rows(rows, wanted)
    edge_bounds = np.searchsorted(edges.row_E, chosen)
    hidden_bounds = np.searchsorted(hidden_rows, chosen)
    no_states = np.zeros(0, dtype=np.int64)
    halos, ancestors = plan_halos(forest, conv_width), plan_ancestors(forest)
    links = plan_carrier(forest, carried_by)
    slices = tuple(
        SlicePlan(
            start=start,
            stop=stop,
            tokens=tree.tokens[start:stop],
            positions=stream.position_T[start:stop],
            pieces=forest.slice_pieces(r, no_states),
            links=links[r],
            halo=halos[r],
            ancestors=ancestors[r],
            edge_rows=edges.row_E[edge_bounds[r] : edge_bounds[r + 1]] - start,
            edge_targets=edges.target_E[edge_bounds[r] : edge_bounds[r + 1]],
            hidden_rows=hidden_rows[hidden_bounds[r] : hidden_bounds[r + 1]] - start,
        )
        for r, (start, stop) in enumerate(zip(chosen[:-1].tolist(), chosen[1:].tolist(), strict=True))
    )
    return MicroBatchPlan(
        tree=tree,
        edges=edges,
        forest=forest,
        slices=slices,
        edge_counts=tuple(np.diff(edge_bounds).tolist()),
        hidden_counts=tuple(np.diff(hidden_bounds).tolist()),
        hidden_of=tuple(np.searchsorted(hidden_rows, rows.of(s)) if want else None for s, want in enumerate(wanted)),
        carrier=carried_by,
        work=tuple(slice_work(cost_T + cost.through * through_rows(forest), chosen).tolist()),
        digest=_digest(tree, edges, forest, hidden_rows, halos, ancestors, carried_by),
    )


def _cut(
    tree: PrefixTree, cost_T: npt.NDArray[np.float64], cost: CostModel, num_slices: int, cuts: CutRule | None
) -> CutForest:
    chosen = balanced_cuts(tree, cost_T, cost, num_slices) if cuts is None else cuts(tree, num_slices)
    if len(chosen) != num_slices + 1:
        raise ValueError(f"{len(chosen)} cuts were given for {num_slices} slices; give {num_slices + 1}")
    return cut_forest(tree.node_parent, tree.node_start, tree.node_length, chosen)


def _hidden_rows(rows: SequenceRows, wanted: list[bool]) -> Ints:
    parts = [rows.of(s) for s, want in enumerate(wanted) if want]
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))


def _digest(
    tree: PrefixTree,
    edges: Edges,
    forest: CutForest,
    hidden_rows: Ints,
    halos: list[HaloPlan],
    ancestors: list[AncestorPlan],
    carrier: str,
) -> str:
    digest = hashlib.sha256(carrier.encode())
    exchanges = [plan.exchange for plan in halos] + [plan.exchange for plan in ancestors]
    splits = [np.array([exchange.send_splits, exchange.recv_splits]) for exchange in exchanges]
    arrays = [
        tree.tokens, tree.node_parent, tree.node_start, tree.sequence_node,
        edges.row_E, edges.target_E, edges.edge_of, hidden_rows,
        forest.cuts, forest.start, forest.parent, forest.exports, *splits,
    ]  # fmt: skip
    for array in arrays:
        digest.update(np.int64(array.size).tobytes() + np.ascontiguousarray(array, dtype=np.int64).tobytes())
    return digest.hexdigest()
