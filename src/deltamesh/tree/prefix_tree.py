"""The prefix tree of a micro-batch: the compressed trie of its sequences, each shared token stored once.

Letters: T rows of the stream, S sequences, n nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixTree:
    """The compressed trie (a forest) of the sequences of a micro-batch, in depth-first pre-order.

    A node is a maximal run of tokens shared by exactly the same sequences. Nodes are numbered in pre-order and children
    stand in the order in which their first sequence appears in the input, so rows of a node are contiguous in the
    stream, node order is row order, and the rows below a node are one interval. A sequence that is a prefix of another
    ends at an inner node; a node without tokens does not exist.

    Attributes:
        node_parent: int64 [n], parent of each node, -1 at roots; always smaller than the node itself.
        node_start: int64 [n], row of the first token of each node.
        node_length: int64 [n], tokens of each node, at least 1.
        node_depth_start: int64 [n], position of the first token of each node on its path (0 at roots).
        node_subtree_stop: int64 [n], one past the last row of the subtree of each node.
        tokens: int64 [T], the stream.
        sequence_node: int64 [S], node with which each sequence ends (it always ends on the last row of that node).
        sequence_length: int64 [S], tokens of each sequence.
    """

    node_parent: Ints
    node_start: Ints
    node_length: Ints
    node_depth_start: Ints
    node_subtree_stop: Ints
    tokens: Ints
    sequence_node: Ints
    sequence_length: Ints

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees."""
        return len(self.node_start)

    @property
    def num_rows(self) -> int:
        """Rows of the stream (each shared token counted once)."""
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences of the micro-batch, duplicates counted."""
        return len(self.sequence_node)

    @property
    def num_source_tokens(self) -> int:
        """Tokens of the sequences as given; `num_source_tokens / num_rows` is what sharing saves."""
        return int(self.sequence_length.sum())


def build_prefix_tree(sequences: Sequence[npt.ArrayLike]) -> PrefixTree:
    """Build the prefix tree of the sequences of a micro-batch.

    Sequences are sorted as byte strings, so that sequences with a common prefix are neighbours, and the tree follows
    from the lengths of the prefixes that neighbours share (the construction of a suffix tree from a suffix array,
    Kasai et al. 2001). The cost is one byte-wise sort plus one comparison per neighbour; Python loops run over nodes
    (at most 2 S - 1), never over tokens, and nothing recurses.

    Args:
        sequences: S one-dimensional integer arrays of token ids >= 0, each with at least one token. S may be 0.

    Returns:
        The tree; all arrays int64.

    Raises:
        ValueError: a sequence is empty, not one-dimensional, or holds a negative id; the message names its index.
        TypeError: a sequence does not hold integers; the message names its index.

    Example:
        >>> tree = build_prefix_tree([[5, 6, 7], [5, 6, 8, 9], [5, 6]])
        >>> tree.tokens.tolist(), tree.node_parent.tolist(), tree.sequence_node.tolist()
        ([5, 6, 7, 8, 9], [-1, 0, 0], [1, 2, 0])
    """
    rows = [check_tokens(sequence, what=f"sequence {i}") for i, sequence in enumerate(sequences)]
    num_sequences = len(rows)
    length_S = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    offset_S = np.cumsum(length_S) - length_S

    # Any order in which sequences with a common prefix are neighbours will do, so native byte order is fine; narrower
    # integers only make the comparison shorter. A proper prefix sorts before what it is a prefix of.
    narrow = np.int32 if flat.size == 0 or int(flat.max()) <= np.iinfo(np.int32).max else np.int64
    keys = [row.astype(narrow).tobytes() for row in rows]
    order = sorted(range(num_sequences), key=keys.__getitem__)
    shared = _shared_prefixes(rows, keys, order)

    parent, depth_stop, first, end_node = _nodes_from_shared_prefixes(order, shared, length_S.tolist())
    new_to_old, parent_n = _pre_order(parent, first)
    old_to_new = np.empty_like(new_to_old)
    old_to_new[new_to_old] = np.arange(len(new_to_old))

    depth_stop_n = np.array(depth_stop, dtype=np.int64)[new_to_old]
    first_n = np.array(first, dtype=np.int64)[new_to_old]
    depth_start_n = np.where(parent_n >= 0, depth_stop_n[parent_n], 0) if len(parent_n) else parent_n
    length_n = depth_stop_n - depth_start_n
    start_n = np.cumsum(length_n) - length_n
    source_T = ragged_ranges(offset_S[first_n] + depth_start_n, length_n)
    return PrefixTree(
        node_parent=parent_n,
        node_start=start_n,
        node_length=length_n,
        node_depth_start=depth_start_n,
        node_subtree_stop=_subtree_stops(parent_n, start_n + length_n),
        tokens=flat[source_T],
        sequence_node=old_to_new[np.array(end_node, dtype=np.int64)],
        sequence_length=length_S,
    )


def check_tokens(values: npt.ArrayLike, *, what: str) -> Ints:
    """Return `values` as int64 [n], n >= 1, all >= 0; `what` names them in the errors.

    Raises:
        ValueError: not one-dimensional, empty, or a negative id.
        TypeError: not integers.

    Example:
        >>> check_tokens([3, 1], what="sequence 0").dtype.name
        'int64'
    """
    ids = check_integers(values, what=what)
    if ids.size == 0:
        raise ValueError(f"{what} is empty; every sequence needs at least one token, so drop it or fill it")
    if ids.min() < 0:
        i = int(np.argmax(ids < 0))
        raise ValueError(f"{what} holds token id {int(ids[i])} at position {i}; token ids must be >= 0")
    return ids


def check_integers(values: npt.ArrayLike, *, what: str) -> Ints:
    """Return `values` as int64 [n] (n may be 0); `what` names them in the errors.

    Raises:
        ValueError: not one-dimensional, or an id that int64 cannot hold.
        TypeError: not integers.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{what} has shape {array.shape}; give a one-dimensional array of token ids")
    if array.size == 0:  # an empty list has dtype float64: no reason to complain about its dtype
        return np.zeros(0, dtype=np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{what} has dtype {array.dtype}; token ids must be integers, convert them to int64 first")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{what} holds {int(array.max())}, which does not fit int64")
    return np.ascontiguousarray(array, dtype=np.int64)


