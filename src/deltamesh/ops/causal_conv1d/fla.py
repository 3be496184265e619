"""The path-wise causal convolution by flash-linear-attention's kernels (CUDA).

The slice is cut wherever a row's predecessor on its path is not the row before it. Each such segment is one sequence of
a packed batch, and the W - 1 rows before it on its path, wherever they live, are its initial state. Nothing falls back
to another backend: what the kernels cannot do is refused.

Letters: T rows of the slice, R received rows, D channels, W taps, N segments.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltamesh.ops.causal_conv1d.layout import ConvLayout
from deltamesh.ops.gated_delta_rule.cuda.versions import check_device, check_fla_version

_CHUNK_ROWS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvSegments:
    """Runs of rows that follow one another on their path, as device tensors made once per micro-batch.

    Attributes:
        cu_seqlens: int32 [N + 1].
        chunk_indices: int32 [chunks, 2], segment and number within it of each run of 64 rows.
        state_taps: int64 [N, W - 1], the rows before each segment, as indices into (T local, R received, one zero).
        touched: int64 [u], the rows that `state_taps` names, ascending.
        place: int64 [N, W - 1], where in `touched` each of them is.
    """

    cu_seqlens: Tensor
    chunk_indices: Tensor
    state_taps: Tensor
    touched: Tensor
    place: Tensor

    @staticmethod
    def from_layout(layout: ConvLayout) -> "ConvSegments":
        """The segments of a slice. Copies the taps to the host: not for every layer.

        Example:
            >>> before = np.array([-1, 0, 0])  # rows 1 and 2 both follow row 0
            >>> layout = ConvLayout.from_predecessors(before, num_rows=3, num_received=0, width=2)
            >>> ConvSegments.from_layout(layout).cu_seqlens.tolist()
            [0, 2, 3]
        """
        device, width = layout.head_taps.device, layout.width
        rows, taps = layout.head_rows_host, layout.head_taps.cpu().numpy()
        if width == 1:
            rows = np.zeros(min(1, layout.num_rows), dtype=np.int64)
            taps = np.zeros((len(rows), 0), dtype=np.int64)
        else:
            first = (rows == 0) | (taps[:, -2] != rows - 1)
            rows, taps = rows[first], taps[first, :-1]
        edges = np.append(rows, layout.num_rows)
        count = -(-np.diff(edges) // _CHUNK_ROWS)
        segment = np.repeat(np.arange(len(rows)), count)
        number = np.arange(len(segment)) - np.repeat(np.cumsum(count) - count, count)
        touched, place = np.unique(taps, return_inverse=True)

        def put(x: Any, dtype: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x, dtype=dtype)).to(device)

        return ConvSegments(
            cu_seqlens=put(edges, np.int32),
            chunk_indices=put(np.stack((segment, number), 1), np.int32),
            state_taps=put(taps, np.int64),
            touched=put(touched, np.int64),
            place=put(place.reshape(taps.shape), np.int64),
        )


def causal_conv1d_fla(
    x_TD: Tensor, halo_RD: Tensor, weight_DW: Tensor, segments: ConvSegments, activation: str | None = "silu"
) -> Tensor:
    """Convolves a slice whose halo has already arrived.

    Args:
        x_TD: local rows, fp32, bf16 or fp16; sums are fp32.
        halo_RD: received rows, same dtype.
        weight_DW: one filter per channel; tap W - 1 multiplies the row itself.
        segments: of the slice.
        activation: "silu" or None.

    Returns:
        [T, D] in x's dtype.

    Raises:
        ImportError: flash-linear-attention is missing or of another version.
        ValueError: fp64 rows, an unknown activation, or a device on which the kernels cannot run.
    """
    check_fla_version()
    check_device(x_TD.device)
    if activation not in ("silu", None):
        raise ValueError(f"activation={activation!r} is not known; use 'silu' or None")
    if x_TD.dtype == torch.float64:
        raise ValueError("backend 'fla' got float64 rows but its kernels sum in fp32; use backend 'torch' for fp64")
    if weight_DW.shape != (x_TD.shape[1], segments.state_taps.shape[1] + 1):
        raise ValueError(
            f"weight {tuple(weight_DW.shape)} does not fit rows {tuple(x_TD.shape)} and a layout of "
            f"{segments.state_taps.shape[1] + 1} taps; give [D, W]"
        )
    return _FlaConv1d.apply(x_TD, halo_RD, weight_DW, segments, activation)  # type: ignore[no-any-return]


class _FlaConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, halo_RD: Tensor, weight_DW: Tensor, segments: ConvSegments, activation: str | None
    ) -> Tensor:
        ctx.segments, ctx.activation, ctx.num_received = segments, activation, halo_RD.shape[0]
        states_NDW = _initial_states(x_TD, halo_RD, segments)
        ctx.save_for_backward(x_TD, states_NDW, weight_DW)
        if x_TD.shape[0] == 0:
            return torch.empty_like(x_TD)
        from fla.modules.causal_conv1d import causal_conv1d_fwd

        y, _ = causal_conv1d_fwd(
            x=x_TD.contiguous()[None],
            weight=weight_DW.float().contiguous(),
            bias=None,
            residual=None,
            initial_state=states_NDW,
            output_final_state=False,
            activation=activation,
            cu_seqlens=segments.cu_seqlens,
            chunk_indices=segments.chunk_indices,
        )
        return y[0]  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x_TD, states_NDW, weight_DW = ctx.saved_tensors
        segments: ConvSegments = ctx.segments
        num_rows, num_channels = x_TD.shape
        if num_rows == 0:
            return torch.empty_like(x_TD), x_TD.new_zeros(ctx.num_received, num_channels), weight_DW * 0, None, None
        from fla.modules.causal_conv1d import causal_conv1d_bwd

        dx, dweight, _, _, dstates = causal_conv1d_bwd(
            x=x_TD.contiguous()[None],
            dy=dy_TD.contiguous()[None],
            dht=None,
            weight=weight_DW.float().contiguous(),
            initial_state=states_NDW,
            activation=ctx.activation,
            cu_seqlens=segments.cu_seqlens,
            chunk_indices=segments.chunk_indices,
        )
        # Summed over the children of a row in fp32 and by sorted indices: float atomics would add in any order.
        owed_uD = torch.zeros(len(segments.touched), num_channels, dtype=torch.float32, device=x_TD.device)
        given = dstates[:, :, 1:].transpose(1, 2).reshape(-1, num_channels).float()
        owed_uD.index_put_((segments.place.reshape(-1),), given, accumulate=True)
        dall_XD = dx.new_zeros(num_rows + ctx.num_received + 1, num_channels)  # the last row stands for "no row"
        dall_XD[:num_rows] = dx[0]
        dall_XD[segments.touched] = (dall_XD[segments.touched].float() + owed_uD).to(dall_XD.dtype)
        return (
            dall_XD[:num_rows],
            dall_XD[num_rows : num_rows + ctx.num_received],
            dweight.to(weight_DW.dtype),
            None,
            None,
        )


def _initial_states(x_TD: Tensor, halo_RD: Tensor, segments: ConvSegments) -> Tensor:
    """[N, D, W]: the rows before each segment, oldest first, after one place that the kernels do not read."""
    num_rows, num_received = x_TD.shape[0], halo_RD.shape[0]
    taps = segments.state_taps.reshape(-1)
    outside_XD = torch.cat([halo_RD, halo_RD.new_zeros((1, halo_RD.shape[1]))])  # not x itself: no copy of the slice
    rows = outside_XD.index_select(0, (taps - num_rows).clamp(0, num_received))
    if num_rows:
        inside = x_TD.index_select(0, taps.clamp(max=num_rows - 1))
        rows = torch.where((taps < num_rows)[:, None], inside, rows)
    count, halo = segments.state_taps.shape
    states_NDW = x_TD.new_zeros(count, x_TD.shape[1], halo + 1)
    states_NDW[:, :, 1:] = rows.view(count, halo, x_TD.shape[1]).transpose(1, 2)
    return states_NDW
