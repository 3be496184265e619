"""The path-wise causal convolution with SiLU: shifted sums over contiguous rows, gathers for the few rows at heads.

Rows are taken in blocks that stay in the processor's cache, so memory is read once and written once per direction.

Letters: T rows of the slice, R received rows, D channels, W taps, n rows of a block.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from deltamesh.ops.causal_conv1d.layout import ConvLayout

_CPU_BLOCK_ELEMENTS = 1 << 17  # 512 KiB of fp32: a block and its temporaries stay in the second-level cache


def causal_conv1d_rows(
    x_TD: Tensor, halo_RD: Tensor, weight_DW: Tensor, layout: ConvLayout, activation: str | None = "silu"
) -> Tensor:
    """Convolves a slice whose halo has already arrived.

    Args:
        x_TD: local rows, any float dtype; sums are fp32 (fp64 for fp64 rows).
        halo_RD: received rows, same dtype.
        weight_DW: one filter per channel.
        layout: the taps.
        activation: "silu" or None.

    Returns:
        [T, D] in x's dtype.

    Raises:
        ValueError: shapes that do not fit the layout, or an unknown activation.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation={activation!r} is not known; use 'silu' or None")
    if x_TD.dim() != 2 or halo_RD.dim() != 2 or weight_DW.shape != (x_TD.shape[1], layout.width):
        raise ValueError(
            f"rows {tuple(x_TD.shape)}, halo {tuple(halo_RD.shape)} and weight {tuple(weight_DW.shape)} do not fit"
            f" together; give [T, D], [R, D] and [D, W={layout.width}]"
        )
    if (x_TD.shape[0], halo_RD.shape[0]) != (layout.num_rows, layout.num_received):
        raise ValueError(
            f"{x_TD.shape[0]} rows and {halo_RD.shape[0]} received rows were given, but the layout is of"
            f" {layout.num_rows} and {layout.num_received}; use the layout of this slice"
        )
    return _CausalConv1d.apply(x_TD, halo_RD, weight_DW, layout, activation)  # type: ignore[no-any-return]


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, halo_RD: Tensor, weight_DW: Tensor, layout: ConvLayout, activation: str | None
    ) -> Tensor:
        ctx.save_for_backward(x_TD, halo_RD, weight_DW)
        ctx.layout, ctx.activation = layout, activation
        taps = _Taps(x_TD, halo_RD, weight_DW, layout)
        y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        for rows in taps.contiguous_blocks():
            y_TD[rows] = _activate(taps.window_sum(taps.shifted(rows)), activation)
        for heads in taps.blocks(0, len(layout.head_rows_host)):
            y_nD = _activate(taps.window_sum(taps.gathered(heads)), activation)
            y_TD.index_copy_(0, layout.head_rows[heads], y_nD.to(y_TD.dtype))
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x_TD, halo_RD, weight_DW = ctx.saved_tensors
        layout: ConvLayout = ctx.layout
        taps = _Taps(x_TD, halo_RD, weight_DW, layout)
        needs_rows, needs_weight = ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        num_rows, num_received = layout.num_rows, layout.num_received
        # one buffer for (local, received, zero) rows: a head's tap needs no case distinction
        dx_XD = taps.weight_WD.new_zeros((num_rows + num_received + 1 if needs_rows else 0, x_TD.shape[1]))
        dweight_WD = torch.zeros_like(taps.weight_WD)

        for rows in taps.contiguous_blocks():
            windows = taps.shifted(rows)
            dpre_nD = _activation_backward(dy_TD[rows], taps.window_sum(windows), ctx.activation)
            dpre_nD.index_fill_(0, layout.head_rows[taps.heads_of(rows)] - rows.start, 0.0)  # heads come below
            for j, x_nD in enumerate(windows):
                if needs_rows:
                    shift = j - (layout.width - 1)
                    dx_XD[rows.start + shift : rows.stop + shift].addcmul_(dpre_nD, taps.weight_WD[j])
                if needs_weight:
                    dweight_WD[j] += (dpre_nD * x_nD).sum(0)
        for heads in taps.blocks(0, len(layout.head_rows_host)):
            windows = taps.gathered(heads)
            dy_nD = dy_TD.index_select(0, layout.head_rows[heads])
            dpre_nD = _activation_backward(dy_nD, taps.window_sum(windows), ctx.activation)
            for j, x_nD in enumerate(windows):
                if needs_rows:
                    _add_rows(dx_XD, layout.head_taps[heads, j], dpre_nD * taps.weight_WD[j])
                if needs_weight:
                    dweight_WD[j] += (dpre_nD * x_nD).sum(0)

        dx = dx_XD[:num_rows].to(x_TD.dtype) if ctx.needs_input_grad[0] else None
        dhalo = dx_XD[num_rows : num_rows + num_received].to(x_TD.dtype) if ctx.needs_input_grad[1] else None
        dweight = dweight_WD.T.to(weight_DW.dtype) if needs_weight else None
        return dx, dhalo, dweight, None, None


