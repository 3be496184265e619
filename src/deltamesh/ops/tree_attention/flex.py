"""Tree attention on CUDA by FlexAttention: the forest as a block mask, made from the segments, never from T x X pairs.

Letters: T query rows, X key rows, H query heads, J key/value heads, D head dim.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from deltamesh.ops.tree_attention.layout import AttentionLayout

_BLOCK = 128  # rows and keys of a block of the mask, FlexAttention's default


def tree_attention_flex(q_THD: Tensor, k_XJD: Tensor, v_XJD: Tensor, *, scale: float, mask: BlockMask) -> Tensor:
    """Attends the rows of a slice to keys that have already arrived.

    Compiled on CUDA, forward and backward. Eager elsewhere, which is slow, has no backward and is there for tests.

    Args:
        q_THD, k_XJD, v_XJD: as for `tree_attention_rows`; at least one query row.
        scale: factor of the scores.
        mask: from `tree_block_mask`.
    """
    attend = _compiled() if q_THD.is_cuda else flex_attention
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_XJD, v_XJD))
    o: Tensor = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return o[0].transpose(0, 1)


def tree_block_mask(layout: AttentionLayout) -> BlockMask:
    """The block mask of a slice, once per micro-batch.

    A block of keys is dealt with as a whole where every row of a block of queries sees all of it, element by element
    where some row sees some of it, and not at all otherwise.

    Example:
        >>> chain = AttentionLayout.build(segment_start=[0], segment_length=[300], segment_parent=[-1], num_received=0)
        >>> tree_block_mask(chain).to_dense()[0, 0].tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    rows, received, keys = layout.num_rows, layout.num_received, len(layout.tout_X)
    first_row = received + np.arange(0, rows, _BLOCK)
    last_row = np.minimum(first_row + _BLOCK, keys)
    first_key = np.arange(0, keys, _BLOCK)
    longest = np.maximum.reduceat(layout.tout_X, first_key)
    shortest = np.minimum.reduceat(layout.tout_X, first_key)
    # a key before the rows that any of them sees, the first of them sees
    some = (first_key < last_row[:, None]) & (longest > first_row[:, None])
    full = (first_key + _BLOCK <= first_row[:, None] + 1) & (shortest >= last_row[:, None])
    full &= (last_row - first_row == _BLOCK)[:, None]  # the last block of rows is cut short: let the mask see to it
    device = layout.visible_until_X.device
    partial_count, partial_index = _listed(some & ~full, device)
    full_count, full_index = _listed(full, device)
    visible_until_X = layout.visible_until_X

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = query + received
        return (key <= row) & (visible_until_X[key] > row)

    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(rows, keys),
    )


def _listed(blocks: np.ndarray[Any, np.dtype[np.bool_]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Per row of a table of blocks, how many are set, and the set ones first: int32 [1, 1, q] and [1, 1, q, k]."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    count = blocks.sum(axis=1).astype(np.int32)
    return torch.from_numpy(count).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)
