"""Prefix trees and streams against a brute-force trie, and the shapes that break tree code."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltamesh.tree import all_sequence_rows, build_prefix_tree, build_stream, sequence_rows

# Two or three distinct tokens and short lengths: nearly every example shares prefixes, repeats or nests sequences.
sequence_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=0, max_size=12)


def brute_force_rows(sequences):
    """The stream and every sequence's rows, from a token-by-token trie walked in depth-first order."""
    root = {}  # token -> (children in order of first appearance, holders)
    for s, sequence in enumerate(sequences):
        level = root
        for token in sequence:
            level, holders, ends = level.setdefault(token, ({}, set(), set()))
            holders.add(s)
        ends.add(s)
    rows = [[] for _ in sequences]
    stream = []  # (token, parent row, depth, holders)

    def walk(level, parent, depth):  # depth is at most the longest sequence, so recursion is fine in a test
        for token, (children, holders, _) in level.items():
            row = len(stream)
            stream.append([token, parent, depth, frozenset(holders), None])
            for s in holders:
                rows[s].append(row)
            walk(children, row, depth + 1)
            stream[row][4] = len(stream)

    walk(root, -1, 0)
    return stream, rows


def check_against_brute_force(sequences):
    tree = build_prefix_tree([np.array(s, dtype=np.int64) for s in sequences])
    stream = build_stream(tree)
    every = all_sequence_rows(tree)
    expected, rows = brute_force_rows(sequences)
    assert tree.tokens.tolist() == [e[0] for e in expected]
    assert stream.predecessor_T.tolist() == [e[1] for e in expected]
    assert stream.position_T.tolist() == [e[2] for e in expected]
    for s, expected_rows in enumerate(rows):
        assert every.of(s).tolist() == expected_rows
        assert sequence_rows(tree, s).tolist() == expected_rows
        assert tree.node_start[tree.sequence_node[s]] + tree.node_length[tree.sequence_node[s]] - 1 == expected_rows[-1]
    # nodes: rows of one node have the same holders, and a node and what follows it do not (so it is maximal)
    holders = [e[3] for e in expected]
    for row, (_, parent, _, _, stop) in enumerate(expected):
        same_node = parent >= 0 and holders[parent] == holders[row]
        assert (parent >= 0 and stream.node_T[row] == stream.node_T[parent]) == same_node
        node = stream.node_T[row]
        assert stream.tout_T[row] == tree.node_subtree_stop[node]
        if row == tree.node_start[node]:
            assert stop == tree.node_subtree_stop[node]
    assert (tree.node_length > 0).all()
    assert tree.node_length.sum() == tree.num_rows
    assert (tree.node_parent < np.arange(tree.num_nodes)).all()
    assert tree.num_source_tokens == sum(map(len, sequences))


@settings(max_examples=300, deadline=None)
@given(sequence_lists)
def test_tree_and_stream_equal_a_token_by_token_trie(sequences):
    check_against_brute_force(sequences)


@settings(max_examples=100, deadline=None)
@given(sequence_lists)
def test_interval_test_is_exactly_the_ancestor_relation(sequences):
    stream = build_stream(build_prefix_tree(sequences))
    num_rows = len(stream.tin_T)
    for q in range(num_rows):
        ancestors, row = set(), q
        while row >= 0:
            ancestors.add(row)
            row = int(stream.predecessor_T[row])
        seen = (stream.tin_T <= q) & (q < stream.tout_T)
        assert set(np.flatnonzero(seen).tolist()) == ancestors


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from([1, 2**31, 2**32 + 1]), min_size=1, max_size=4), max_size=6))
def test_ids_that_differ_above_32_bits_are_told_apart(sequences):
    check_against_brute_force(sequences)


def test_children_stand_in_order_of_first_appearance_not_of_token():
    tree = build_prefix_tree([[1, 9], [0, 5], [1, 2], [0, 3], [1, 9, 4]])
    assert tree.tokens.tolist() == [1, 9, 4, 2, 0, 5, 3]


