"""Slices: the tree cut into contiguous parts, one for each cp rank, and the pieces of nodes that the cuts make.

A cut may fall anywhere: inside a node, at a fork, twice in the same place (an empty slice).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deltamesh.plan.pieces import Bools, Ints, Pieces


@dataclass(frozen=True, kw_only=True, eq=False)
class CutForest:
    """All pieces of a stream, over all slices, in stream order.

    Attributes:
        cuts: int64 [P + 1], slice r owns rows cuts[r] .. cuts[r + 1].
        start: int64 [n], first stream row of each piece.
        length: int64 [n], rows of each piece, at least 1.
        node: int64 [n], node that the piece is a part of.
        rank: int64 [n], slice that owns the piece.
        parent: int64 [n], piece before it on its path, or -1.
    """

    cuts: Ints
    start: Ints
    length: Ints
    node: Ints
    rank: Ints
    parent: Ints

    @property
    def num_slices(self) -> int:
        """Number of slices P."""
        return len(self.cuts) - 1

    @cached_property
    def enters(self) -> Bools:
        """bool [n]: the piece continues a piece of an earlier slice."""
        has_parent = self.parent >= 0
        crosses: Bools = has_parent & (self.rank[self.parent] != self.rank)
        return crosses

    @cached_property
    def entry(self) -> Ints:
        """int64 [n]: the piece of an earlier slice through which the path to each piece enters its slice, or -1."""
        entry = np.where(self.enters, self.parent, -1)
        inherits = (self.parent >= 0) & ~self.enters
        for i in np.flatnonzero(inherits):  # ascending, so the parent's entry is final
            entry[i] = entry[self.parent[i]]
        return entry

    @cached_property
    def exports(self) -> Ints:
        """int64 [m]: pieces whose last state some later slice continues (boundary states), ascending."""
        return np.unique(self.parent[self.enters])

    @cached_property
    def exporting(self) -> Bools:
        """bool [n]: pieces that are exported or have an exported piece below them in their slice."""
        mask = np.zeros(len(self.start), dtype=np.bool_)
        mask[self.exports] = True
        for i in np.flatnonzero((self.parent >= 0) & ~self.enters)[::-1].tolist():  # children before parents
            mask[self.parent[i]] |= mask[i]
        return mask

    def imports(self, rank: int) -> Ints:
        """int64: the boundary states that pieces of slice `rank` continue, ascending."""
        return np.unique(self.parent[self.enters & (self.rank == rank)])

    def slice_pieces(self, rank: int, given: Ints) -> Pieces:
        """The pieces of one slice, with its imported states numbered: given initial states first, then imports.

        Args:
            rank: the slice.
            given: pieces (of any slice) that start from a given initial state; only those of this slice take a slot.
        """
        mine = np.flatnonzero(self.rank == rank)
        first = int(mine[0]) if len(mine) else 0
        own_given = given[self.rank[given] == rank] if len(given) else given
        imports = self.imports(rank)
        slot = np.full(len(mine), -1, dtype=np.int64)
        slot[own_given - first] = np.arange(len(own_given))
        enters = np.flatnonzero(self.enters[mine])
        slot[enters] = len(own_given) + np.searchsorted(imports, self.parent[mine[enters]])
        local = (self.parent[mine] >= 0) & ~self.enters[mine]
        return Pieces(
            start=self.start[mine] - self.cuts[rank],
            length=self.length[mine],
            parent=np.where(local, self.parent[mine] - first, -1),
            slot=slot,
            num_slots=len(own_given) + len(imports),
            exports=self.exports[self.rank[self.exports] == rank] - first,
        )


def cut_forest(node_parent: Ints, node_start: Ints, node_length: Ints, cuts: Ints) -> CutForest:
    """Cuts a forest whose nodes tile the stream in depth-first pre-order (or any order with parents first).

    Args:
        node_parent: int64 [n], -1 for roots.
        node_start: int64 [n], first stream row, ascending.
        node_length: int64 [n], at least 1.
        cuts: int64 [P + 1], non-decreasing, from 0 to the number of rows.

    Raises:
        ValueError: cuts that do not start at 0, end at the number of rows, or that decrease.

    Example:
        >>> forest = cut_forest(np.array([-1]), np.array([0]), np.array([6]), np.array([0, 4, 6]))
        >>> forest.parent.tolist(), forest.exports.tolist()
        ([-1, 0], [0])
    """
    rows = int(node_length.sum())
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != rows or np.any(np.diff(cuts) < 0):
        raise ValueError(f"cuts={cuts.tolist()} must be non-decreasing, from 0 to the number of rows, {rows}")
    start = np.unique(np.concatenate([node_start, cuts[cuts < rows]]))
    length = np.diff(np.append(start, rows))
    node = np.searchsorted(node_start, start, side="right") - 1
    first_of_node = start == node_start[node]
    last_piece = np.searchsorted(start, node_start + node_length - 1, side="right") - 1  # per node
    above = node_parent[node]
    parent = np.where(first_of_node, np.where(above >= 0, last_piece[above], -1), np.arange(len(start)) - 1)
    return CutForest(
        cuts=cuts,
        start=start,
        length=length,
        node=node,
        rank=np.searchsorted(cuts, start, side="right") - 1,
        parent=parent,
    )
