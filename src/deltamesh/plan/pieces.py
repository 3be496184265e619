"""Pieces: runs of consecutive rows, each of which continues another piece, an imported state, or nothing.

A piece is the part of one tree node inside one slice, so it is where the tree meets the cuts. Scan, convolution and
attention all see a slice as pieces and nothing else.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """The pieces of one slice, in row order (so a parent always stands before its children).

    Attributes:
        start: int64 [n], first row of each piece, relative to the slice. Pieces tile the slice without gaps.
        length: int64 [n], rows of each piece, at least 1.
        parent: int64 [n], index of the piece of this slice that the piece continues, or -1.
        slot: int64 [n], index of the imported state that the piece continues, or -1. A piece with neither a parent
            nor a slot starts from the zero state; no piece has both.
        num_slots: number of imported states (boundary states of earlier slices and given initial states).
        exports: int64 [m], pieces whose last state leaves the slice (ascending, unique).
    """

    start: Ints
    length: Ints
    parent: Ints
    slot: Ints
    num_slots: int
    exports: Ints

    @property
    def num_rows(self) -> int:
        """Rows of the slice."""
        return int(self.length.sum())

    @cached_property
    def entry_slot(self) -> Ints:
        """int64 [n]: the slot through which the path to each piece enters the slice, or -1 where it starts inside."""
        entry = self.slot.copy()
        for i in np.flatnonzero(self.parent >= 0):  # ascending: the parent's entry is final
            entry[i] = entry[self.parent[i]]
        return entry

    @cached_property
    def exporting(self) -> Bools:
        """bool [n]: pieces that are exported or have an exported piece below them in this slice."""
        mask = np.zeros(len(self.start), dtype=np.bool_)
        mask[self.exports] = True
        for i in np.flatnonzero(self.parent >= 0)[::-1]:
            mask[self.parent[i]] |= mask[i]
        return mask

    @cached_property
    def through(self) -> Ints:
        """int64 [t]: positions in `exports` whose path enters through a slot; only these need a transition M."""
        return np.flatnonzero(self.entry_slot[self.exports] >= 0)


def chain_pieces(num_rows: int, *, has_initial_state: bool = False) -> Pieces:
    """One unbroken sequence of `num_rows` rows as pieces.

    Example:
        >>> chain_pieces(5).length.tolist()
        [5]
    """
    n = int(num_rows > 0)
    return Pieces(
        start=np.zeros(n, dtype=np.int64),
        length=np.full(n, num_rows, dtype=np.int64),
        parent=np.full(n, -1, dtype=np.int64),
        slot=np.full(n, 0 if has_initial_state else -1, dtype=np.int64),
        num_slots=int(has_initial_state),
        exports=np.zeros(0, dtype=np.int64),
    )