class _Taps:
    """The rows that each tap reads, block by block, in the dtype of the sums."""

    def __init__(self, x_TD: Tensor, halo_RD: Tensor, weight_DW: Tensor, layout: ConvLayout) -> None:
        self.dtype = torch.promote_types(x_TD.dtype, torch.float32)
        self.x_TD = x_TD
        self.layout = layout
        self.weight_WD = weight_DW.T.to(self.dtype).contiguous()
        self.outside_XD = torch.cat([halo_RD, halo_RD.new_zeros((1, halo_RD.shape[1]))])

    def blocks(self, start: int, stop: int) -> Iterator[slice]:
        """Blocks of start..stop, small enough for the cache on a CPU."""
        step = max(stop - start, 1)
        if self.x_TD.device.type == "cpu":
            step = max(16, _CPU_BLOCK_ELEMENTS // max(self.x_TD.shape[1], 1))
        for first in range(start, stop, step):
            yield slice(first, min(first + step, stop))

    def contiguous_blocks(self) -> Iterator[slice]:
        """Blocks of rows that have W - 1 rows before them in the slice, without blocks of nothing but heads."""
        for rows in self.blocks(self.layout.width - 1, self.layout.num_rows):
            heads = self.heads_of(rows)
            if heads.stop - heads.start < rows.stop - rows.start:
                yield rows

    def heads_of(self, rows: slice) -> slice:
        """The head rows that lie in `rows`."""
        first, last = np.searchsorted(self.layout.head_rows_host, (rows.start, rows.stop))
        return slice(int(first), int(last))

    def shifted(self, rows: slice) -> list[Tensor]:
        """Per tap, the rows that it reads for contiguous `rows` (none of them among the slice's first W - 1)."""
        width = self.layout.width
        x_mD = self.x_TD[rows.start - (width - 1) : rows.stop].to(self.dtype)
        return [x_mD[j : j + rows.stop - rows.start] for j in range(width)]

    def gathered(self, heads: slice) -> list[Tensor]:
        """Per tap, the rows that it reads for some head rows."""
        rows = []
        for j in range(self.layout.width):
            inside_nD = self.x_TD.index_select(0, self.layout.inside_taps[heads, j])
            outside_nD = self.outside_XD.index_select(0, self.layout.outside_taps[heads, j])
            is_outside = (self.layout.head_taps[heads, j] >= self.layout.num_rows)[:, None]
            rows.append(torch.where(is_outside, outside_nD, inside_nD).to(self.dtype))
        return rows

    def window_sum(self, windows: list[Tensor]) -> Tensor:
        """The sum over taps, before the activation."""
        sum_nD = windows[0] * self.weight_WD[0]
        for j in range(1, len(windows)):
            sum_nD.addcmul_(windows[j], self.weight_WD[j])
        return sum_nD


def _activate(pre_nD: Tensor, activation: str | None) -> Tensor:
    return F.silu(pre_nD) if activation == "silu" else pre_nD


def _activation_backward(dy_nD: Tensor, pre_nD: Tensor, activation: str | None) -> Tensor:
    """A fresh tensor, in the dtype of the sums."""
    dy_nD = dy_nD.to(pre_nD.dtype)
    return torch.ops.aten.silu_backward(dy_nD, pre_nD) if activation == "silu" else dy_nD.clone()


def _add_rows(into_XD: Tensor, index_n: Tensor, rows_nD: Tensor) -> None:
    """Adds rows in one fixed order: serially on the CPU, by sorted indices (no float atomics) elsewhere."""
    if into_XD.device.type == "cpu":
        into_XD.index_add_(0, index_n, rows_nD)
    else:
        into_XD.index_put_((index_n,), rows_nD, accumulate=True)
