"""Tree attention from a dense mask. Obviously right, and X x T of memory.

Letters: T query rows, X key rows, H query heads, J key/value heads, G = H // J, D head dim.
"""

import torch
from torch import Tensor

from deltamesh.ops.tree_attention.layout import AttentionLayout


def tree_attention_naive(
    q_THD: Tensor, k_XJD: Tensor, v_XJD: Tensor, *, scale: float, layout: AttentionLayout
) -> Tensor:
    """softmax(scale q k^T, over the row itself and its ancestors) v; query head h reads key head h // G."""
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    group = q_THD.shape[1] // k_XJD.shape[1]
    k_XHD, v_XHD = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k_XJD, v_XJD))
    rows_T, keys_X = layout.row_X[layout.num_received :], layout.row_X
    sees_TX = (keys_X <= rows_T[:, None]) & (rows_T[:, None] < layout.visible_until_X)
    scores_HTX = torch.einsum("thd,xhd->htx", q_THD.to(dtype) * scale, k_XHD)
    p_HTX = torch.softmax(scores_HTX.masked_fill(~sees_TX, -torch.inf), dim=-1)
    return torch.einsum("htx,xhd->thd", p_HTX, v_XHD).to(q_THD.dtype)
