"""The scan over any process group, for people with their own trainer: each rank holds a slice of the packed rows."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deltamesh.distributed.agreement import agree
from deltamesh.distributed.collectives import Group
from deltamesh.ops.gated_delta_rule.context import ScanContext, make_carrier, wanted_carrier
from deltamesh.ops.gated_delta_rule.schedule import Schedule
from deltamesh.ops.gated_delta_rule.segments import check_integers, check_offsets, check_parents
from deltamesh.plan.carrier import CarrierName, RuleShape, choose_carrier, plan_carrier
from deltamesh.plan.pieces import Ints
from deltamesh.plan.slices import CutForest, cut_forest


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextParallel(ScanContext):
    """This rank's slice of packed segments; pass it as `context=` to `gated_delta_rule`.

    Attributes:
        rows: the rows of the whole that this rank holds: pass q[:, rows], k[:, rows], ...
        group: the ranks.
        given_segments: segments whose first row is here and that start from a given state: `initial_state` holds their
            states, in this order, on this rank only. Their gradient comes out here, once.
        final_segments: segments whose last row is here: `final_state` holds their states, in this order.
    """

    rows: slice
    given_segments: tuple[int, ...]
    final_segments: tuple[int, ...]
    group: Group
    _agreed: list[bool] = field(default_factory=list)

    def check(self, describe: Callable[[], dict[str, object]]) -> None:
        """In the first call, all ranks compare what they were given; an error of one is raised on all."""
        if self._agreed:
            describe()
            return
        agree(describe, lambda found: found, self.group, what="the call of gated_delta_rule")
        self._agreed.append(True)


def context_parallel(
    group: dist.ProcessGroup | None,
    *,
    cu_seqlens: Tensor | Sequence[int],
    parents: Tensor | Sequence[int] | None = None,
    cuts: Tensor | Sequence[int] | None = None,
    has_initial_state: bool = False,
    device: torch.device | str = "cpu",
    carrier: CarrierName = "auto",
    shape: RuleShape | None = None,
) -> ContextParallel:
    """Plans the scan of packed segments over the ranks of a process group; all of them call it, with equal arguments.

    Make it once per batch and use it for all layers. Rank r of the group (its index inside the group) holds the rows
    cuts[r] .. cuts[r + 1]; cuts may fall anywhere, slices may be empty.

    Args:
        group: any process group, or None for one process.
        cu_seqlens: [N + 1] row offsets of the segments; every segment has rows.
        parents: [N], the segment that each one continues, -1 at roots; parents stand before their children.
        cuts: [size + 1]; by default slices of equal length.
        has_initial_state: whether root segments start from given states instead of zero.
        device: of the tensors that will be passed.
        carrier: how states go from slice to slice: "scan", by one exchange each way and some further work; "pipeline",
            a block of heads after the other, slices waiting for each other; "auto", the one that is expected to be
            faster (on a GPU always "scan": the work costs it less than the waits).
        shape: of the tensors that will be passed, for that expectation.

    Raises:
        ValueError: offsets, parents, cuts or a carrier that do not fit, the same on every rank.
        RankDisagreement: ranks were given different arguments.

    Example:
        >>> context = context_parallel(None, cu_seqlens=[0, 5, 8], parents=[-1, 0])
        >>> context.rows, context.final_segments
        (slice(0, 8, None), (0, 1))
    """
    cp = Group.single()
    if group is not None:
        if (rank := dist.get_rank(group)) < 0:
            raise ValueError("this process is not in the group; only its members may call context_parallel with it")
        cp = Group(rank=rank, size=dist.get_world_size(group), handle=group)
    where = torch.device(device)

    def plan() -> tuple[CutForest, Literal["scan", "pipeline"]]:
        forest = _forest(cp.size, cu_seqlens, parents, cuts)
        return forest, choose_carrier(forest, wanted_carrier(carrier, where), shape or RuleShape())

    forest, carried_by = agree(
        plan,
        lambda p: {"segments and cuts": _digest(p[0]), "carrier": p[1], "has_initial_state": has_initial_state},
        cp,
        what="the plan of the scan",
    )
    last = np.flatnonzero(np.append(np.diff(forest.node) > 0, True))  # the last piece of each segment
    roots = np.flatnonzero(forest.parent < 0)
    mine = np.flatnonzero(forest.rank == cp.rank)
    given = roots[forest.rank[roots] == cp.rank] if has_initial_state else roots[:0]
    finals = last[forest.rank[last] == cp.rank]
    pieces = forest.slice_pieces(cp.rank, given)
    first = int(mine[0]) if len(mine) else 0
    return ContextParallel(
        schedule=Schedule(pieces, where, num_given=len(given), finals=(finals - first).tolist()),
        carrier=make_carrier(plan_carrier(forest, carried_by)[cp.rank], cp, where),
        rows=slice(int(forest.cuts[cp.rank]), int(forest.cuts[cp.rank + 1])),
        given_segments=tuple(forest.node[given].tolist()),
        final_segments=tuple(forest.node[finals].tolist()),
        group=cp,
    )


def _forest(
    size: int,
    cu_seqlens: Tensor | Sequence[int],
    parents: Tensor | Sequence[int] | None,
    cuts: Tensor | Sequence[int] | None,
) -> CutForest:
    offsets = check_offsets(cu_seqlens)
    parent = check_parents(parents, len(offsets) - 1)
    length = np.diff(offsets)
    if not len(length):
        raise ValueError("cu_seqlens holds no segment; give the offsets of at least one")
    if (length == 0).any():
        raise ValueError(f"segment {int(np.argmin(length))} has no rows; leave it out")
    rows = int(offsets[-1])
    chosen: Ints = np.arange(size + 1) * rows // size if cuts is None else check_integers("cuts", cuts)
    if len(chosen) != size + 1:
        raise ValueError(f"{len(chosen)} cuts are given for {size} ranks; give {size + 1}, from 0 to {rows}")
    return cut_forest(parent, offsets[:-1], length, chosen)


def _digest(forest: CutForest) -> str:
    arrays = (forest.cuts, forest.start, forest.node, forest.parent)
    return hashlib.sha256(b"".join(array.astype(np.int64).tobytes() + b"|" for array in arrays)).hexdigest()
