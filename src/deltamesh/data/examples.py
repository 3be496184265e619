"""Examples: token rows with targets and weights. An item is a tuple of examples that stay together.

Letters: n tokens of an example.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One sequence to train on; its loss is `-(weights * log p(target_tokens | path)).sum()` over targets not ignored.

    Attributes:
        input_tokens: int64 [n].
        target_tokens: int64 [n], the token that each position is to predict, -100 where it predicts nothing.
        weights: float64 [n], factor of each log-probability, 0 where the target is ignored.
    """

    input_tokens: Ints
    target_tokens: Ints
    weights: Floats

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return len(self.input_tokens)

    @property
    def num_loss_tokens(self) -> int:
        """Positions with a target."""
        return int(np.count_nonzero(self.target_tokens != IGNORE_INDEX))


Item: TypeAlias = tuple[Example, ...]


def example_from_targets(input_tokens: Ints, target_tokens: Ints, *, weight: float = 1.0) -> Example:
    """An example whose every target has the same weight."""
    weights = np.where(target_tokens != IGNORE_INDEX, weight, 0.0)
    return Example(input_tokens=input_tokens, target_tokens=target_tokens, weights=weights)


def example_from_mask(input_tokens: Ints, learned: Bools, *, weight: float = 1.0) -> Example:
    """An example that learns the tokens marked in `learned`, each at the position before it.

    The first token has no position before it, so its mark has no effect; the last position predicts nothing.

    Example:
        >>> example = example_from_mask(np.array([7, 8, 9]), np.array([False, False, True]))
        >>> example.target_tokens.tolist(), example.weights.tolist()
        ([-100, 9, -100], [0.0, 1.0, 0.0])
    """
    target_tokens = np.full(len(input_tokens), IGNORE_INDEX, dtype=np.int64)
    target_tokens[:-1] = np.where(learned[1:], input_tokens[1:], IGNORE_INDEX)
    return example_from_targets(input_tokens, target_tokens, weight=weight)
