"""Edges: unique (row, target) pairs, and sums over the sequences that hold them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltamesh.tree import build_edges, build_prefix_tree, sequence_rows

token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=6)
cases = st.lists(
    token_lists.flatmap(
        lambda tokens: st.tuples(
            st.just(tokens),
            st.none() | st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=len(tokens), max_size=len(tokens)),
        )
    ),
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(cases)
def test_edges_are_the_sorted_set_of_wanted_pairs(case):
    tree = build_prefix_tree([tokens for tokens, _ in case])
    edges = build_edges(tree, [targets for _, targets in case])
    pairs = list(zip(edges.row_E.tolist(), edges.target_E.tolist(), strict=True))
    wanted = set()
    for s, (tokens, targets) in enumerate(case):
        rows = sequence_rows(tree, s).tolist()
        for row, target, edge in zip(rows, targets or [-100] * len(tokens), edges.of(s).tolist(), strict=True):
            if target == -100:
                assert edge == -1
            else:
                wanted.add((row, target))
                assert pairs[edge] == (row, target)
    assert pairs == sorted(wanted)


@settings(max_examples=100, deadline=None)
@given(cases, st.integers(0, 2**32 - 1))
def test_edge_weights_times_edge_values_equal_the_sum_over_sequences(case, seed):
    rng = np.random.default_rng(seed)
    edges = build_edges(build_prefix_tree([t for t, _ in case]), [t for _, t in case])
    weights = [rng.normal(size=len(tokens)) for tokens, _ in case]
    value_E = rng.normal(size=edges.num_edges)
    expected = sum(
        float((weight[edges.of(s) >= 0] * value_E[edges.of(s)[edges.of(s) >= 0]]).sum())
        for s, weight in enumerate(weights)
    )
    np.testing.assert_allclose(edges.sum_to_edges(weights) @ value_E, expected, rtol=1e-12, atol=1e-12)


def test_the_last_row_of_a_shared_prefix_has_one_edge_per_child():
    sequences = [[5, 6, 1], [5, 6, 2], [5, 6, 3], [5, 6, 2]]
    targets = [[*s[1:], -100] for s in sequences]
    edges = build_edges(build_prefix_tree(sequences), targets)
    assert edges.row_E.tolist() == [0, 1, 1, 1]
    assert edges.target_E.tolist() == [6, 1, 2, 3]
    assert edges.sum_to_edges([np.ones(3)] * 4).tolist() == [4.0, 1.0, 2.0, 1.0]


def test_no_targets_anywhere_is_no_edges():
    edges = build_edges(build_prefix_tree([[1, 2], [3]]), [None, [-100]])
    assert edges.num_edges == 0
    assert edges.edge_of.tolist() == [-1, -1, -1]
    assert build_edges(build_prefix_tree([]), []).num_edges == 0


def test_another_ignore_index_can_be_chosen():
    edges = build_edges(build_prefix_tree([[1, 2]]), [[0, 2]], ignore_index=0)
    assert edges.edge_of.tolist() == [-1, 0]
    assert edges.target_E.tolist() == [2]


def test_huge_target_ids_do_not_overflow_the_sort():
    big = np.iinfo(np.int64).max
    edges = build_edges(build_prefix_tree([[1, 2], [1, 2]]), [[big, 0], [big - 1, 0]])
    assert edges.row_E.tolist() == [0, 0, 1]
    assert edges.target_E.tolist() == [big - 1, big, 0]


@pytest.mark.parametrize(
    ("targets", "error", "text"),
    [
        ([[2, -100], [3]], ValueError, "targets of sequence 1 have length 1, its tokens have length 2"),
        ([[2, -100]], ValueError, "1 target arrays were given for 2 sequences"),
        ([[2, -7], None], ValueError, "targets of sequence 0 hold -7 at position 1"),
        ([[2.0, 1.0], None], TypeError, "targets of sequence 0 has dtype float64"),
    ],
)
def test_bad_targets_are_refused_by_sequence(targets, error, text):
    with pytest.raises(error, match=text):
        build_edges(build_prefix_tree([[1, 2], [1, 3]]), targets)


def test_values_of_a_wrong_length_are_refused_by_sequence():
    edges = build_edges(build_prefix_tree([[1, 2], [1, 3]]), [None, None])
    with pytest.raises(ValueError, match=r"values of sequence 1 have shape \(1,\); its length is 2"):
        edges.sum_to_edges([np.ones(2), np.ones(1)])
    with pytest.raises(ValueError, match="1 value arrays were given for 2 sequences"):
        edges.sum_to_edges([np.ones(2)])
