"""Which keys each block of query rows sees, from the forest of segments alone; made once per micro-batch.

Key rows are (R received, T local) rows in depth-first pre-order, so key k is seen by query row r exactly where
k <= r < tout[k] (tout: one past the last row that descends from k's segment). Of the keys before a block of rows, the
block sees only ancestors of its first row: one path, whose deeper keys the block's later rows may have left again.

Letters: T local rows, R received rows, X = R + T key rows, n rows of a block, S segments.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltamesh.distributed.collectives import Group, RowTransfer
from deltamesh.plan.ancestors import AncestorPlan
from deltamesh.plan.pieces import Ints

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_SHORT_RANGE = 64  # ranges of fewer keys are gathered into one tile: a product with few columns wastes the processor
# A block is cut where its remaining rows have left much of its path. Measured with 8 heads of 128: a (row, key) pair
# costs about as much as a tenth of reading one key; starting a block costs as much as 3,000 pairs.
_PAIRS_PER_KEY_READ = 10
_PAIRS_PER_BLOCK = 3_000


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyTile:
    """Some keys that a block of rows reads at once: a range of key rows, or gathered ones.

    Attributes:
        keys: slice of the key rows, or int64 [m] unique key rows.
        masked: whether some row of the block does not see some of them.
    """

    keys: slice | Tensor
    masked: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryBlock:
    """Consecutive query rows start..stop (as key rows) and the tiles they read; the first tile is the rows."""

    start: int
    stop: int
    tiles: tuple[KeyTile, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLayout:
    """The attention of one slice.

    Attributes:
        num_received: R, the first key rows; they are the path above the slice's first row.
        num_rows: T, query rows; query i is key row R + i.
        tout_X: int64 [X], on the host: one past the last row that sees each key.
        visible_until_X: `tout_X` on the device.
        row_X: int64 [X], 0 .. X - 1 on the device.
        blocks: the query rows, in order.
    """

    num_received: int
    num_rows: int
    tout_X: Ints
    visible_until_X: Tensor
    row_X: Tensor
    blocks: tuple[QueryBlock, ...]

    @staticmethod
    def build(
        *,
        segment_start: npt.ArrayLike,
        segment_length: npt.ArrayLike,
        segment_parent: npt.ArrayLike,
        num_received: int,
        device: torch.device | str = "cpu",
        block_rows: int = 96,
        tile_keys: int = 512,
    ) -> "AttentionLayout":
        """Plans the blocks.

        Args:
            segment_start, segment_length, segment_parent: int64 [S], segments that tile the key rows in depth-first
                pre-order; the parent is an earlier segment or -1.
            num_received: R.
            device: where index tensors go.
            block_rows, tile_keys: sizes of a tile of scores. Where four query heads or more share a key head, 96 rows
                make products as fast as 128 do and waste less at the ends of branches.

        Raises:
            ValueError: segments that do not tile the rows, or are no pre-order of a forest.

        Example:
            >>> tree = AttentionLayout.build(  # rows 0-2, two children of one row each
            ...     segment_start=[0, 3, 4], segment_length=[3, 1, 1], segment_parent=[-1, 0, 0], num_received=0
            ... )
            >>> tree.tout_X.tolist()
            [5, 5, 5, 4, 5]
        """
        start, length, parent = (np.asarray(a, dtype=np.int64) for a in (segment_start, segment_length, segment_parent))
        tout, depth = _subtrees(start, length, parent)
        total = int(length.sum())
        if not 0 <= num_received <= total:
            raise ValueError(f"num_received={num_received} is not among {total} key rows; give 0 to {total}")
        blocks = tuple(
            QueryBlock(
                start=first,
                stop=last,
                tiles=(
                    KeyTile(keys=slice(first, last), masked=True),
                    *_tiles(full, False, tile_keys, device),
                    *_tiles(ragged, True, tile_keys, device),
                ),
            )
            for first, last, full, ragged in _cut_blocks(start, start + length, tout, depth, num_received, block_rows)
        )
        tout_X = np.repeat(tout, length)
        return AttentionLayout(
            num_received=num_received,
            num_rows=total - num_received,
            tout_X=tout_X,
            visible_until_X=torch.from_numpy(tout_X).to(device),
            row_X=torch.arange(total, device=device),
            blocks=blocks,
        )

    @staticmethod
    def from_plan(plan: AncestorPlan, *, device: torch.device | str = "cpu") -> "AttentionLayout":
        """The layout of a planned slice."""
        return AttentionLayout.build(
            segment_start=plan.segment_start,
            segment_length=plan.segment_length,
            segment_parent=plan.segment_parent,
            num_received=plan.exchange.num_received,
            device=device,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionContext:
    """What `tree_attention` needs to know about the slice.

    Attributes:
        kv_exchange: brings keys and values of the R rows above the slice.
        layout: who sees whom.
        group: the cp group.
    """

    kv_exchange: RowTransfer
    layout: AttentionLayout
    group: Group

    @cached_property
    def flex_mask(self) -> "BlockMask":
        """FlexAttention's block mask, made at first use and shared by all layers."""
        from deltamesh.ops.tree_attention.flex import tree_block_mask  # loads the compiler: only where it is used

        return tree_block_mask(self.layout)


