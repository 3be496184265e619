"""Target log-probabilities from full logits. Obviously right, and T x V of memory."""

import torch
from torch import Tensor


def target_logprobs_naive(
    hidden_TD: Tensor, weight_VD: Tensor, targets_E: Tensor, *, rows_E: Tensor | None = None
) -> Tensor:
    """log softmax(hidden @ weight^T)[rows_E, targets_E] for the whole vocabulary on one process.

    Args:
        hidden_TD, weight_VD: hidden rows and all rows of the head.
        targets_E: int64, target of each edge.
        rows_E: int64, hidden row of each edge; None means edge e reads row e.
    """
    dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
    logprobs_TV = torch.log_softmax(hidden_TD.to(dtype) @ weight_VD.to(dtype).T, dim=-1)
    if rows_E is not None:
        logprobs_TV = logprobs_TV.index_select(0, rows_E)
    return logprobs_TV.gather(1, targets_E[:, None])[:, 0]
