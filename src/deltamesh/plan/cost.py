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
        row: work that does not depend on the row's place (projections, MLP, delta rule).
        key: work for each key that the row attends to (all attention layers together).
        head: work of a row that has a target (one row of logits).
        through: further work of a row on the path from a state that enters its slice to one that leaves it: its part of
            the transitions M and of the second state pass.

    Example:
        >>> CostModel(row=10.0, key=1.0, head=5.0).rows(np.array([0, 1, 2]), np.array([2])).tolist()
        [11.0, 12.0, 18.0]
    """

    row: float = 1.0
    key: float = 0.0
    head: float = 0.0
    through: float = 0.0

    def rows(self, position_T: Ints, target_rows: Ints) -> Floats:
        """float64 [T]: the cost of rows at these positions of their paths, wherever the cuts fall.

        Args:
            position_T: int64 [T].
            target_rows: int64, rows that have a target (repeats count once).
        """
        cost_T = (self.row + self.key * (position_T + 1.0)).astype(np.float64)
        cost_T[np.unique(target_rows)] += self.head
        return cost_T
