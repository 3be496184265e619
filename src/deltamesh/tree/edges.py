"""Edges: the (row, target) pairs whose log-probabilities a micro-batch asks for, each computed once.

Letters: E edges, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltamesh.tree.prefix_tree import Ints, PrefixTree, check_integers
from deltamesh.tree.stream import all_sequence_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """Unique (row, target) pairs, and where each source position finds its pair.

    The last row of a shared prefix has one edge per distinct next token, so it may appear more than once in `row_E`.

    Attributes:
        row_E: int64 [E], row of the stream; ascending.
        target_E: int64 [E], target token; ascending within a row.
        edge_of: int64 [sum of sequence lengths], edge of each source position, or -1 where the target is ignored.
        offsets: int64 [S + 1]; sequence s owns `edge_of[offsets[s]:offsets[s + 1]]`, in position order.
    """

    row_E: Ints
    target_E: Ints
    edge_of: Ints
    offsets: Ints

    @property
    def num_edges(self) -> int:
        """Number of unique (row, target) pairs."""
        return len(self.row_E)

    def of(self, sequence: int) -> Ints:
        """Edge of each position of one sequence, -1 where ignored: int64 [n]."""
        return self.edge_of[self.offsets[sequence] : self.offsets[sequence + 1]]

    def sum_to_edges(self, values: Sequence[npt.NDArray[np.floating]]) -> npt.NDArray[np.float64]:
        """Add up per-position values (say loss weights) over all sequences that hold an edge: float64 [E].

        Values at ignored positions do not count.

        Args:
            values: S arrays, each as long as its sequence.

        Raises:
            ValueError: the number of arrays or the length of one does not match.
        """
        num_sequences = len(self.offsets) - 1
        if len(values) != num_sequences:
            raise ValueError(f"{len(values)} value arrays were given for {num_sequences} sequences; give one for each")
        for s, value in enumerate(values):
            expected = int(self.offsets[s + 1] - self.offsets[s])
            if np.shape(value) != (expected,):
                raise ValueError(f"values of sequence {s} have shape {np.shape(value)}; its length is {expected}")
        flat = np.concatenate([np.zeros(0), *(np.asarray(value, dtype=np.float64) for value in values)])
        counted = self.edge_of >= 0
        total_E = np.bincount(self.edge_of[counted], weights=flat[counted], minlength=self.num_edges)
        return total_E.astype(np.float64, copy=False)  # without edges, bincount of some versions counts integers


def build_edges(tree: PrefixTree, targets: Sequence[npt.ArrayLike | None], ignore_index: int = -100) -> Edges:
    """Collect the unique edges of a micro-batch.

    Args:
        tree: the prefix tree of the sequences.
        targets: S integer arrays, each as long as its sequence; None for a sequence without targets.
        ignore_index: target value that asks for nothing.

    Returns:
        Edges sorted by (row, target).

    Raises:
        ValueError: a wrong number of arrays, a length that is not the sequence's, or a negative target other than
            `ignore_index`; the message names the sequence.
        TypeError: targets that are not integers.

    Example:
        >>> from deltamesh.tree.prefix_tree import build_prefix_tree
        >>> tree = build_prefix_tree([[5, 6, 7], [5, 6, 8]])
        >>> edges = build_edges(tree, [[6, 7, -100], [6, 8, -100]])
        >>> edges.row_E.tolist(), edges.target_E.tolist(), edges.edge_of.tolist()
        ([0, 1, 1], [6, 7, 8], [0, 1, -1, 0, 2, -1])
    """
    if len(targets) != tree.num_sequences:
        raise ValueError(
            f"{len(targets)} target arrays were given for {tree.num_sequences} sequences; "
            f"give one for each (None where a sequence has no targets)"
        )
    every = all_sequence_rows(tree)
    target = np.full(len(every.rows), ignore_index, dtype=np.int64)
    for s, given in enumerate(targets):
        if given is not None:
            target[every.offsets[s] : every.offsets[s + 1]] = _check_targets(
                given, sequence=s, length=int(tree.sequence_length[s]), ignore_index=ignore_index
            )
    wanted = np.flatnonzero(target != ignore_index)
    row, token = every.rows[wanted], target[wanted]
    # one key sorts both; ids too large for it are replaced by their rank. A sequence's rows ascend already, which the
    # stable sort makes use of.
    rank = token if token.max(initial=0) < 2**31 else np.unique(token, return_inverse=True)[1]
    order = np.argsort(row * (int(rank.max(initial=0)) + 1) + rank, kind="stable")
    row, token = row[order], token[order]
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (row[1:] != row[:-1]) | (token[1:] != token[:-1])
    edge_of = np.full(len(every.rows), -1, dtype=np.int64)
    edge_of[wanted[order]] = np.cumsum(is_new) - 1
    return Edges(row_E=row[is_new], target_E=token[is_new], edge_of=edge_of, offsets=every.offsets)


def _check_targets(given: npt.ArrayLike, *, sequence: int, length: int, ignore_index: int) -> Ints:
    array = check_integers(given, what=f"targets of sequence {sequence}")
    if len(array) != length:
        raise ValueError(
            f"targets of sequence {sequence} have length {len(array)}, its tokens have length {length}; "
            f"give one target per token ({ignore_index} where there is none)"
        )
    bad = (array < 0) & (array != ignore_index)
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"targets of sequence {sequence} hold {int(array[i])} at position {i}; "
            f"a target is a token id >= 0 or {ignore_index} (ignored)"
        )
    return array
