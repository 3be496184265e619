"""The stream as rows: what each row continues, where it stands on its path, and which rows descend from it.

Letters: T rows of the stream, S sequences, n nodes.
"""

from dataclasses import dataclass

import numpy as np

from deltamesh.tree.prefix_tree import Ints, PrefixTree, ragged_ranges


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Per-row arrays of a prefix tree.

    Row k is an ancestor of row q, or q itself, exactly where `tin_T[k] <= tin_T[q] < tout_T[k]`: that is the attention
    mask.

    Attributes:
        predecessor_T: int64 [T], the row before each row on its path, -1 at roots.
        position_T: int64 [T], number of rows before each row on its path.
        tin_T: int64 [T], the row itself.
        tout_T: int64 [T], one past the last row that descends from the row's node.
        node_T: int64 [T], node of each row.
    """

    predecessor_T: Ints
    position_T: Ints
    tin_T: Ints
    tout_T: Ints
    node_T: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceRows:
    """The rows of all sequences, in source order, one after the other.

    Attributes:
        rows: int64 [sum of sequence lengths], rows of sequence 0, then of sequence 1, ...
        offsets: int64 [S + 1]; sequence s owns `rows[offsets[s]:offsets[s + 1]]`.
    """

    rows: Ints
    offsets: Ints

    def of(self, sequence: int) -> Ints:
        """Rows of one sequence, in source order: int64 [n]."""
        return self.rows[self.offsets[sequence] : self.offsets[sequence + 1]]


def build_stream(tree: PrefixTree) -> Stream:
    """Derive the per-row arrays of a tree.

    Example:
        >>> from deltamesh.tree.prefix_tree import build_prefix_tree
        >>> stream = build_stream(build_prefix_tree([[5, 6, 7], [5, 6, 8, 9]]))
        >>> stream.predecessor_T.tolist(), stream.position_T.tolist(), stream.tout_T.tolist()
        ([-1, 0, 1, 1, 3], [0, 1, 2, 2, 3], [5, 5, 3, 5, 5])
    """
    tin_T = np.arange(tree.num_rows, dtype=np.int64)
    node_T = np.repeat(np.arange(tree.num_nodes, dtype=np.int64), tree.node_length)
    predecessor_T = tin_T - 1
    last_row_n = tree.node_start + tree.node_length - 1
    has_parent = tree.node_parent >= 0
    predecessor_T[tree.node_start[has_parent]] = last_row_n[tree.node_parent[has_parent]]
    predecessor_T[tree.node_start[~has_parent]] = -1
    return Stream(
        predecessor_T=predecessor_T,
        position_T=tin_T + (tree.node_depth_start - tree.node_start)[node_T],
        tin_T=tin_T,
        tout_T=tree.node_subtree_stop[node_T],
        node_T=node_T,
    )


def sequence_rows(tree: PrefixTree, sequence: int) -> Ints:
    """Rows of one sequence in source order: int64 [sequence_length]; `tree.tokens[rows]` is the sequence.

    Raises:
        IndexError: there is no such sequence.

    Example:
        >>> from deltamesh.tree.prefix_tree import build_prefix_tree
        >>> sequence_rows(build_prefix_tree([[5, 6, 7], [5, 6, 8, 9]]), 1).tolist()
        [0, 1, 3, 4]
    """
    if not 0 <= sequence < tree.num_sequences:
        raise IndexError(f"sequence {sequence} does not exist; the tree holds sequences 0 to {tree.num_sequences - 1}")
    path: list[int] = []
    node = int(tree.sequence_node[sequence])
    while node >= 0:
        path.append(node)
        node = int(tree.node_parent[node])
    nodes = np.array(path[::-1], dtype=np.int64)
    return ragged_ranges(tree.node_start[nodes], tree.node_length[nodes])


def all_sequence_rows(tree: PrefixTree) -> SequenceRows:
    """Rows of all sequences at once; all paths are climbed together, so the loop runs over levels, not tokens.

    Example:
        >>> from deltamesh.tree.prefix_tree import build_prefix_tree
        >>> every = all_sequence_rows(build_prefix_tree([[5, 6, 7], [5, 6, 8, 9]]))
        >>> every.rows.tolist(), every.offsets.tolist()
        ([0, 1, 2, 0, 1, 3, 4], [0, 3, 7])
    """
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(tree.sequence_length)])
    target_start = [np.zeros(0, dtype=np.int64)]
    nodes = [np.zeros(0, dtype=np.int64)]
    node = tree.sequence_node
    base = offsets[:-1]
    while len(node):
        target_start.append(base + tree.node_depth_start[node])
        nodes.append(node)
        above = tree.node_parent[node]
        alive = above >= 0
        node, base = above[alive], base[alive]
    node_flat = np.concatenate(nodes)
    length = tree.node_length[node_flat]
    rows = np.empty(int(offsets[-1]), dtype=np.int64)
    rows[ragged_ranges(np.concatenate(target_start), length)] = ragged_ranges(tree.node_start[node_flat], length)
    return SequenceRows(rows=rows, offsets=offsets)
