"""In which order one program visits the pieces of a tree, and where it keeps states on the way. Pure index work.

A job is a list of pieces that one program visits for its head and its block of value columns. Forward, the state stays
in registers while the next piece continues the one before; at a fork it is saved, and loaded again for every further
child. Backward visits the same list in reverse and adds the gradients of the children where their parent ends.

Two ways to make jobs. "tree": all pieces that hang together are one job, so one launch does everything. "chains": every
fork ends the job except for its heaviest child, so branches run side by side, in as many launches ("waves") as there
are such ends on a path; that is at most log2 of the number of pieces.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deltamesh.plan.pieces import Bools, Ints, Pieces

CHUNK_ROWS = 64
KEEP, NOTHING = -2, -1

Split = Literal["tree", "chains"]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One piece of a job.

    Attributes:
        piece: its number.
        source: KEEP the state that the program holds, NOTHING, or the number of a state in memory.
        kept: backward, the piece visited after this one continues it, so its gradient is already held.
    """

    piece: int
    source: int
    kept: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Jobs:
    """Jobs in waves; a job needs only states that earlier waves have saved (backward: later waves).

    Attributes:
        waves: wave -> job -> visits.
        saved: piece -> number of its end state in memory. Numbers below `num_sources` are given, not saved.
        num_sources: states that are in memory before the first wave.
    """

    waves: tuple[tuple[tuple[Visit, ...], ...], ...]
    saved: dict[int, int]
    num_sources: int

    @property
    def num_states(self) -> int:
        """States in memory, given and saved."""
        return self.num_sources + len(self.saved)

    def visits(self) -> Iterable[Visit]:
        """All visits, in an order that has parents first."""
        return (visit for wave in self.waves for job in wave for visit in job)


def make_jobs(pieces: Pieces, members: Bools, *, wanted: Iterable[int], split: Split, from_slots: bool = True) -> Jobs:
    """Jobs that visit the pieces `members`.

    Args:
        pieces: of the slice.
        members: bool [n]; the parent of a member is a member.
        wanted: pieces whose end states must be saved.
        split: see the top of this file.
        from_slots: memory starts with the states of all slots; else pieces without a parent start from NOTHING.

    Example:
        >>> pieces = Pieces(start=np.array([0, 3, 5]), length=np.array([3, 2, 2]), parent=np.array([-1, 0, 0]),
        ...                 slot=np.array([-1, -1, -1]), num_slots=0, exports=np.array([], dtype=np.int64))
        >>> [[v.piece for v in job] for job in make_jobs(pieces, np.full(3, True), wanted=(), split="tree").waves[0]]
        [[0, 1, 2]]
    """
    parent, slot = pieces.parent.tolist(), pieces.slot.tolist()
    children: dict[int, list[int]] = {}
    roots: list[int] = []
    weight = -(-pieces.length // CHUNK_ROWS)
    for piece in np.flatnonzero(members).tolist():
        if parent[piece] < 0:
            roots.append(piece)
        else:
            assert members[parent[piece]], "the parent of a member is a member"
            children.setdefault(parent[piece], []).append(piece)
    below = weight.tolist()
    for piece in sorted(children, reverse=True):
        below[piece] += sum(below[child] for child in children[piece])
    for family in children.values():
        family.sort(key=lambda child: (-below[child], child))  # the heaviest child goes on in registers

    num_sources = pieces.num_slots if from_slots else 0
    need = {int(p) for p in wanted} | {p for p, family in children.items() if len(family) > 1}
    saved = {piece: num_sources + n for n, piece in enumerate(sorted(need))}
    waves: list[list[tuple[Visit, ...]]] = []
    todo = [(root, 0) for root in reversed(roots)]
    while todo:
        first, wave = todo.pop()
        order: list[int] = []
        stack = [first]
        while stack:
            piece = stack.pop()
            order.append(piece)
            family = children.get(piece, [])
            if split == "tree":
                stack.extend(reversed(family))
            elif family:
                stack.append(family[0])
                todo.extend((child, wave + 1) for child in reversed(family[1:]))
        waves.extend([] for _ in range(wave + 1 - len(waves)))
        waves[wave].append(
            tuple(
                Visit(
                    piece=piece,
                    source=_source(piece, order[n - 1] if n else -1, parent, slot, saved, from_slots),
                    kept=n + 1 < len(order) and parent[order[n + 1]] == piece,
                )
                for n, piece in enumerate(order)
            )
        )
    return Jobs(waves=tuple(map(tuple, waves)), saved=saved, num_sources=num_sources)


def _source(piece: int, before: int, parent: list[int], slot: list[int], saved: dict[int, int], slots: bool) -> int:
    if parent[piece] >= 0:
        return KEEP if parent[piece] == before else saved[parent[piece]]
    return slot[piece] if slots and slot[piece] >= 0 else NOTHING


def choose_split(pieces: Pieces, *, programs_per_job: int, num_multiprocessors: int) -> Split:
    """The way that is expected to finish first.

    A program takes its chunks one after another. "tree" needs the time of the largest tree. "chains" needs in each wave
    that of its longest chain, but no less than its chunks spread over all multiprocessors.

    Args:
        pieces: of the slice.
        programs_per_job: heads times blocks of value columns.
        num_multiprocessors: of the device.

    Example:
        >>> pieces = Pieces(start=np.arange(3) * 640, length=np.full(3, 640), parent=np.array([-1, 0, 0]),
        ...                 slot=np.full(3, -1), num_slots=0, exports=np.array([], dtype=np.int64))
        >>> choose_split(pieces, programs_per_job=4, num_multiprocessors=132)
        'chains'
        >>> choose_split(pieces, programs_per_job=4000, num_multiprocessors=132)
        'tree'
    """
    members: Bools = np.full(len(pieces.start), True)
    weight = (-(-pieces.length // CHUNK_ROWS)).tolist()
    share = programs_per_job / num_multiprocessors
    cost: dict[Split, float] = {}
    for split in ("tree", "chains"):
        cost[split] = 0.0
        for wave in make_jobs(pieces, members, wanted=(), split=split).waves:
            chunks = [sum(weight[visit.piece] for visit in job) for job in wave]
            cost[split] += max(max(chunks), sum(chunks) * share)
    return "chains" if cost["chains"] < 0.9 * cost["tree"] else "tree"


def chunk_offsets(length: Ints) -> Ints:
    """int64 [n]: number of the first chunk of each piece.

    Example:
        >>> chunk_offsets(np.array([1, 65, 64])).tolist()
        [0, 1, 3]
    """
    count = -(-length // CHUNK_ROWS)
    return np.cumsum(count) - count
