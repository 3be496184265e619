"""Losses of one sequence from the log-probabilities of its targets. Sums, not means: the caller normalises.

Dividing by the number of trained tokens belongs in `TrainerRank.optim_step(scale_grads=1 / tokens)`, where it is the
same on every topology and however a batch is split into micro-batches.

Letters: n tokens of a sequence.
"""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

Loss = Callable[..., Tensor]
"""A loss takes log-probabilities [n] and named tensors [n], and returns a scalar."""


def cross_entropy(logprobs: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """`-(weights * logprobs).sum()`.

    Args:
        logprobs: [n] log-probabilities of the targets; 0 where a target is ignored, as `ForwardOutput` has them.
        weights: [n] factor of each term; None is 1. With advantages for weights this is the policy gradient of data
            drawn from the current policy.

    Raises:
        ValueError: tensors of unequal shapes.

    Example:
        >>> cross_entropy(torch.tensor([-1.0, -2.0]), weights=torch.tensor([1.0, 0.5]))
        tensor(2.)
    """
    if weights is None:
        return -logprobs.sum()
    _check(logprobs, weights=weights)
    return -(weights * logprobs).sum()


def importance_sampling(logprobs: Tensor, *, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """`-(exp(logprobs - old_logprobs) * advantages).sum()`, per token: the policy gradient of data of an older policy.

    Args:
        logprobs: [n] as in `cross_entropy`.
        old_logprobs: [n] log-probabilities of the same targets under the policy that drew them; constants.
        advantages: [n] 0 where a target is ignored or not to be learned.

    Raises:
        ValueError: tensors of unequal shapes.

    Example:
        >>> lp = torch.tensor([-1.0, -2.0])
        >>> importance_sampling(lp, old_logprobs=lp, advantages=torch.tensor([1.0, 3.0]))
        tensor(-4.)
    """
    _check(logprobs, old_logprobs=old_logprobs, advantages=advantages)
    return -(_ratio(logprobs, old_logprobs, advantages) * advantages).sum()


def ppo(
    logprobs: Tensor, *, old_logprobs: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """`-min(ratio * advantages, clip(ratio, 1 - clip_low, 1 + clip_high) * advantages).sum()`, per token.

    The ratio is `exp(logprobs - old_logprobs)`; the formula is equation 7 of "Proximal Policy Optimization Algorithms"
    (arXiv 1707.06347), as a sum.

    Args:
        logprobs, old_logprobs, advantages: [n] as in `importance_sampling`.
        clip_low, clip_high: how far the ratio may leave 1 before the term stops pushing it further.

    Raises:
        ValueError: tensors of unequal shapes, or clipping that cannot be.

    Example:
        >>> ppo(torch.zeros(1), old_logprobs=-torch.ones(1), advantages=torch.ones(1))  # a ratio of e
        tensor(-1.2000)
    """
    _check(logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: use 0 <= clip_low <= 1 and clip_high >= 0")
    ratio = _ratio(logprobs, old_logprobs, advantages)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


LOSSES: Final[Mapping[str, Loss]] = MappingProxyType(
    {"cross_entropy": cross_entropy, "importance_sampling": importance_sampling, "ppo": ppo}
)


def loss_function(name: str) -> Loss:
    """The loss of that name.

    Raises:
        ValueError: there is none; says which there are.

    Example:
        >>> loss_function("ppo") is ppo
        True
    """
    if name not in LOSSES:
        close = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no loss {name!r}{hint} (losses: {', '.join(LOSSES)})")
    return LOSSES[name]


def _ratio(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """exp(new - old) where the advantage counts, else 1: an ignored token's old value may be anything, even -inf."""
    counts = advantages != 0
    return torch.where(counts, logprobs - torch.where(counts, old_logprobs, logprobs.detach()), 0.0).exp()


def _check(logprobs: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.shape != logprobs.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, logprobs has {tuple(logprobs.shape)}; "
                "give one value per token of the sequence"
            )
