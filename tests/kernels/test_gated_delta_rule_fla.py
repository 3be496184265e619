"""The CUDA path of the gated delta rule against the token-by-token rule, under Triton's interpreter.

fp32: 2e-5 relative, the project's bound. bf16: the reference starts from the same rounded inputs, so what is left is
what the library's kernels round inside: A, w, u, h, v_new and their gradients, each once, to 8 bits (2^-9 relative).
At most a handful of such roundings enter each result independently; 4 x 2^-9 = 8e-3 bounds their sum.
"""

import dataclasses

import pytest
import torch

from tests.kernels import cases
from tests.kernels.cases import FOREST, RETAINING, assert_close, kernel_results, make_case, make_pieces, naive_results
from tests.unit.gated_delta_rule_common import nan_in_fresh_memory

FP32 = 2e-5
BF16 = 8e-3

pytestmark = pytest.mark.usefixtures("interpreted", "nan_in_fresh_memory")
__all__ = ["nan_in_fresh_memory"]


@pytest.mark.parametrize(("dim", "split"), [(16, "tree"), (32, "chains"), (64, "tree"), (128, "chains")])
def test_forest_matches_token_by_token_rule_in_fp32(dim: int, split: str) -> None:
    case = make_case(FOREST, K=dim, V=dim, finals=(1, 5))
    assert_close(kernel_results(case, split=split), naive_results(case), FP32)


@pytest.mark.parametrize(("dim", "split"), [(64, "chains"), (128, "tree")])
def test_forest_matches_token_by_token_rule_in_bf16(dim: int, split: str) -> None:
    case = make_case(FOREST, K=dim, V=dim, dtype=torch.bfloat16, finals=(1, 5))
    assert_close(kernel_results(case, split=split), naive_results(case), BF16)


def test_unequal_dims_grouped_heads_and_given_states_match() -> None:
    pieces = make_pieces([(3, -1, 0), (2, -1, 1), (4, 1, -1), (1, 1, -1), (2, -1, 1)], exports=(2,))
    case = make_case(pieces, K=24, V=40, Hk=2, H=6, finals=(0, 3, 3))
    assert_close(kernel_results(case, num_given=1), naive_results(case, num_given=1), FP32)


def test_normalised_rows_match() -> None:
    case = make_case(make_pieces([(5, -1, 0), (3, 0, -1)], exports=(1,)), K=16, V=16)
    q, k, *others = case.inputs
    case = dataclasses.replace(case, inputs=(3 * q, 2 * k, *others))
    assert_close(kernel_results(case, use_qk_l2norm=True), naive_results(case, use_qk_l2norm=True), FP32)


def test_retaining_transition_survives_three_chunks() -> None:
    """Weak decay, keys at mutual cosine 0.9: M is near the identity, and nothing but a right M gives the state."""
    case = make_case(make_pieces([(131, -1, 0)], exports=(0,)), K=32, V=32, regime=RETAINING, H=1)
    assert_close(kernel_results(case), naive_results(case), FP32)


def test_many_one_token_children_of_a_slot_match() -> None:
    nodes = [(1, -1, 0) for _ in range(5)] + [(2, 1, -1), (1, 4, -1), (1, 4, -1)]
    case = make_case(make_pieces(nodes, exports=(0, 5)), K=16, V=16)
    assert_close(kernel_results(case, split="tree"), naive_results(case), FP32)


def test_children_without_exports_reach_an_exported_parent_in_both_passes() -> None:
    """Before the exchange in registers, after it from memory: they are not run twice."""
    case = make_case(make_pieces([(3, -1, 0), (5, 0, -1), (1, 0, -1)], exports=(0,)), K=16, V=16)
    assert_close(kernel_results(case, split="tree"), naive_results(case), FP32)


def test_a_block_of_heads_given_as_a_view_matches() -> None:
    case = make_case(make_pieces([(4, -1, -1), (3, 0, -1)]), K=16, V=16, Hk=2, H=4)
    q, k, v, g, beta = case.inputs
    block = dataclasses.replace(
        case,
        inputs=(q[:, 1:], k[:, 1:], v[:, 2:], g[:, 2:], beta[:, 2:]),
        incoming=case.incoming[:, 2:],
        d_out=case.d_out[:, 2:],
        d_finals=case.d_finals[:, 2:],
        d_exports=case.d_exports[:, 2:],
    )
    found, whole = kernel_results(block), kernel_results(case)
    torch.testing.assert_close(found.out, whole.out[:, 2:], rtol=0, atol=0)
    assert_close(found, naive_results(block), FP32)


def test_an_empty_slice_has_empty_results() -> None:
    template = make_case(make_pieces([(1, -1, -1)]), K=16, V=16)
    none = dataclasses.replace(
        make_pieces([(1, -1, -1)]),
        **{name: torch.zeros(0, dtype=torch.int64).numpy() for name in ("start", "length", "parent", "slot")},
    )
    case = dataclasses.replace(
        template, pieces=none, inputs=tuple(x[:0] for x in template.inputs), d_out=template.d_out[:0]
    )
    found = kernel_results(case)
    assert [x.shape for x in found.grads] == [x.shape for x in case.inputs]
    assert found.out.shape == case.d_out.shape


def test_gradients_do_not_cross_roots() -> None:
    case = make_case(make_pieces([(3, -1, -1), (2, 0, -1), (4, -1, -1)]), K=16, V=16)
    d_out = case.d_out.clone()
    d_out[5:] = 0
    found = kernel_results(dataclasses.replace(case, d_out=d_out), split="tree")
    for name, gradient in zip(cases.NAMES, found.grads, strict=True):
        assert (gradient[5:] == 0).all(), name
        assert gradient[:5].abs().sum() > 0, name


def test_same_inputs_give_the_same_bits_and_so_do_both_ways_to_make_jobs() -> None:
    case = make_case(make_pieces([(2, -1, 0), (1, 0, -1), (3, 0, -1), (1, 0, -1)], exports=(1,)), K=16, V=16)
    first, again, chains = (kernel_results(case, split=split) for split in ("tree", "tree", "chains"))
    for other in (again, chains):
        assert torch.equal(first.out, other.out)
        assert torch.equal(first.exports, other.exports)
        assert all(torch.equal(a, b) for a, b in zip(first.grads, other.grads, strict=True))


def test_fp64_rows_are_refused() -> None:
    case = make_case(make_pieces([(1, -1, -1)]), K=16, V=16, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64 rows.*use backend 'torch'"):
        kernel_results(case)
