"""Everything index-like that the CUDA path needs about a slice, as device tensors made once per micro-batch.

Sets of pieces, each with its own jobs ("entering": the path comes from a carried slot; "exporting": an export lies at
the piece or below it):

    own        not entering                          forward before the exchange
    through    entering and exporting                E and M, together with `own`
    entering   entering                              forward after the exchange; backward before it, where exporting
                                                     pieces only pass the gradient of the state on
    rest       not entering, or exporting            backward after the exchange
    whole      all                                   states again, for the backward
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.cuda.fla_chunks import PackedChunks
from deltamesh.ops.gated_delta_rule.cuda.state_pass import programs_per_job
from deltamesh.ops.gated_delta_rule.cuda.tables import BackwardTables, ForwardTables
from deltamesh.ops.gated_delta_rule.cuda.walks import Jobs, Split, choose_split, chunk_offsets, make_jobs
from deltamesh.plan.pieces import Bools, Pieces


@dataclass(frozen=True, kw_only=True, eq=False)
class Picks:
    """Which states of one memory go to which places of a result.

    Attributes:
        places: int64 [n], ascending. states: int64 [n].
    """

    places: Tensor
    states: Tensor

    @staticmethod
    def build(pieces: Sequence[int], jobs: Jobs, member: Bools, device: torch.device) -> "Picks":
        """Picks the end states of those `pieces` that are members."""
        places = [n for n, p in enumerate(pieces) if member[p]]
        states = [jobs.saved[pieces[n]] for n in places]
        return Picks(
            places=torch.tensor(places, dtype=torch.int64, device=device),
            states=torch.tensor(states, dtype=torch.int64, device=device),
        )

    def put(self, result: Tensor, memory: Tensor) -> None:
        """Copies the picked states into their places."""
        result.index_copy_(0, self.places, memory.index_select(0, self.states))


class FlaSchedule:
    """One slice as the CUDA path sees it.

    Args:
        pieces: of the slice.
        device: where the tables live.
        num_given: slots 0..num_given-1 hold given states; the others are carried.
        finals: pieces whose last state is asked for.
        split: how trees become jobs (walks.py); None chooses by the device and the number of heads.

    Attributes:
        through: positions in `pieces.exports` whose path enters at a carried slot.
        chunks: of all pieces.

    Raises:
        ValueError: num_given or finals do not fit the pieces.
    """

    def __init__(
        self,
        pieces: Pieces,
        device: torch.device,
        *,
        num_given: int = 0,
        finals: Sequence[int] = (),
        split: Split | None = None,
    ) -> None:
        if not 0 <= num_given <= pieces.num_slots:
            raise ValueError(
                f"num_given={num_given} given states do not fit the {pieces.num_slots} slots of the slice; "
                f"slots 0..num_given-1 are the given ones"
            )
        bad = [f for f in finals if not 0 <= f < len(pieces.start)]
        if bad:
            raise ValueError(f"finals {bad} are no pieces; there are {len(pieces.start)}, numbered from 0")
        self.pieces, self.device = pieces, device
        self.num_rows, self.num_slots, self.num_given = pieces.num_rows, pieces.num_slots, num_given
        self.final_pieces = tuple(int(f) for f in finals)
        self.through = tuple(np.flatnonzero((pieces.entry_slot >= num_given)[pieces.exports]).tolist())
        self.chunks = PackedChunks.build(pieces.start, pieces.length, device)
        self._split = split
        self._tables: dict[Split, WalkTables] = {}

    def tables(self, num_heads: int, key_dim: int, value_dim: int) -> "WalkTables":
        """The walks for states [num_heads, key_dim, value_dim]; built at the first call."""
        split = self._split
        if split is None:
            split = choose_split(
                self.pieces,
                programs_per_job=programs_per_job(num_heads, key_dim, value_dim),
                num_multiprocessors=_num_multiprocessors(self.device),
            )
        if split not in self._tables:
            self._tables[split] = WalkTables(
                self.pieces, self.device, num_given=self.num_given, finals=self.final_pieces, split=split
            )
        return self._tables[split]


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class WalkTables:
    """The walks of a slice and the places of states and gradients in memory, on the device.

    Args:
        pieces, device, num_given, finals: as of `FlaSchedule`.
        split: how trees become jobs.

    Attributes:
        own, through, entering, rest, whole: walks over the sets named at the top of this file.
        own_exports, through_exports, own_finals, entering_finals: where those states are in memory after the walks.
        entering_backward, rest_backward: of `entering` and `rest`.
        num_gradients: gradients of states in memory: exports, finals, then what pieces leave for parents and slots.
        slot_of_root, gradient_of_root: int64, slot and place of the gradient of each piece that continues a slot.
    """

    def __init__(
        self, pieces: Pieces, device: torch.device, *, num_given: int, finals: Sequence[int], split: Split
    ) -> None:
        self.pieces, self.device, self.split = pieces, device, split
        self.final_pieces, self.export_pieces = tuple(finals), tuple(pieces.exports.tolist())
        entering: Bools = pieces.entry_slot >= num_given
        exporting: Bools = pieces.exporting
        wanted = (*self.export_pieces, *self.final_pieces)
        through_pieces = [p for p in self.export_pieces if entering[p]]
        own = self._jobs(~entering, wanted)
        through = make_jobs(pieces, entering & exporting, wanted=through_pieces, split=split, from_slots=False)
        inside = self._jobs(entering, wanted)
        rest = self._jobs(~entering | exporting, ())
        whole = self._jobs(np.full(len(entering), True), ())
        chunk = chunk_offsets(pieces.length)
        self.own, self.through, self.entering, self.rest, self.whole = (
            ForwardTables.build(jobs, start=pieces.start, length=pieces.length, chunk=chunk, device=device)
            for jobs in (own, through, inside, rest, whole)
        )
        self.own_exports = Picks.build(self.export_pieces, own, ~entering, device)
        self.through_exports = Picks.build(self.export_pieces, through, entering, device)
        self.own_finals = Picks.build(self.final_pieces, own, ~entering, device)
        self.entering_finals = Picks.build(self.final_pieces, inside, entering, device)
        self._plan_gradients(inside, rest, entering, exporting)

    def _jobs(self, members: Bools, wanted: Sequence[int]) -> Jobs:
        return make_jobs(self.pieces, members, wanted=[p for p in wanted if members[p]], split=self.split)

    def _plan_gradients(self, inside: Jobs, rest: Jobs, entering: Bools, exporting: Bools) -> None:
        """Places for gradients of states: exports, finals, then those that a piece leaves for its parent or slot."""
        pieces, device = self.pieces, self.device
        parent, slot = pieces.parent.tolist(), pieces.slot.tolist()
        kept = {id(jobs): _kept_children(jobs, parent) for jobs in (inside, rest)}
        finished: Bools = entering & ~exporting  # before the exchange
        targets: dict[int, int] = {}
        for piece in range(len(parent)):
            left = slot[piece] >= 0 or (
                parent[piece] >= 0
                and (
                    (entering[piece] and piece not in kept[id(inside)])
                    or (not finished[piece] and piece not in kept[id(rest)])
                    or (finished[piece] and not finished[parent[piece]])
                )
            )
            if left:
                targets[piece] = len(self.export_pieces) + len(self.final_pieces) + len(targets)
        self.num_gradients = len(self.export_pieces) + len(self.final_pieces) + len(targets)
        asked: dict[int, list[int]] = {}
        for n, piece in enumerate((*self.export_pieces, *self.final_pieces)):
            asked.setdefault(piece, []).append(n)

        def tables(jobs: Jobs, members: Bools, written: Bools) -> BackwardTables:
            added = {piece: list(numbers) for piece, numbers in asked.items()}
            for piece in range(len(parent)):
                by_hand = members[piece] and piece in kept[id(jobs)]
                if parent[piece] >= 0 and members[parent[piece]] and not by_hand:
                    added.setdefault(parent[piece], []).append(targets[piece])
            return BackwardTables.build(jobs, added=added, targets=targets, written=written.tolist(), device=device)

        self.entering_backward = tables(inside, entering, ~exporting)
        self.rest_backward = tables(rest, ~entering | exporting, np.full(len(parent), True))
        roots = [piece for piece in range(len(parent)) if slot[piece] >= 0]
        self.slot_of_root = torch.tensor([slot[piece] for piece in roots], dtype=torch.int64, device=device)
        self.gradient_of_root = torch.tensor([targets[piece] for piece in roots], dtype=torch.int64, device=device)


def _kept_children(jobs: Jobs, parent: list[int]) -> set[int]:
    """Pieces whose gradient reaches their parent in registers."""
    kept = set()
    for wave in jobs.waves:
        for job in wave:
            kept |= {after.piece for before, after in pairwise(job) if before.kept}
    assert all(parent[piece] >= 0 for piece in kept)
    return kept
