"""Prefix trees: sequences to a stream that stores each shared token once. Pure numpy."""

from deltamesh.tree.edges import Edges, build_edges
from deltamesh.tree.prefix_tree import PrefixTree, build_prefix_tree
from deltamesh.tree.stream import SequenceRows, Stream, all_sequence_rows, build_stream, sequence_rows

__all__ = [
    "Edges",
    "PrefixTree",
    "SequenceRows",
    "Stream",
    "all_sequence_rows",
    "build_edges",
    "build_prefix_tree",
    "build_stream",
    "sequence_rows",
]
