"""Which rows the taps of a slice's convolution read, as device tensors made once per micro-batch.

Letters: T rows of the slice, R received rows, D channels, W taps, h head rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deltamesh.distributed.collectives import Group, RowTransfer
from deltamesh.plan.halos import HaloPlan
from deltamesh.plan.pieces import Ints

if TYPE_CHECKING:
    from deltamesh.ops.causal_conv1d.fla import ConvSegments


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvLayout:
    """The taps of one slice.

    A row that is not a head row has its W - 1 predecessors directly before it in the slice. The taps of a head row are
    listed, as indices into (T local rows, R received rows, one zero row).

    Attributes:
        num_rows: T.
        num_received: R.
        head_rows: int64 [h], ascending; the first W - 1 rows of the slice are always among them.
        head_taps: int64 [h, W]; tap j multiplies weight[:, j], the last tap is the row itself.
        outside_taps: int64 [h, W], index into (R received rows, one zero row); 0 where the tap is a local row.
        inside_taps: int64 [h, W], index into the local rows; 0 where the tap is not one.
        head_rows_host: `head_rows` as numpy, so that blocks of rows find their heads without asking the device.
    """

    num_rows: int
    num_received: int
    head_rows: Tensor
    head_taps: Tensor
    outside_taps: Tensor
    inside_taps: Tensor
    head_rows_host: Ints

    @property
    def width(self) -> int:
        """Taps W."""
        return self.head_taps.shape[1]

    @staticmethod
    def build(
        *, head_rows: Ints, head_taps: Ints, num_rows: int, num_received: int, device: torch.device | str = "cpu"
    ) -> "ConvLayout":
        """Checks the taps and copies them to `device`.

        Raises:
            ValueError: the taps are no [h, W] table, point outside the rows, or leave out one of the first rows.

        Example:
            >>> taps = np.array([[3, 0], [0, 2]])  # row 0 follows nothing, row 2 follows row 0: two children of row 0
            >>> layout = ConvLayout.build(head_rows=np.array([0, 2]), head_taps=taps, num_rows=3, num_received=0)
            >>> layout.width
            2
        """
        rows, taps = np.asarray(head_rows, dtype=np.int64), np.asarray(head_taps, dtype=np.int64)
        if taps.ndim != 2 or taps.shape != (len(rows), taps.shape[1]) or taps.shape[1] < 1:
            raise ValueError(f"head_taps has shape {taps.shape} for {len(rows)} head rows; give one row of W taps each")
        if taps.size and (taps.min() < 0 or taps.max() > num_rows + num_received):
            raise ValueError(
                f"head_taps spans {taps.min()}..{taps.max()}, but there are {num_rows} local rows, {num_received}"
                f" received rows and one zero row; give indices from 0 to {num_rows + num_received}"
            )
        if not np.array_equal(taps[:, -1], rows):
            raise ValueError("the last tap of a head row must be the row itself; give head_taps[:, -1] == head_rows")
        first = min(taps.shape[1] - 1, num_rows)
        if not np.array_equal(rows[:first], np.arange(first)) or (np.diff(rows) <= 0).any():
            raise ValueError(
                f"head_rows starts {rows[:first].tolist()}, but the first {first} rows of a slice have no W - 1 rows"
                " before them in it; list them, and keep head_rows ascending"
            )
        inside = taps < num_rows
        return ConvLayout(
            num_rows=num_rows,
            num_received=num_received,
            head_rows=torch.from_numpy(rows).to(device),
            head_taps=torch.from_numpy(taps).to(device),
            outside_taps=torch.from_numpy(np.where(inside, 0, taps - num_rows)).to(device),
            inside_taps=torch.from_numpy(np.where(inside, taps, 0)).to(device),
            head_rows_host=rows,
        )

    @staticmethod
    def from_plan(halo: HaloPlan, *, num_rows: int, device: torch.device | str = "cpu") -> "ConvLayout":
        """The layout of a planned slice of `num_rows` rows."""
        return ConvLayout.build(
            head_rows=halo.head_rows,
            head_taps=halo.head_taps,
            num_rows=num_rows,
            num_received=halo.exchange.num_received,
            device=device,
        )

    @staticmethod
    def from_predecessors(
        before: Ints, *, num_rows: int, num_received: int, width: int, device: torch.device | str = "cpu"
    ) -> "ConvLayout":
        """The layout of rows whose path is given row by row.

        Args:
            before: int64 [T + R], the row before each local and each received row on its path, as an index into
                (local, received), or -1.
            num_rows, num_received: T and R.
            width: W.

        Example:
            >>> before = np.array([-1, 0, 0])  # rows 1 and 2 both follow row 0
            >>> ConvLayout.from_predecessors(before, num_rows=3, num_received=0, width=2).head_rows.tolist()
            [0, 2]
        """
        zero = num_rows + num_received
        step = np.append(np.where(before < 0, zero, before), zero)
        taps = np.empty((num_rows, width), dtype=np.int64)
        taps[:, -1] = np.arange(num_rows)
        for j in range(width - 2, -1, -1):
            taps[:, j] = step[taps[:, j + 1]]
        contiguous = (taps == np.arange(num_rows)[:, None] + np.arange(1 - width, 1)).all(axis=1)
        rows = np.flatnonzero(~contiguous)
        return ConvLayout.build(
            head_rows=rows, head_taps=taps[rows], num_rows=num_rows, num_received=num_received, device=device
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvContext:
    """What `causal_conv1d` needs to know about the slice.

    Attributes:
        halo_exchange: brings the R received rows.
        layout: the taps.
        group: the cp group.
    """

    halo_exchange: RowTransfer
    layout: ConvLayout
    group: Group

    @cached_property
    def fla_segments(self) -> "ConvSegments":
        """The layout as flash-linear-attention's kernels take it, made at first use and shared by all layers."""
        from deltamesh.ops.causal_conv1d.fla import ConvSegments  # loads Triton: only where it is used

        return ConvSegments.from_layout(self.layout)
