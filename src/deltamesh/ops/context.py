"""What the ops of a layer need to know about the slice of the stream they work on, made once per micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltamesh.distributed.collectives import Group, RowTransfer
from deltamesh.ops.causal_conv1d import ConvContext, ConvLayout
from deltamesh.ops.gated_delta_rule import ScanContext
from deltamesh.ops.tree_attention import AttentionContext, AttentionLayout
from deltamesh.plan.plan import SlicePlan


@dataclass(frozen=True, kw_only=True, eq=False)
class SliceContext:
    """One rank's slice of a micro-batch, as its layers see it.

    Attributes:
        cp, tp: groups of this rank.
        sp: whether the residual stream is sharded by rows over tp.
        num_rows: rows T of the slice.
        positions_T: int64 [T], rotary positions.
        scan, conv, attention: of the three ops that look at other rows.
    """

    cp: Group
    tp: Group
    sp: bool
    num_rows: int
    positions_T: Tensor
    scan: ScanContext
    conv: ConvContext
    attention: AttentionContext

    @staticmethod
    def from_plan(plan: SlicePlan, *, cp: Group, tp: Group, sp: bool, device: torch.device) -> "SliceContext":
        """Copies the index tables of a slice to `device`."""
        num_rows = plan.stop - plan.start
        return SliceContext(
            cp=cp,
            tp=tp,
            sp=sp,
            num_rows=num_rows,
            positions_T=torch.from_numpy(plan.positions).to(device),
            scan=ScanContext.from_plan(plan.pieces, plan.links, group=cp, device=device),
            conv=ConvContext(
                halo_exchange=RowTransfer.from_plan(plan.halo.exchange, device),
                layout=ConvLayout.from_plan(plan.halo, num_rows=num_rows, device=device),
                group=cp,
            ),
            attention=AttentionContext(
                kv_exchange=RowTransfer.from_plan(plan.ancestors.exchange, device),
                layout=AttentionLayout.from_plan(plan.ancestors, device=device),
                group=cp,
            ),
        )
