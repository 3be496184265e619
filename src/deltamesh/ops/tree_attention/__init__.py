"""Attention of rows to their ancestors and themselves: `tree_attention` and its context.

Letters: T rows of the slice, R received rows, X = R + T key rows, H query heads, J key/value heads, D head dim.
"""

import torch
from torch import Tensor

from deltamesh.distributed import collectives
from deltamesh.ops.tree_attention.blockwise import tree_attention_rows
from deltamesh.ops.tree_attention.layout import AttentionContext, AttentionLayout
from deltamesh.ops.tree_attention.naive import tree_attention_naive

__all__ = ["AttentionContext", "AttentionLayout", "tree_attention", "tree_attention_naive", "tree_attention_rows"]


def tree_attention(
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    *,
    scale: float,
    context: AttentionContext,
    backend: str = "torch",
) -> Tensor:
    """softmax(scale q k^T) v over each row's ancestors, in this slice or earlier ones, and the row itself.

    One exchange of rows over `context.group`, always, also where it carries nothing. Rotary and output gate are the
    caller's.

    Args:
        q_THD: queries of this slice's rows, any float dtype; "torch" computes in fp32 (fp64 for fp64 rows).
        k_TJD, v_TJD: keys and values of the same rows; J divides H, and query head h reads key head h // (H // J).
        scale: factor of the scores.
        context: key exchange, layout and group of this slice.
        backend: "torch" (any device), "flex" (FlexAttention, for CUDA), or "naive".

    Returns:
        [T, H, D of v] in q's dtype.

    Raises:
        ValueError: unknown backend, shapes that do not fit together or the context.

    Example:
        >>> import numpy as np, torch
        >>> from deltamesh.plan import RowExchange
        >>> from deltamesh.distributed.collectives import Group, RowTransfer
        >>> nothing = RowExchange(send_rows=np.zeros(0, dtype=np.int64), send_splits=(0,), recv_splits=(0,))
        >>> context = AttentionContext(
        ...     kv_exchange=RowTransfer.from_plan(nothing, torch.device("cpu")),
        ...     layout=AttentionLayout.build(  # one row and its two children
        ...         segment_start=[0, 1, 2], segment_length=[1, 1, 1], segment_parent=[-1, 0, 0], num_received=0
        ...     ),
        ...     group=Group.single(),
        ... )
        >>> q, v = torch.zeros(3, 1, 2), torch.tensor([1.0, 3.0, 5.0])[:, None, None]
        >>> tree_attention(q, q, v, scale=1.0, context=context).flatten().tolist()
        [1.0, 2.0, 3.0]
    """
    if backend not in ("torch", "flex", "naive"):
        raise ValueError(f"backend={backend!r} is not a backend of tree_attention; use 'torch', 'flex' or 'naive'")
    _check(q_THD, k_TJD, v_TJD, context.layout)
    heads, widths = k_TJD.shape[1], [k_TJD.shape[2], v_TJD.shape[2]]
    kv_TJD = torch.cat([k_TJD, v_TJD], dim=-1)
    received = collectives.exchange_rows(kv_TJD.flatten(1), context.kv_exchange, context.group)
    kv_XJD = torch.cat([received.unflatten(1, (heads, sum(widths))), kv_TJD])
    k_XJD, v_XJD = kv_XJD.split(widths, dim=-1)
    if backend == "naive":
        return tree_attention_naive(q_THD, k_XJD, v_XJD, scale=scale, layout=context.layout)
    if backend == "torch" or q_THD.shape[0] == 0:  # FlexAttention takes no empty slices; here they cost nothing
        return tree_attention_rows(q_THD, k_XJD, v_XJD, scale=scale, layout=context.layout)
    # imported here: it loads the compiler, which takes a second that other backends need not spend
    from deltamesh.ops.tree_attention.flex import tree_attention_flex

    return tree_attention_flex(q_THD, k_XJD, v_XJD, scale=scale, mask=context.flex_mask)


def _check(q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, layout: AttentionLayout) -> None:
    if q_THD.dim() != 3 or k_TJD.dim() != 3 or v_TJD.dim() != 3 or k_TJD.shape[:2] != v_TJD.shape[:2]:
        raise ValueError(
            f"q {tuple(q_THD.shape)}, k {tuple(k_TJD.shape)}, v {tuple(v_TJD.shape)} do not fit together; give"
            " [T, H, D], [T, J, D] and [T, J, Dv]"
        )
    if k_TJD.shape[1] == 0 or q_THD.shape[1] % k_TJD.shape[1] or q_THD.shape[2] != k_TJD.shape[2]:
        raise ValueError(
            f"{q_THD.shape[1]} query heads of {q_THD.shape[2]} cannot read {k_TJD.shape[1]} key heads of"
            f" {k_TJD.shape[2]}; give key heads of the same width whose number divides that of the query heads"
        )
    if not q_THD.shape[0] == k_TJD.shape[0] == layout.num_rows:
        raise ValueError(
            f"{q_THD.shape[0]} queries and {k_TJD.shape[0]} keys were given, but the layout is of {layout.num_rows}"
            " rows; use the layout of this slice"
        )
