"""The causal convolution, row by row: walk the path back W - 1 steps and add. Obviously right, and slow.

Letters: T rows of the slice, R received rows, D channels, W taps.
"""

import torch
from torch import Tensor

from deltamesh.ops.causal_conv1d.layout import ConvLayout


def causal_conv1d_by_path(
    x_TD: Tensor, halo_RD: Tensor, weight_DW: Tensor, before: list[int], activation: str | None = "silu"
) -> Tensor:
    """y[t] = act(sum_i weight[:, W - 1 - i] * x[the row i steps before t on its path]).

    Args:
        x_TD, halo_RD: local and received rows.
        weight_DW: one filter per channel.
        before: per local and received row, the row before it on its path (index into local, received), or -1.
        activation: "silu" or None.
    """
    rows_XD = torch.cat([x_TD, halo_RD])
    out = []
    for t in range(x_TD.shape[0]):
        y_D, row = torch.zeros_like(weight_DW[:, 0]), t
        for j in range(weight_DW.shape[1] - 1, -1, -1):
            if row < 0:
                break
            y_D = y_D + weight_DW[:, j] * rows_XD[row]
            row = before[row]
        out.append(y_D)
    y_TD = torch.stack(out) if out else x_TD * 1.0
    return torch.nn.functional.silu(y_TD) if activation == "silu" else y_TD


def causal_conv1d_naive(
    x_TD: Tensor, halo_RD: Tensor, weight_DW: Tensor, layout: ConvLayout, activation: str | None = "silu"
) -> Tensor:
    """Like `causal_conv1d_by_path`, from a layout: every row's taps are written out and gathered."""
    width, zero = layout.width, layout.num_rows + layout.num_received
    rows_T = torch.arange(layout.num_rows, device=x_TD.device)
    taps_TW = rows_T[:, None] + torch.arange(1 - width, 1, device=x_TD.device)
    taps_TW[layout.head_rows] = layout.head_taps
    rows_XD = torch.cat([x_TD, halo_RD, x_TD.new_zeros((1, x_TD.shape[1]))])
    assert rows_XD.shape[0] == zero + 1
    y_TD = torch.einsum("twd,dw->td", rows_XD[taps_TW], weight_DW)
    return torch.nn.functional.silu(y_TD) if activation == "silu" else y_TD
