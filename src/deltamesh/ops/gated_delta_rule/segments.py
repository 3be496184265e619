"""Packed sequences and trees given as `cu_seqlens` and `parents`, as pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltamesh.plan.pieces import Pieces

Offsets = Tensor | Sequence[int] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Segments of one call; only those with rows are pieces.

    Attributes:
        pieces: the segments with rows.
        num_given: given states that a segment with rows starts from; `given` are their segments.
        finals: pieces whose last state is wanted; `final_of` is, per segment, its place among them, or -1 - i if the
            segment has no rows and its state is `initial_state[i]`, or None if its state is zero.
    """

    pieces: Pieces
    given: tuple[int, ...]
    finals: tuple[int, ...]
    final_of: tuple[int | None, ...]

    @property
    def num_given(self) -> int:
        return len(self.given)

    def select(self, initial_state: Tensor | None) -> Tensor | None:
        """The given states that pieces start from, [num_given, H, K, V]."""
        if initial_state is None or len(self.given) == len(initial_state):
            return initial_state
        return initial_state[torch.tensor(self.given, dtype=torch.int64, device=initial_state.device)]

    def arrange(self, finals: Tensor, initial_state: Tensor | None) -> Tensor:
        """Final states [N, H, K, V] of all segments from those of `finals`."""
        if self.final_of == tuple(range(len(finals))):
            return finals
        states = []
        for place in self.final_of:
            if place is None:
                states.append(finals.new_zeros(finals.shape[1:]))
            elif place >= 0:
                states.append(finals[place])
            else:
                assert initial_state is not None
                states.append(initial_state[-1 - place].to(finals.dtype))
        return torch.stack(states) if states else finals


def segments_of(
    shape: torch.Size,
    cu_seqlens: Offsets,
    parents: Offsets,
    initial_state: Tensor | None,
    key_dim: int,
    *,
    output_final_state: bool,
) -> Segments:
    """Checks the segments of v's `shape` [B, T, H, V] and makes pieces of them.

    Raises:
        ValueError: offsets, parents or initial states do not fit.
    """
    batch, num_rows, num_heads, value_dim = shape
    if cu_seqlens is None:
        if parents is not None:
            raise ValueError("parents are given without cu_seqlens; give the offsets of the segments they number")
        offsets = np.arange(batch + 1) * num_rows
    else:
        if batch != 1:
            raise ValueError(f"cu_seqlens is given with batch size {batch}; pack the sequences in one batch row")
        offsets = check_offsets(cu_seqlens, num_rows)
    parent = check_parents(parents, len(offsets) - 1)
    _check_initial_state(
        initial_state, parent, (len(parent), num_heads, key_dim, value_dim), given_parents=parents is not None
    )
    return _make(offsets, parent, has_initial_state=initial_state is not None, want_finals=output_final_state)


def check_offsets(cu_seqlens: Tensor | Sequence[int], num_rows: int | None = None) -> np.ndarray:
    """int64 [N + 1]; of any number of rows if `num_rows` is None.

    Raises:
        ValueError: no offsets that ascend from 0 to the number of rows.
    """
    offsets = check_integers("cu_seqlens", cu_seqlens)
    stop = num_rows if num_rows is not None else int(offsets[-1]) if len(offsets) else 0
    if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != stop or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"cu_seqlens={_short(offsets)} does not cut {stop} rows into segments; "
            f"give offsets that ascend from 0 to {stop}"
        )
    return offsets


def check_parents(parents: Offsets, count: int) -> np.ndarray:
    """int64 [count].

    Raises:
        ValueError: another number of parents, or one that does not stand before its child.
    """
    parent = np.full(count, -1) if parents is None else check_integers("parents", parents)
    if len(parent) != count:
        raise ValueError(f"{len(parent)} parents are given for {count} segments; give one per segment, -1 for roots")
    if ((parent < -1) | (parent >= np.arange(count))).any():
        raise ValueError(
            f"parents={_short(parent)} holds a segment that does not stand before its child; order segments so that "
            f"parents come first, and give -1 for roots"
        )
    return parent


def _make(offsets: np.ndarray, parent: np.ndarray, *, has_initial_state: bool, want_finals: bool) -> Segments:
    length = np.diff(offsets)
    # Whose rows (piece) or whose given state (-1 - segment) each segment's state is; None is the zero state.
    holder: list[int | None] = []
    piece_parent: list[int] = []
    slot: list[int] = []
    given: list[int] = []
    for i, p in enumerate(parent.tolist()):
        before = holder[p] if p >= 0 else (-1 - i if has_initial_state else None)
        if length[i] == 0:
            holder.append(before)
            continue
        piece_parent.append(before if before is not None and before >= 0 else -1)
        slot.append(-1)
        if before is not None and before < 0:
            slot[-1] = len(given)
            given.append(-1 - before)
        holder.append(len(piece_parent) - 1)
    finals = sorted({h for h in holder if h is not None and h >= 0}) if want_finals else []
    place = {piece: n for n, piece in enumerate(finals)}
    return Segments(
        pieces=Pieces(
            start=offsets[:-1][length > 0].astype(np.int64),
            length=length[length > 0].astype(np.int64),
            parent=np.array(piece_parent, dtype=np.int64),
            slot=np.array(slot, dtype=np.int64),
            num_slots=len(given),
            exports=np.zeros(0, dtype=np.int64),
        ),
        given=tuple(given),
        finals=tuple(finals),
        final_of=tuple(place[h] if h is not None and h >= 0 else h for h in holder) if want_finals else (),
    )


def _check_initial_state(
    initial_state: Tensor | None, parent: np.ndarray, want: tuple[int, ...], *, given_parents: bool
) -> None:
    if initial_state is None:
        return
    if given_parents and (parent >= 0).any():
        raise ValueError(
            "initial_state is given together with parents: a segment with a parent starts from the parent's state; "
            "give initial_state only where all segments are roots"
        )
    if tuple(initial_state.shape) != want:
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}; give one state per segment, {want}")


def check_integers(name: str, values: Tensor | Sequence[int]) -> np.ndarray:
    """int64, one-dimensional; `name` is for the error.

    Raises:
        ValueError: other values.
    """
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}; give integers in one dimension")
    return array.astype(np.int64)


def _short(values: np.ndarray) -> str:
    shown = ", ".join(str(x) for x in values[:8].tolist())
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"
