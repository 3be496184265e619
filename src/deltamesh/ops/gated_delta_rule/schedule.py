"""Which chunks of rows run together, and in which order. Built once per micro-batch; pure index work.

A chunk is at most 64 rows that all start from one state: the state a chain left behind, an imported one, or nothing.
Inside a chunk the rows may fork: a row sees its ancestors through a mask, so many short nodes fill one chunk, and
exits give the states after the rows that other chunks continue. Long pieces are plain runs of 64 rows.

Letters: N chunks of a batch, C rows of the longest of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltamesh.plan.pieces import Pieces

CHUNK_ROWS = 64
_BUCKETS = np.array([1, 4, 8, 16, 32, 48, CHUNK_ROWS])
_CHAIN = tuple(range(-1, CHUNK_ROWS - 1))
NO_STATE = -1


@dataclass(kw_only=True, eq=False, slots=True)
class Chunk:
    """At most 64 rows that start from one state.

    Attributes:
        rows: row numbers, ancestors first.
        before: for each row the position in `rows` that it continues, or -1 for the state the chunk starts from.
        slot: slot the chunk starts from, or -1.
        parent: exit state the chunk starts from, or -1. With neither, the chunk starts from nothing.
        level: number of chunks before it on its path.
        exits: position in `rows` -> exit state.
        entering: the path comes from a carried slot, so the chunk waits for the exchange.
        exporting: a state below this chunk leaves the slice.
    """

    rows: list[int]
    before: list[int]
    slot: int
    parent: int
    level: int
    exits: dict[int, int] = field(default_factory=dict)
    entering: bool = False
    exporting: bool = False

    @property
    def is_chain(self) -> bool:
        """Whether every row continues the one before it."""
        return tuple(self.before) == _CHAIN[: len(self.before)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExitGroup:
    """The n-th exit of the first M chunks of a batch: of all that have so many.

    Attributes:
        states: exit state of each of these chunks, M consecutive numbers.
        position: int64 [M], the row of the chunk after which the state is taken.
        at: that position if it is the same in all chunks, else -1.
        exporting: per chunk, whether an export lies at or below the state.
    """

    states: range
    position: Tensor
    at: int
    exporting: bool

    def heads(self, num_heads: int) -> slice:
        """Its chunks where chunks and heads are one dim."""
        return slice(0, len(self.states) * num_heads)

    def row(self, x: Tensor) -> Tensor:
        """Row `position[n]` of x [N, H, C, R] for each of its chunks n: [M, H, R]."""
        if self.at >= 0:
            return x[: len(self.states), :, self.at]
        return x[torch.arange(len(self.position), device=x.device), :, self.position]

    def decay(self, D: Tensor) -> Tensor:
        """`row` as a column for each head: [M H, R, 1]."""
        row = self.row(D)
        return row.reshape(-1, row.shape[-1], 1)

    def add(self, x: Tensor, to: Tensor) -> None:
        """Adds x [M, H] to the place `position[n]` of `to` [N, H, C]."""
        if self.at >= 0:
            to[: len(self.states), :, self.at] += x
        else:
            to[torch.arange(len(self.position), device=x.device), :, self.position] += x

    def clear(self, x: Tensor) -> None:
        """Zeroes the place `position[n]` of x [M, H, C]."""
        if self.at >= 0:
            x[:, :, self.at] = 0
        else:
            x[torch.arange(len(self.position), device=x.device), :, self.position] = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkBatch:
    """Chunks of one level and of similar length that run together.

    Attributes:
        count, length: N and C.
        first_row: the first row if the chunks are one unbroken run of rows (then `rows` is not needed), else -1.
        rows: int64 [N * C], row numbers, chunk by chunk, padded with rows of the same chunk.
        valid: int64 [M], the places in `rows` that are not padding, or None if none is.
        ancestors: bool [1 or N, C, C], [i, j] true if row i sees row j (itself included); all false at padding.
        chains: every row of every chunk continues the one before it.
        slots, parents: the slot, or else the exit state, that each chunk starts from; None where they start from none.
        exits: see `ExitGroup`; chunks with more exits come first.
        by_row: the chunks in the order of their rows.
        entering, exporting: see `Chunk`; the same for all chunks.
    """

    count: int
    length: int
    first_row: int
    rows: Tensor
    valid: Tensor | None
    ancestors: Tensor
    chains: bool
    slots: tuple[int, ...] | None
    parents: tuple[int, ...] | None
    exits: tuple[ExitGroup, ...]
    by_row: tuple[int, ...]
    entering: bool
    exporting: bool

    @property
    def has_state(self) -> bool:
        """Whether the chunks start from a state."""
        return self.slots is not None or self.parents is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """A batch and the place of its chunks among those of its run."""

    batch: ChunkBatch
    chunks: slice

    def heads(self, num_heads: int) -> slice:
        """Its place where chunks and heads are one dim."""
        return slice(self.chunks.start * num_heads, self.chunks.stop * num_heads)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Batches whose state-independent work is done together.

    Attributes:
        members: the batches, parents first.
        whole: all their chunks as one batch; only what does not concern states is meaningful.
    """

    members: tuple[Member, ...]
    whole: ChunkBatch

    @property
    def has_state(self) -> bool:
        """Whether any chunk starts from a state."""
        return any(m.batch.has_state for m in self.members)

    @property
    def parents(self) -> list[int]:
        """Exit states that the chunks start from, one for each chunk that does."""
        return [p for m in self.members for p in m.batch.parents or ()]