def ragged_ranges(start: Ints, length: Ints) -> Ints:
    """Concatenate `arange(start[i], start[i] + length[i])` for all i, without a loop: int64 [length.sum()].

    Example:
        >>> ragged_ranges(np.array([7, 2]), np.array([2, 3])).tolist()
        [7, 8, 2, 3, 4]
    """
    stop = np.cumsum(length)
    total = int(stop[-1]) if len(stop) else 0
    return np.repeat(start - (stop - length), length) + np.arange(total, dtype=np.int64)


def _shared_prefixes(rows: list[Ints], keys: list[bytes], order: list[int]) -> list[int]:
    """Tokens that each sequence of `order` shares with the one before it (0 for the first)."""
    shared = [0] * len(order)
    for i in range(1, len(order)):
        before, here = order[i - 1], order[i]
        if keys[before] == keys[here]:  # one memcmp
            shared[i] = len(rows[here])
            continue
        common = min(len(rows[before]), len(rows[here]))
        differs = rows[before][:common] != rows[here][:common]
        at = int(differs.argmax())
        shared[i] = at if differs[at] else common
    return shared


def _nodes_from_shared_prefixes(
    order: list[int], shared: list[int], lengths: list[int]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Nodes in order of creation: parent, depth of the end, first sequence below; and per sequence its last node."""
    parent: list[int] = []
    depth_stop: list[int] = []
    first: list[int] = []  # smallest sequence index at or below the node
    end_node = [-1] * len(order)
    path: list[int] = []  # nodes of the previous sequence, from its root

    def depth() -> int:
        return depth_stop[path[-1]] if path else 0

    def push(stop: int, sequence: int) -> None:
        parent.append(path[-1] if path else -1)
        depth_stop.append(stop)
        first.append(sequence)
        path.append(len(parent) - 1)

    for sequence, keep in zip(order, shared, strict=True):
        popped = -1
        while depth() > keep:
            popped = path.pop()
            if path and depth() >= keep:  # otherwise its parent is the node that is about to be split off
                first[path[-1]] = min(first[path[-1]], first[popped])
        if depth() < keep:  # the paths part inside `popped`: its upper part becomes a node of its own
            push(keep, first[popped])
            parent[popped] = path[-1]
        if lengths[sequence] > keep:
            push(lengths[sequence], sequence)
        # otherwise it repeats the sequence before it, and the sort is stable: the smaller index has been here already
        end_node[sequence] = path[-1]
    while len(path) > 1:
        popped = path.pop()
        first[path[-1]] = min(first[path[-1]], first[popped])
    return parent, depth_stop, first, end_node


def _pre_order(parent: list[int], first: list[int]) -> tuple[Ints, Ints]:
    """Depth-first order, siblings by first sequence: old index and new parent of each new node."""
    num_nodes = len(parent)
    children: list[list[int]] = [[] for _ in range(num_nodes + 1)]  # the last list holds the roots (parent -1)
    for node in sorted(range(num_nodes), key=first.__getitem__, reverse=True):
        children[parent[node]].append(node)  # descending, so that the smallest is popped first
    new_to_old: list[int] = []
    new_parent: list[int] = []
    todo = [(node, -1) for node in children[num_nodes]]
    while todo:
        node, above = todo.pop()
        here = len(new_to_old)
        new_to_old.append(node)
        new_parent.append(above)
        todo.extend((child, here) for child in children[node])
    return np.array(new_to_old, dtype=np.int64), np.array(new_parent, dtype=np.int64)


def _subtree_stops(parent_n: Ints, stop_n: Ints) -> Ints:
    """One past the last row of each subtree; `stop_n` is one past the last row of each node itself."""
    stops = stop_n.tolist()
    parents = parent_n.tolist()
    for node in range(len(stops) - 1, -1, -1):  # descending: the last child has spoken before its parent is read
        above = parents[node]
        if above >= 0:
            stops[above] = max(stops[above], stops[node])
    return np.array(stops, dtype=np.int64)
