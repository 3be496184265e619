"""Ancestors: the keys and values of earlier slices that a slice's attention rows need.

In depth-first pre-order a row before a slice is an ancestor of some row of the slice exactly if it is an ancestor of
the slice's first row. So every slice needs one path, and sends to a later slice only what lies on that slice's path.
"""

from dataclasses import dataclass

import numpy as np

from deltamesh.plan.exchange import RowExchange, plan_row_exchanges
from deltamesh.plan.pieces import Ints
from deltamesh.plan.slices import CutForest
from deltamesh.tree.prefix_tree import ragged_ranges


@dataclass(frozen=True, kw_only=True, eq=False)
class AncestorPlan:
    """One rank's attention: key rows are (R received rows, T local rows), queries are the local ones.

    Attributes:
        exchange: brings the R rows of earlier slices, one path, ascending.
        segment_start: int64 [s], first key row of each segment; segments tile the key rows.
        segment_length: int64 [s], at least 1.
        segment_parent: int64 [s], segment that each one continues, or -1. A row attends to itself, to the rows before
            it in its segment, and to all rows of the segments above.
    """

    exchange: RowExchange
    segment_start: Ints
    segment_length: Ints
    segment_parent: Ints


def plan_ancestors(forest: CutForest) -> list[AncestorPlan]:
    """Plans the key/value exchange of every slice."""
    paths = [_path_above(forest, r) for r in range(forest.num_slices)]
    needs = [ragged_ranges(forest.start[path], forest.length[path]) for path in paths]
    exchanges = plan_row_exchanges(needs, forest.cuts)
    plans = []
    for r, path in enumerate(paths):
        mine = np.flatnonzero(forest.rank == r)
        pieces = np.concatenate([path, mine])
        above = forest.parent[pieces]
        # a path piece that nothing else hangs on continues in the next one: one segment for both
        attached = np.zeros(len(forest.start) + 1, dtype=np.bool_)
        attached[forest.parent[mine]] = True
        joins = np.zeros(len(pieces), dtype=np.bool_)
        joins[1 : len(path)] = ~attached[path[:-1]]
        opens = np.flatnonzero(~joins)
        segment = np.cumsum(~joins) - 1
        length = forest.length[pieces]
        key_start = np.cumsum(length) - length
        total = int(length.sum())
        parent = np.where(above >= 0, segment[np.searchsorted(pieces, np.maximum(above, 0))], -1)[opens]
        start = key_start[opens]
        plans.append(
            AncestorPlan(
                exchange=exchanges[r],
                segment_start=start,
                segment_length=np.diff(np.append(start, total)),
                segment_parent=parent,
            )
        )
    return plans


def _path_above(forest: CutForest, rank: int) -> Ints:
    """Pieces of earlier slices that are ancestors of the first row of slice `rank`, ascending."""
    if forest.cuts[rank] == forest.cuts[rank + 1]:
        return np.zeros(0, dtype=np.int64)
    piece = int(np.searchsorted(forest.start, forest.cuts[rank]))
    path = []
    while (piece := int(forest.parent[piece])) >= 0:
        path.append(piece)
    return np.array(path[::-1], dtype=np.int64)
