"""Path-wise causal depthwise convolution: `causal_conv1d` and its context.

Letters: T rows of the slice, D channels, W taps.
"""

from torch import Tensor

from deltamesh.distributed import collectives
from deltamesh.ops.causal_conv1d.conv import causal_conv1d_rows
from deltamesh.ops.causal_conv1d.layout import ConvContext, ConvLayout
from deltamesh.ops.causal_conv1d.naive import causal_conv1d_naive

__all__ = ["ConvContext", "ConvLayout", "causal_conv1d", "causal_conv1d_naive", "causal_conv1d_rows"]


def causal_conv1d(
    x_TD: Tensor,
    weight_DW: Tensor,
    *,
    context: ConvContext,
    activation: str | None = "silu",
    backend: str = "torch",
) -> Tensor:
    """Convolves each row with the W - 1 rows before it on its path, wherever they live.

    One exchange of rows over `context.group`, always, also where it carries nothing.

    Args:
        x_TD: rows of this slice, any float dtype; sums are fp32 (fp64 for fp64 rows).
        weight_DW: `conv1d.weight.squeeze(1)`; tap W - 1 multiplies the row itself.
        context: halo exchange, taps and group of this slice.
        activation: "silu" or None.
        backend: "torch" (any device), "fla" (flash-linear-attention's kernels, for CUDA), or "naive".

    Returns:
        [T, D] in x's dtype.

    Raises:
        ValueError: unknown backend or activation, shapes that do not fit the context.

    Example:
        >>> import numpy as np, torch
        >>> from deltamesh.plan import RowExchange
        >>> from deltamesh.distributed.collectives import Group, RowTransfer
        >>> nothing = RowExchange(send_rows=np.zeros(0, dtype=np.int64), send_splits=(0,), recv_splits=(0,))
        >>> context = ConvContext(
        ...     halo_exchange=RowTransfer.from_plan(nothing, torch.device("cpu")),
        ...     layout=ConvLayout.from_predecessors(np.array([-1, 0, 0]), num_rows=3, num_received=0, width=2),
        ...     group=Group.single(),
        ... )
        >>> x = torch.tensor([[1.0], [10.0], [100.0]])
        >>> causal_conv1d(x, torch.tensor([[2.0, 1.0]]), context=context, activation=None).flatten().tolist()
        [1.0, 12.0, 102.0]
    """
    if backend not in ("torch", "fla", "naive"):
        raise ValueError(f"backend={backend!r} is not a backend of causal_conv1d; use 'torch', 'fla' or 'naive'")
    halo_RD = collectives.exchange_rows(x_TD, context.halo_exchange, context.group)
    if backend == "fla":
        # imported here: it loads Triton, which the other backends do without
        from deltamesh.ops.causal_conv1d.fla import causal_conv1d_fla

        return causal_conv1d_fla(x_TD, halo_RD, weight_DW, context.fla_segments, activation)
    op = causal_conv1d_rows if backend == "torch" else causal_conv1d_naive
    return op(x_TD, halo_RD, weight_DW, context.layout, activation)
