"""Tree attention in blocks of query rows x tiles of keys, with a running softmax (FlashAttention-2, arXiv:2307.08691).

A block reads the tiles that its layout lists and no others, so unrelated branches cost nothing and no T x X tensor
exists. The G query heads of one key head are rows of one product: keys and values are never repeated.

Letters: T query rows, X key rows, H query heads, J key/value heads, G = H // J, D head dim, j key heads taken at once,
n query rows of a block, m keys of a tile, r = n G.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltamesh.ops.tree_attention.layout import AttentionLayout, KeyTile, QueryBlock

_TILE_ELEMENTS = 1 << 18  # scores taken at once: 1 MiB of fp32


def tree_attention_rows(
    q_THD: Tensor, k_XJD: Tensor, v_XJD: Tensor, *, scale: float, layout: AttentionLayout
) -> Tensor:
    """Attends the rows of a slice to keys that have already arrived.

    Args:
        q_THD: queries of the local rows, any float dtype; computed in fp32 (fp64 for fp64 rows).
        k_XJD, v_XJD: keys and values of the received, then the local rows; J divides H.
        scale: factor of the scores.
        layout: who sees whom.

    Returns:
        [T, H, D of v] in q's dtype.
    """
    return _TreeAttention.apply(q_THD, k_XJD, v_XJD, scale, layout)  # type: ignore[no-any-return]


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_XJD: Tensor, v_XJD: Tensor, scale: float, layout: AttentionLayout) -> Tensor:
        rows = _Rows(q_THD, k_XJD, v_XJD, scale, layout)
        o_THD = q_THD.new_empty((*q_THD.shape[:2], v_XJD.shape[2]))
        lse_JTG = rows.k_XJD.new_empty((k_XJD.shape[1], q_THD.shape[0], rows.group))
        for block in layout.blocks:
            for heads in rows.head_groups(block):
                q_jrD = rows.block_of(q_THD, block, heads).mul_(scale)
                o_jrD = q_jrD.new_zeros((*q_jrD.shape[:2], v_XJD.shape[2]))
                sum_jr = q_jrD.new_zeros((*q_jrD.shape[:2], 1))
                max_jr = torch.full_like(sum_jr, -torch.inf)
                for tile in block.tiles:  # its own rows come first: each sees itself, so every maximum is finite
                    k_jmD, v_jmD = rows.keys(tile, heads)
                    scores_jrm = rows.product(0, q_jrD, k_jmD.mT)
                    rows.fill_hidden(scores_jrm, block, tile, -torch.inf)
                    new_max = torch.maximum(max_jr, scores_jrm.amax(-1, keepdim=True))
                    shrink = (max_jr - new_max).exp_()
                    p_jrm = scores_jrm.sub_(new_max).exp_()
                    sum_jr = sum_jr.mul_(shrink).add_(p_jrm.sum(-1, keepdim=True))
                    o_jrD.mul_(shrink).baddbmm_(p_jrm, v_jmD)
                    max_jr = new_max
                rows.put(o_THD, block, heads, o_jrD.div_(sum_jr))
                rows.stats(lse_JTG, block, heads).copy_(max_jr + sum_jr.log())
        ctx.save_for_backward(q_THD, k_XJD, v_XJD, o_THD, lse_JTG)
        ctx.scale, ctx.layout = scale, layout
        return o_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_THD, k_XJD, v_XJD, o_THD, lse_JTG = ctx.saved_tensors
        rows = _Rows(q_THD, k_XJD, v_XJD, ctx.scale, ctx.layout)
        dq_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        dk_JXD = rows.k_XJD.new_zeros((k_XJD.shape[1], k_XJD.shape[0], k_XJD.shape[2]))
        dv_JXD = rows.v_XJD.new_zeros((v_XJD.shape[1], v_XJD.shape[0], v_XJD.shape[2]))
        for block in ctx.layout.blocks:
            for heads in rows.head_groups(block):
                q_jrD = rows.block_of(q_THD, block, heads).mul_(ctx.scale)
                do_jrD = rows.block_of(do_THD, block, heads)
                delta_jr = (do_jrD * rows.block_of(o_THD, block, heads)).sum(-1, keepdim=True)
                lse_jr = rows.stats(lse_JTG, block, heads)
                dq_jrD = torch.zeros_like(q_jrD)
                for tile in block.tiles:
                    k_jmD, v_jmD = rows.keys(tile, heads)
                    p_jrm = rows.product(0, q_jrD, k_jmD.mT).sub_(lse_jr).exp_()
                    rows.fill_hidden(p_jrm, block, tile, 0.0)
                    dscores_jrm = rows.product(1, do_jrD, v_jmD.mT).sub_(delta_jr).mul_(p_jrm)
                    dq_jrD.baddbmm_(dscores_jrm, k_jmD)
                    rows.add(dv_JXD, tile, heads, p_jrm.mT, do_jrD)
                    rows.add(dk_JXD, tile, heads, dscores_jrm.mT, q_jrD)
                rows.put(dq_THD, block, heads, dq_jrD.mul_(ctx.scale))
        return dq_THD, dk_JXD.transpose(0, 1).to(k_XJD.dtype), dv_JXD.transpose(0, 1).to(v_XJD.dtype), None, None


class _Rows:
    """Moves rows between [rows, heads, dim] and the products' [heads, rows, dim], in the dtype of the sums."""

    def __init__(self, q_THD: Tensor, k_XJD: Tensor, v_XJD: Tensor, scale: float, layout: AttentionLayout) -> None:
        self.dtype = torch.promote_types(q_THD.dtype, torch.float32)
        self.k_XJD, self.v_XJD = k_XJD.to(self.dtype), v_XJD.to(self.dtype)
        self.layout = layout
        self.num_key_heads = k_XJD.shape[1]
        self.group = q_THD.shape[1] // k_XJD.shape[1]
        # fresh memory for every tile of scores costs page faults worth a tenth of the product that fills it
        largest = max((self._heads_at_once(b) * self._row_pairs(b) for b in layout.blocks), default=0)
        self.scratch = [self.k_XJD.new_empty(largest) for _ in range(2)]

    def head_groups(self, block: QueryBlock) -> Iterator[slice]:
        """Key heads taken at once: as many as keep a tile of scores in the cache."""
        step = self._heads_at_once(block)
        for first in range(0, self.num_key_heads, step):
            yield slice(first, min(first + step, self.num_key_heads))

    def _row_pairs(self, block: QueryBlock) -> int:
        """Scores of a block's widest tile for one key head."""
        return (block.stop - block.start) * self.group * max(_width(tile) for tile in block.tiles)

    def _heads_at_once(self, block: QueryBlock) -> int:
        return min(self.num_key_heads, max(1, _TILE_ELEMENTS // self._row_pairs(block)))

    def product(self, place: int, left_jrD: Tensor, right_jDm: Tensor) -> Tensor:
        """[j, r, m] in a scratch buffer, until the next product there."""
        shape = (left_jrD.shape[0], left_jrD.shape[1], right_jDm.shape[2])
        return torch.bmm(left_jrD, right_jDm, out=self.scratch[place][: math.prod(shape)].view(shape))

    def _view(self, x_THD: Tensor, block: QueryBlock, heads: slice) -> Tensor:
        """[j, n, G, D] view of a block's rows."""
        first = self.layout.num_received
        x_nHD = x_THD[block.start - first : block.stop - first]
        x_njGD: Tensor = x_nHD.unflatten(1, (self.num_key_heads, self.group))[:, heads]
        return x_njGD.transpose(0, 1)

    def block_of(self, x_THD: Tensor, block: QueryBlock, heads: slice) -> Tensor:
        """[j, r, D], always a fresh tensor."""
        x_jnGD = self._view(x_THD, block, heads)
        copy = torch.empty(x_jnGD.shape, dtype=self.dtype, device=x_THD.device)
        return copy.copy_(x_jnGD).flatten(1, 2)

    def put(self, into_THD: Tensor, block: QueryBlock, heads: slice, x_jrD: Tensor) -> None:
        """Writes a block's rows."""
        view = self._view(into_THD, block, heads)
        view.copy_(x_jrD.view(view.shape))

    def stats(self, x_JTG: Tensor, block: QueryBlock, heads: slice) -> Tensor:
        """[j, r, 1] view of a block's row statistics."""
        first = self.layout.num_received
        return x_JTG[heads, block.start - first : block.stop - first].flatten(1)[:, :, None]

    def keys(self, tile: KeyTile, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values [j, m, D] of a tile: views of a range, copies where gathered."""
        if isinstance(tile.keys, slice):
            return self.k_XJD[tile.keys, heads].transpose(0, 1), self.v_XJD[tile.keys, heads].transpose(0, 1)
        k_mjD, v_mjD = (x[:, heads].index_select(0, tile.keys) for x in (self.k_XJD, self.v_XJD))
        return k_mjD.transpose(0, 1), v_mjD.transpose(0, 1)

    def add(self, into_JXD: Tensor, tile: KeyTile, heads: slice, left_jmr: Tensor, right_jrD: Tensor) -> None:
        """Adds a product to the gradient of a tile's keys; the keys of a tile are unique, so the order is fixed."""
        if isinstance(tile.keys, slice):
            into_JXD[heads, tile.keys].baddbmm_(left_jmr, right_jrD)
        else:
            into_JXD[heads].index_add_(1, tile.keys, left_jmr @ right_jrD)

    def fill_hidden(self, x_jrm: Tensor, block: QueryBlock, tile: KeyTile, value: float) -> None:
        """Overwrites the pairs whose row does not see the key."""
        if not tile.masked:
            return
        row_n1 = self.layout.row_X[block.start : block.stop, None]
        hidden_nm = (self.layout.row_X[tile.keys] > row_n1) | (self.layout.visible_until_X[tile.keys] <= row_n1)
        x_jnGm = x_jrm.unflatten(1, (block.stop - block.start, self.group))
        x_jnGm.masked_fill_(hidden_nm[:, None], value)


def _width(tile: KeyTile) -> int:
    return int(tile.keys.stop - tile.keys.start) if isinstance(tile.keys, slice) else tile.keys.shape[0]
