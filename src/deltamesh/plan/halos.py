"""Halos: for the causal convolution of width W, the W - 1 rows before each piece on its path.

They may span the parent, the grandparent, and several earlier slices; before a root there is nothing.
"""

from dataclasses import dataclass

import numpy as np

from deltamesh.plan.exchange import RowExchange, plan_row_exchanges
from deltamesh.plan.pieces import Ints
from deltamesh.plan.slices import CutForest
from deltamesh.tree.prefix_tree import ragged_ranges


@dataclass(frozen=True, kw_only=True, eq=False)
class HaloPlan:
    """One rank's convolution taps.

    Attributes:
        exchange: brings the rows of earlier slices, R of them.
        head_rows: int64 [h], local rows among the first W - 1 of a piece, whose taps are listed. All other rows have
            their W - 1 predecessors directly before them in the slice.
        head_taps: int64 [h, W], index into (T local rows, R received rows, one zero row); the last tap is the row.
    """

    exchange: RowExchange
    head_rows: Ints
    head_taps: Ints


def plan_halos(forest: CutForest, width: int) -> list[HaloPlan]:
    """Plans the halo exchange of every slice.

    Args:
        forest: the cut stream.
        width: taps W of the convolution, at least 1.
    """
    heads = np.minimum(forest.length, width - 1)
    head_rows = ragged_ranges(forest.start, heads)
    before = row_predecessors(forest)
    taps = np.full((len(head_rows), width), -1, dtype=np.int64)
    taps[:, -1] = head_rows
    for j in range(width - 2, -1, -1):
        later = taps[:, j + 1]
        taps[:, j] = np.where(later >= 0, before[later], -1)
    bounds = np.searchsorted(head_rows, forest.cuts)
    own_taps = [taps[bounds[r] : bounds[r + 1]] for r in range(forest.num_slices)]
    needs = [np.unique(t[(t >= 0) & (t < forest.cuts[r])]) for r, t in enumerate(own_taps)]
    exchanges = plan_row_exchanges(needs, forest.cuts)
    plans = []
    for r, tap in enumerate(own_taps):
        first, rows = forest.cuts[r], forest.cuts[r + 1] - forest.cuts[r]
        elsewhere = rows + np.searchsorted(needs[r], tap)
        index = np.where(tap >= first, tap - first, np.where(tap >= 0, elsewhere, rows + len(needs[r])))
        plans.append(HaloPlan(exchange=exchanges[r], head_rows=tap[:, -1] - first, head_taps=index))
    return plans


def row_predecessors(forest: CutForest) -> Ints:
    """int64 [T]: the row before each row on its path, -1 at roots."""
    rows = int(forest.cuts[-1])
    before = np.arange(-1, rows - 1, dtype=np.int64)
    last = forest.start + forest.length - 1
    before[forest.start] = np.where(forest.parent >= 0, last[forest.parent], -1)
    return before
