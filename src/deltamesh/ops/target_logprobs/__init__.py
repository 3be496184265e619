"""Log-probabilities of target tokens under a vocabulary that the tp ranks share: `target_logprobs`.

Letters: T hidden rows, E edges, V rows of the head on this rank, D model width.
"""

import torch
from torch import Tensor

from deltamesh.distributed.collectives import Group
from deltamesh.ops.target_logprobs.blockwise import Shard, TargetLogprobs
from deltamesh.ops.target_logprobs.naive import target_logprobs_naive

__all__ = ["target_logprobs", "target_logprobs_naive"]


def target_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_E: Tensor,
    *,
    rows_E: Tensor | None = None,
    vocab_start: int,
    vocab_size: int,
    group: Group,
    chunk_rows: int = 256,
) -> Tensor:
    """log softmax(hidden @ head^T) at the target of each edge, the head's rows dealt to the ranks of `group`.

    Neither the logits nor one hidden row per edge ever exist: edges of one row share its tiles of logits. Two small
    messages over `group`, whatever the size, also without edges; no message in the backward.

    Args:
        hidden_TD: hidden rows, the same on every rank; any float dtype, computed in fp32 (fp64 for fp64 rows).
        weight_VD: this rank's rows vocab_start .. vocab_start + V of the head; V may differ between ranks or be 0.
        targets_E: int64, global vocabulary index of each edge's target, the same on every rank.
        rows_E: int64, hidden row of each edge, in any order, repeats allowed; None means edge e reads row e.
        vocab_start: first vocabulary index of this rank.
        vocab_size: size of the whole vocabulary.
        group: the tp group.
        chunk_rows: rows of a tile of logits; changes memory and speed only.

    Returns:
        [E] in fp32 (fp64), the same on every rank. In the backward, hidden's gradient is this rank's part: the sum over
        `group` is the gradient (`collectives.gather_rows` and `copy_to_group` take it). The gradient of each edge's
        log-probability is taken to be the same on every rank.

    Raises:
        ValueError: shapes that do not fit, a shard outside the vocabulary, targets outside it.

    Example:
        >>> hidden, head = torch.zeros(2, 3), torch.ones(4, 3)
        >>> one = Group.single()
        >>> target_logprobs(hidden, head, torch.tensor([0, 3]), vocab_start=0, vocab_size=4, group=one).exp().tolist()
        [0.25, 0.25]
    """
    if hidden_TD.dim() != 2 or weight_VD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden rows {tuple(hidden_TD.shape)} and head {tuple(weight_VD.shape)} do not fit; give [T, D] and [V, D]"
        )
    if not 0 <= vocab_start <= vocab_start + weight_VD.shape[0] <= vocab_size:
        raise ValueError(
            f"vocab_start={vocab_start} with {weight_VD.shape[0]} local rows leaves the vocabulary of"
            f" vocab_size={vocab_size}; give this rank's own rows of the head"
        )
    if rows_E is None:
        rows_E = torch.arange(hidden_TD.shape[0], device=hidden_TD.device)
    if targets_E.dim() != 1 or targets_E.shape != rows_E.shape:
        raise ValueError(
            f"{tuple(targets_E.shape)} targets for {tuple(rows_E.shape)} edges; give one target per edge"
            " (rows_E, or every hidden row)"
        )
    # elsewhere this would wait for the device; the plan has checked targets by then
    if (
        targets_E.device.type == "cpu"
        and targets_E.numel()
        and not 0 <= targets_E.min() <= targets_E.max() < vocab_size
    ):
        raise ValueError(
            f"targets span {int(targets_E.min())}..{int(targets_E.max())}, outside the vocabulary of"
            f" vocab_size={vocab_size}; drop edges without a target (-100) before"
        )
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows} cannot hold a row; give at least 1")
    shape = Shard(
        vocab_start=vocab_start,
        chunk_rows=chunk_rows,
        group=group,
        keep_mean=hidden_TD.requires_grad and torch.is_grad_enabled(),
    )
    return TargetLogprobs.apply(hidden_TD, weight_VD, rows_E, targets_E, shape)  # type: ignore[no-any-return]
