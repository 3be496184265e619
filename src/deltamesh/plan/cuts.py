"""Cuts: where the stream is cut, so that every slice has as much work as the others.

Most of a row's cost is the same wherever the cuts fall; only transitions are paid by slices that a path crosses. So the
cuts are found by a few rounds of "cut at the quantiles, see which rows are crossed, weigh them".
"""

import numpy as np

from deltamesh.plan.cost import CostModel, Floats
from deltamesh.plan.pieces import Bools, Ints
from deltamesh.plan.slices import CutForest, cut_forest
from deltamesh.tree import PrefixTree

_ROUNDS = 4


def balanced_cuts(tree: PrefixTree, cost_T: Floats, cost: CostModel, num_slices: int) -> Ints:
    """The best-balanced cuts found: int64 [num_slices + 1].

    Args:
        tree: what is cut.
        cost_T: float64 [T], cost of each row wherever the cuts fall.
        cost: for the rows whose cost depends on them.
        num_slices: cp degree.
    """
    best, best_work = quantile_cuts(cost_T, num_slices), np.inf
    cuts = best
    for _ in range(_ROUNDS if cost.through and num_slices > 2 else 1):
        weighed_T = cost_T + cost.through * through_rows(_cut(tree, cuts))
        work = slice_work(weighed_T, cuts).max()
        if work < best_work:
            best, best_work = cuts, work
        cuts = quantile_cuts(weighed_T, num_slices)
    return best


def quantile_cuts(cost_T: Floats, num_slices: int) -> Ints:
    """Cuts at the quantiles of the summed cost: int64 [num_slices + 1].

    Example:
        >>> quantile_cuts(np.array([1.0, 1.0, 1.0, 3.0]), 2).tolist()
        [0, 3, 4]
    """
    total = np.cumsum(cost_T)
    goals = (np.arange(1, num_slices) / num_slices) * (total[-1] if len(total) else 0.0)
    inner = np.searchsorted(total - cost_T / 2, goals)  # a row goes to the side that holds its middle
    return np.concatenate([[0], inner, [len(cost_T)]]).astype(np.int64)


def through_rows(forest: CutForest) -> Ints:
    """int64 [T]: 1 on rows that lie between a state that enters their slice and one that leaves it, else 0."""
    return np.repeat(((forest.entry >= 0) & forest.exporting).astype(np.int64), forest.length)


def slice_rows(forest: CutForest, pieces: Bools) -> Floats:
    """float64 [P]: rows of each slice that lie in the chosen pieces."""
    rows = np.zeros(forest.num_slices)
    np.add.at(rows, forest.rank[pieces], forest.length[pieces])
    return rows


def slice_work(cost_T: Floats, cuts: Ints) -> Floats:
    """float64 [P]: summed cost of each slice."""
    total = np.concatenate([[0.0], np.cumsum(cost_T)])
    return np.diff(total[cuts])


def _cut(tree: PrefixTree, cuts: Ints) -> CutForest:
    return cut_forest(tree.node_parent, tree.node_start, tree.node_length, cuts)