def _subtrees(start: Ints, length: Ints, parent: Ints) -> tuple[Ints, Ints]:
    """Per segment: one past the last row below it, and its depth."""
    if not (start.shape == length.shape == parent.shape) or start.ndim != 1 or (length < 1).any():
        raise ValueError(
            f"segments have starts {start.shape}, lengths {length.shape} and parents {parent.shape}; give three int64"
            " arrays of one length, every segment with at least one row"
        )
    if not np.array_equal(start, np.cumsum(length) - length):
        raise ValueError("segments leave gaps or overlap; let each one start where the one before ends")
    depth = np.zeros_like(start)
    path: list[int] = []
    for i, above in enumerate(parent.tolist()):
        while path and path[-1] != above:
            path.pop()
        if above >= 0 and not path:
            raise ValueError(f"segment {i} hangs on segment {above}, which is closed; order segments depth-first")
        depth[i] = len(path)
        path.append(i)
    tout = start + length
    for i in range(len(start) - 1, -1, -1):
        if parent[i] >= 0:
            tout[parent[i]] = max(tout[parent[i]], tout[i])
    return tout, depth


_Ranges = npt.NDArray[np.int64]  # [m, 2] first and last of ranges of key rows


def _cut_blocks(
    start: Ints, stop: Ints, tout: Ints, depth: Ints, first_row: int, block_rows: int
) -> list[tuple[int, int, _Ranges, _Ranges]]:
    """Blocks (first, last, ranges of keys that all rows see, ranges that some rows see) of the rows from first_row."""
    total = int(stop[-1]) if len(stop) else 0
    path = np.zeros(int(depth.max(initial=0)) + 1, dtype=np.int64)  # segment at each depth, of the segments met so far
    blocks = []
    segment, met, first = 0, 0, first_row
    while first < total:
        segment += int(np.searchsorted(stop[segment:], first, side="right"))
        for i in range(met, segment + 1):
            path[depth[i]] = i
        met = segment + 1
        above = path[: depth[segment] + 1]
        ranges = np.stack([start[above], np.minimum(stop[above], first)], axis=1)
        last = _end_of_block(first, min(first + block_rows, total), start[met:], ranges, tout[above], block_rows)
        seen_by_all = int(np.searchsorted(-tout[above], -last, side="right"))  # tout falls along the path
        blocks.append((first, last, ranges[:seen_by_all], ranges[seen_by_all:]))
        first = last
    return blocks


def _end_of_block(first: int, last: int, later: Ints, ranges: _Ranges, tout: Ints, block_rows: int) -> int:
    """Where to end a block that may reach to `last`; `later` are starts of the segments after its first row's."""
    starts = later[:block_rows]
    starts = starts[starts < last]
    keys = np.concatenate([[0], np.cumsum(ranges[:, 1] - ranges[:, 0])])
    left = keys[np.searchsorted(-tout, -starts, side="left")]  # keys of the path that are still seen there
    wasted = (keys[-1] - left) * (last - starts)
    cuts = np.flatnonzero(wasted > _PAIRS_PER_KEY_READ * left + _PAIRS_PER_BLOCK)
    return int(starts[cuts[0]]) if len(cuts) else last


def _tiles(ranges: _Ranges, masked: bool, tile_keys: int, device: torch.device | str) -> list[KeyTile]:
    """Long ranges in equal parts of at most `tile_keys`; short ones gathered together."""
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    if not len(ranges):
        return []
    opens = np.append(True, ranges[1:, 0] != ranges[:-1, 1])  # neighbours become one range
    first, last = ranges[opens, 0], ranges[np.append(opens[1:], True), 1]
    tiles = []
    for a, b in zip(first.tolist(), last.tolist()):
        if b - a >= _SHORT_RANGE:
            bounds = np.linspace(a, b, -(-(b - a) // tile_keys) + 1).astype(np.int64).tolist()
            tiles += [KeyTile(keys=slice(c, d), masked=masked) for c, d in pairwise(bounds)]
    short = last - first < _SHORT_RANGE
    if short.any():
        rows = np.concatenate([np.arange(a, b) for a, b in zip(first[short], last[short])])
        for part in np.array_split(rows, -(-len(rows) // tile_keys)):
            tiles.append(KeyTile(keys=torch.from_numpy(part).to(device), masked=masked))
    return tiles