class Schedule:
    """The chunks of one slice.

    Attributes:
        pieces: what it was built from.
        num_rows, num_slots: of the slice.
        num_given: slots 0..num_given-1 are given initial states, known before any exchange; the others are carried.
        num_states: number of exit states.
        exports: exit state of each export, in the order of `pieces.exports`.
        through: positions in `exports` whose path enters at a carried slot.
        finals: exit state of each piece of `final_pieces`.
        final_pieces: the pieces whose last state is asked for.
        uses: chunks that start from each exit state.
        passing: exit states that can be forgotten and computed again from the state before them: only one chunk
            continues them, and they are the only exit of theirs.
        device: where the index tensors live.
    """

    def __init__(self, pieces: Pieces, device: torch.device, *, num_given: int = 0, finals: Sequence[int] = ()) -> None:
        if not 0 <= num_given <= pieces.num_slots:
            raise ValueError(
                f"num_given={num_given} given states do not fit the {pieces.num_slots} slots of the slice; "
                f"slots 0..num_given-1 are the given ones"
            )
        bad = [f for f in finals if not 0 <= f < len(pieces.start)]
        if bad:
            raise ValueError(f"finals {bad} are no pieces; there are {len(pieces.start)}, numbered from 0")
        self.pieces = pieces
        self.device = device
        self.num_rows = pieces.num_rows
        self.num_slots = pieces.num_slots
        self.num_given = num_given
        self.final_pieces = tuple(int(f) for f in finals)
        self.through = tuple(np.flatnonzero(pieces.entry_slot[pieces.exports] >= num_given).tolist())
        builder = _Builder(pieces, num_given, set(self.final_pieces))
        self.groups, renumber = _number_exits(builder.chunks)
        end = {piece: renumber[state] for piece, state in builder.end_state.items()}
        self.num_states = len(renumber)
        self.exports = tuple(end[int(p)] for p in pieces.exports)
        self.finals = tuple(end[p] for p in self.final_pieces)
        self.uses = [0] * self.num_states
        for chunk in (c for group in self.groups for c in group):
            if chunk.parent >= 0:
                self.uses[chunk.parent] += 1
        self.passing = self._every_other_passing_state()
        self._leads_to_export = _states_above_exports(self.groups, self.exports)
        self._batches: dict[int, tuple[ChunkBatch, ...]] = {}
        self._runs: dict[tuple[int, int], tuple[Run, ...]] = {}
        self._chain_masks: dict[int, Tensor] = {}

    def batches(self, max_rows: int) -> tuple[ChunkBatch, ...]:
        """All batches, parents first, cut so that none has more than `max_rows` rows (but at least one chunk)."""
        if max_rows not in self._batches:
            parts: list[ChunkBatch] = []
            for group in self.groups:
                size = max(1, max_rows // max(len(c.rows) for c in group))
                parts.extend(self._batch(group[i : i + size]) for i in range(0, len(group), size))
            self._batches[max_rows] = tuple(parts)
        return self._batches[max_rows]

    def runs(self, max_rows: int, run_rows: int) -> tuple[Run, ...]:
        """All `batches(max_rows)` in order; neighbours are joined up to `run_rows` rows.

        Joined are the chunks of a chain: their states depend on each other, but most of the work does not.
        """
        if (max_rows, run_rows) not in self._runs:
            batches = self.batches(max_rows)
            runs: list[Run] = []
            start = 0
            for stop in range(1, len(batches) + 1):
                if stop < len(batches) and _continues(batches[start:stop], batches[stop], run_rows):
                    continue
                runs.append(_join(batches[start:stop]))
                start = stop
            self._runs[max_rows, run_rows] = tuple(runs)
        return self._runs[max_rows, run_rows]

    def _every_other_passing_state(self) -> frozenset[int]:
        asked = {*self.exports, *self.finals}
        passing: set[int] = set()
        for chunk in (c for group in self.groups for c in group):  # parents first
            state = next(iter(chunk.exits.values()), NO_STATE)
            if len(chunk.exits) == 1 and self.uses[state] == 1 and state not in asked and chunk.parent not in passing:
                passing.add(state)
        return frozenset(passing)

    def _batch(self, chunks: Sequence[Chunk]) -> ChunkBatch:
        length = max(len(c.rows) for c in chunks)
        rows = [c.rows + c.rows[:1] * (length - len(c.rows)) for c in chunks]
        full = all(len(c.rows) == length for c in chunks)
        valid = [n * length + i for n, c in enumerate(chunks) for i in range(len(c.rows))] if not full else []
        first = rows[0][0]
        run = len(chunks) == 1 and rows[0] == list(range(first, first + length))
        chains = full and all(c.is_chain for c in chunks)
        if chains:
            mask = self._chain_masks.get(length)
            if mask is None:
                mask = torch.ones(1, length, length, dtype=torch.bool, device=self.device).tril()
                self._chain_masks[length] = mask
        else:
            mask = torch.from_numpy(np.stack([_ancestors(c.before, length) for c in chunks])).to(self.device)
        ordered = [sorted(c.exits.items()) for c in chunks]
        exits = []
        for n in range(len(ordered[0])):
            position = [e[n][0] for e in ordered if len(e) > n]
            states = [e[n][1] for e in ordered if len(e) > n]
            assert states == list(range(states[0], states[0] + len(states))), "exit states of a batch are consecutive"
            exits.append(
                ExitGroup(
                    states=range(states[0], states[0] + len(states)),
                    position=torch.tensor(position, device=self.device),
                    at=position[0] if len(set(position)) == 1 else -1,
                    exporting=any(self._leads_to_export[s] for s in states),
                )
            )
        return ChunkBatch(
            count=len(chunks),
            length=length,
            first_row=first if run else -1,
            rows=torch.tensor(rows).flatten().to(self.device),
            valid=None if full else torch.tensor(valid, device=self.device),
            ancestors=mask,
            chains=chains,
            slots=tuple(c.slot for c in chunks) if chunks[0].slot >= 0 else None,
            parents=tuple(c.parent for c in chunks) if chunks[0].parent >= 0 else None,
            exits=tuple(exits),
            by_row=tuple(sorted(range(len(chunks)), key=lambda n: chunks[n].rows[0])),
            entering=chunks[0].entering,
            exporting=chunks[0].exporting,
        )


def _continues(run: Sequence[ChunkBatch], batch: ChunkBatch, run_rows: int) -> bool:
    """Whether the rows of `batch` follow those of the run and its chunks are of the same kind."""
    last = run[-1]
    return (
        last.first_row >= 0
        and batch.first_row == last.first_row + last.length
        and batch.length == last.length
        and batch.ancestors is last.ancestors
        and (batch.entering, batch.exporting) == (last.entering, last.exporting)
        and (len(run) + 1) * batch.length <= run_rows
    )


def _join(batches: Sequence[ChunkBatch]) -> Run:
    members, at = [], 0
    for batch in batches:
        members.append(Member(batch=batch, chunks=slice(at, at + batch.count)))
        at += batch.count
    whole = batches[0]
    if len(batches) > 1:
        rows = torch.cat([b.rows for b in batches])
        whole = replace(whole, count=at, rows=rows, slots=None, parents=None, exits=(), by_row=())
    return Run(members=tuple(members), whole=whole)


class _Builder:
    """Cuts pieces into chunks, and puts whole short pieces that start from the same state into one chunk."""

    def __init__(self, pieces: Pieces, num_given: int, finals: set[int]) -> None:
        self.pieces = pieces
        self.start, self.length = pieces.start.tolist(), pieces.length.tolist()
        self.carried = (pieces.entry_slot >= num_given).tolist()
        self.exporting = pieces.exporting.tolist()
        self.wanted = finals | set(pieces.exports.tolist())
        self.children: list[list[int]] = [[] for _ in self.start]
        entries: dict[int, list[int]] = {}
        for i, (parent, slot) in enumerate(zip(pieces.parent.tolist(), pieces.slot.tolist(), strict=True)):
            if parent >= 0:
                self.children[parent].append(i)
            else:
                entries.setdefault(slot, []).append(i)
        self.chunks: list[Chunk] = []
        self.end_state: dict[int, int] = {}
        self.num_states = 0
        # Every item: pieces (with the number of their rows already done) that start from one state.
        self.work = [(slot, NO_STATE, 0, [(p, 0) for p in members]) for slot, members in sorted(entries.items())]
        while self.work:
            self._pack(*self.work.pop())

    def _pack(self, slot: int, parent: int, level: int, items: list[tuple[int, int]]) -> None:
        chunk: Chunk | None = None
        for piece, done in items:
            left = self.length[piece] - done
            if left > CHUNK_ROWS:  # a plain run of 64 rows; the rest of the piece continues it
                run = self._open(slot, parent, level)
                self._append(run, piece, done, CHUNK_ROWS, -1)
                self.work.append((-1, self._exit(run, CHUNK_ROWS - 1), level + 1, [(piece, done + CHUNK_ROWS)]))
                continue
            if chunk is None or len(chunk.rows) + left > CHUNK_ROWS:
                chunk = self._open(slot, parent, level)
            self._absorb(chunk, piece, done)

    def _absorb(self, chunk: Chunk, root: int, done: int) -> None:
        """Adds the rest of `root`, then depth first all descendants that fit whole; the others continue an exit."""
        stack = [(root, done, -1)]
        while stack:
            piece, done, before = stack.pop()
            self._append(chunk, piece, done, self.length[piece] - done, before)
            last = len(chunk.rows) - 1
            # What is on the stack already has its place in the chunk.
            room = CHUNK_ROWS - len(chunk.rows) - sum(self.length[p] for p, _, _ in stack)
            fits: list[int] = []
            rest: list[int] = []
            for child in self.children[piece]:
                (fits if self.length[child] <= room else rest).append(child)
                room -= self.length[child] if self.length[child] <= room else 0
            stack.extend((child, 0, last) for child in reversed(fits))
            if rest or piece in self.wanted:
                state = self._exit(chunk, last)
                self.end_state[piece] = state
                if rest:
                    self.work.append((-1, state, chunk.level + 1, [(child, 0) for child in rest]))

    def _open(self, slot: int, parent: int, level: int) -> Chunk:
        chunk = Chunk(rows=[], before=[], slot=slot, parent=parent, level=level)
        self.chunks.append(chunk)
        return chunk

    def _append(self, chunk: Chunk, piece: int, done: int, count: int, before: int) -> None:
        at = len(chunk.rows)
        first = self.start[piece] + done
        chunk.rows.extend(range(first, first + count))
        chunk.before.extend([before, *range(at, at + count - 1)])
        chunk.entering = self.carried[piece]
        chunk.exporting |= self.exporting[piece]

    def _exit(self, chunk: Chunk, position: int) -> int:
        state = self.num_states
        self.num_states += 1
        chunk.exits[position] = state
        return state


def _number_exits(chunks: Iterable[Chunk]) -> tuple[list[list[Chunk]], dict[int, int]]:
    """Groups chunks that can run together, parents first, and numbers exit states so that a group's are consecutive."""
    groups: dict[tuple[int, ...], list[Chunk]] = {}
    for c in chunks:
        bucket = int(_BUCKETS[np.searchsorted(_BUCKETS, len(c.rows))])
        key = (c.level, bucket, c.entering, c.exporting, c.slot >= 0, c.parent >= 0)
        groups.setdefault(key, []).append(c)
    ordered = [sorted(groups[key], key=lambda c: (-len(c.exits), c.rows[0])) for key in sorted(groups)]
    renumber: dict[int, int] = {}
    for group in ordered:
        per_chunk = [sorted(c.exits.items()) for c in group]
        for n in range(len(per_chunk[0])):
            for e in per_chunk:
                if len(e) > n:
                    renumber[e[n][1]] = len(renumber)
    for c in chunks:
        c.exits = {position: renumber[state] for position, state in c.exits.items()}
        c.parent = renumber[c.parent] if c.parent >= 0 else NO_STATE
    return ordered, renumber


def _states_above_exports(groups: Sequence[Sequence[Chunk]], exports: Sequence[int]) -> dict[int, bool]:
    """Per exit state: whether an export lies at it or below it."""
    wanted = set(exports)
    leads: dict[int, bool] = {}
    for group in reversed(groups):  # children first
        for c in group:
            for state in c.exits.values():
                leads[state] = leads.get(state, False) or state in wanted
            if c.parent >= 0 and (c.exporting and any(leads[s] for s in c.exits.values())):
                leads[c.parent] = True
    return leads


def _ancestors(before: Sequence[int], length: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros((length, length), dtype=np.bool_)
    for i, b in enumerate(before):
        if b >= 0:
            mask[i] = mask[b]
        mask[i, i] = True
    return mask
