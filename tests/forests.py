"""Random forests and cuts for tests."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from deltamesh.plan.pieces import Ints


@dataclass(frozen=True, kw_only=True)
class Forest:
    """Nodes in depth-first pre-order, and cuts."""

    parent: Ints
    start: Ints
    length: Ints
    cuts: Ints

    @property
    def num_rows(self) -> int:
        return int(self.length.sum())

    def predecessors(self) -> list[int]:
        """Row before each row on its path, token by token."""
        before: list[int] = []
        last = [int(s + n - 1) for s, n in zip(self.start, self.length, strict=True)]
        for node, (start, length) in enumerate(zip(self.start.tolist(), self.length.tolist(), strict=True)):
            parent = int(self.parent[node])
            before.append(last[parent] if parent >= 0 else -1)
            before.extend(range(start, start + length - 1))
        return before

    def path(self, row: int) -> list[int]:
        """Ancestors of a row, nearest first, without the row."""
        before, rows = self.predecessors(), []
        while (row := before[row]) >= 0:
            rows.append(row)
        return rows


def make_forest(parents: list[int], lengths: list[int], cut_points: list[float]) -> Forest:
    """A forest from parents (any earlier node, or -1), renumbered into depth-first pre-order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    new_parent: list[int] = []
    todo = [(root, -1) for root in reversed(children.get(-1, []))]
    while todo:
        node, above = todo.pop()
        order.append(node)
        new_parent.append(above)
        todo.extend((child, len(order) - 1) for child in reversed(children.get(node, [])))
    length = np.array([lengths[node] for node in order], dtype=np.int64)
    rows = int(length.sum())
    cuts = sorted(min(rows, int(point * (rows + 1))) for point in cut_points)
    return Forest(
        parent=np.array(new_parent, dtype=np.int64),
        start=np.cumsum(length) - length,
        length=length,
        cuts=np.array([0, *cuts, rows], dtype=np.int64),
    )


@st.composite
def forests(draw: st.DrawFn, max_nodes: int = 12, max_length: int = 6, max_slices: int = 6) -> Forest:
    """Random forests and cuts: empty slices, one-row slices and cuts at forks included."""
    n = draw(st.integers(1, max_nodes))
    parents = [draw(st.integers(-1, i - 1)) if i else -1 for i in range(n)]
    lengths = draw(st.lists(st.integers(1, max_length), min_size=n, max_size=n))
    points = draw(st.lists(st.floats(0, 1, allow_nan=False), max_size=max_slices - 1))
    return make_forest(parents, lengths, points)
