"""Cost: what a row costs by its place, so that cuts balance work and items are dealt evenly.

The unit is one multiply-add of the forward pass; only ratios matter.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltamesh.plan.pieces import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Work of one row of the stream.

    Attributes:
        row: work that does not depend on the row's place (projections, MLP, delta rule, head).
        key: work for each key that the row attends to (all attention layers together).

    Example:
        >>> CostModel(row=10.0, key=1.0).rows(np.array([0, 1, 2])).tolist()
        [11.0, 12.0, 13.0]
    """

    row: float = 1.0
    key: float = 0.0

    def rows(self, position_T: Ints) -> Floats:
        """float64 [T]: the cost of rows at these positions of their paths."""
        return (self.row + self.key * (position_T + 1.0)).astype(np.float64)


def balanced_cuts(cost_T: Floats, num_slices: int) -> Ints:
    """Cuts at the quantiles of the summed cost: int64 [num_slices + 1].

    Example:
        >>> balanced_cuts(np.array([1.0, 1.0, 1.0, 3.0]), 2).tolist()
        [0, 3, 4]
    """
    total = np.cumsum(cost_T)
    goals = (np.arange(1, num_slices) / num_slices) * (total[-1] if len(total) else 0.0)
    inner = np.searchsorted(total - cost_T / 2, goals)  # a row goes to the side that holds its middle
    return np.concatenate([[0], inner, [len(cost_T)]]).astype(np.int64)