def test_duplicates_share_every_row():
    tree = build_prefix_tree([[4, 5, 6]] * 3)
    assert tree.num_nodes == 1
    assert tree.sequence_node.tolist() == [0, 0, 0]
    assert all_sequence_rows(tree).rows.tolist() == [0, 1, 2] * 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_sequence_that_is_a_prefix_of_another_ends_at_an_inner_node(order):
    sequences = [[7, 8], [7, 8, 9]]
    tree = build_prefix_tree([sequences[i] for i in order])
    assert tree.node_length.tolist() == [2, 1]
    assert tree.sequence_node.tolist() == [order[0], order[1]]
    assert tree.node_subtree_stop.tolist() == [3, 3]


def test_depth_20_forks_at_every_token():
    sequences = [[0] * i + [1] for i in range(20)] + [[0] * 20]
    check_against_brute_force(sequences)
    assert build_prefix_tree(sequences).node_depth_start.max() == 19


def test_a_chain_of_5000_nested_sequences_needs_no_recursion():
    chain = np.arange(5000)
    tree = build_prefix_tree([chain[: i + 1] for i in range(5000)])
    assert (tree.node_length == 1).all()
    assert tree.node_parent.tolist() == list(range(-1, 4999))
    assert sequence_rows(tree, 4999).tolist() == list(range(5000))
    assert all_sequence_rows(tree).of(4321).tolist() == list(range(4322))


def test_5000_one_token_sequences_are_5000_roots_in_input_order():
    tokens = np.random.default_rng(0).permutation(5000)
    tree = build_prefix_tree(tokens[:, None])
    assert tree.tokens.tolist() == tokens.tolist()
    assert (tree.node_parent == -1).all()
    assert (tree.node_length == 1).all()
    assert (build_stream(tree).predecessor_T == -1).all()


@pytest.mark.parametrize("case", ["random", "equal", "comb", "last token"])
def test_a_million_tokens_build_in_under_two_seconds(case):
    spine, i = np.arange(1000), np.arange(1000)[:, None]
    rows = {
        "random": np.random.default_rng(0).integers(0, 150_000, size=(1000, 1000)),
        "equal": np.tile(spine, (1000, 1)),
        "comb": np.where(spine < i, spine, spine + 1000 * (1 + i)),
        "last token": np.where(spine < 999, spine, spine + i),
    }[case]
    start = time.perf_counter()
    tree = build_prefix_tree(list(rows))
    assert time.perf_counter() - start < 2.0  # about 0.015 s when nothing else runs
    assert tree.num_source_tokens == 1_000_000


def test_no_sequences_is_an_empty_tree():
    tree = build_prefix_tree([])
    assert tree.num_nodes == tree.num_rows == tree.num_sequences == 0
    assert len(build_stream(tree).tin_T) == 0
    assert all_sequence_rows(tree).offsets.tolist() == [0]


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64])
def test_any_integer_dtype_becomes_int64(dtype):
    tree = build_prefix_tree([np.array([1, 2], dtype=dtype), np.array([1, 3], dtype=dtype)])
    for name in ("tokens", "node_parent", "node_start", "node_subtree_stop", "sequence_node", "sequence_length"):
        assert getattr(tree, name).dtype == np.int64


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ([], ValueError, "sequence 1 is empty"),
        ([3, -1], ValueError, "sequence 1 holds token id -1 at position 1"),
        ([1.0, 2.0], TypeError, "sequence 1 has dtype float64"),
        ([True, False], TypeError, "sequence 1 has dtype bool"),
        ([[1, 2]], ValueError, r"sequence 1 has shape \(1, 2\)"),
        (np.array([2**63], dtype=np.uint64), ValueError, "does not fit int64"),
    ],
)
def test_bad_sequences_are_refused_by_index(bad, error, text):
    with pytest.raises(error, match=text):
        build_prefix_tree([[1, 2], bad])


def test_rows_of_a_sequence_that_does_not_exist_are_refused():
    with pytest.raises(IndexError, match="sequence 2 does not exist"):
        sequence_rows(build_prefix_tree([[1], [2]]), 2)
