"""What the interpreter cannot show: the same comparisons on a real device."""

import numpy as np
import pytest
import torch

from deltamesh.ops.causal_conv1d import ConvLayout
from deltamesh.ops.causal_conv1d.fla import ConvSegments, causal_conv1d_fla
from deltamesh.ops.causal_conv1d.naive import causal_conv1d_by_path
from tests.kernels.cases import (
    FOREST,
    RETAINING,
    assert_close,
    kernel_results,
    make_case,
    naive_results,
    relative_error,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
    pytest.mark.timeout(600),  # the library's kernels are tuned at their first call
]


@pytest.mark.parametrize("split", ["tree", "chains"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 8e-3)])
def test_forest_matches_token_by_token_rule(
    dtype: torch.dtype, tolerance: float, dim: int, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    case = make_case(FOREST, K=dim, V=dim, H=4, dtype=dtype, finals=(1, 5))
    assert_close(kernel_results(case, split=split, device="cuda"), naive_results(case), tolerance)


def test_retaining_forest_gives_the_same_bits_twice() -> None:
    case = make_case(FOREST, K=128, V=128, dtype=torch.bfloat16, regime=RETAINING)
    first, again = (kernel_results(case, device="cuda") for _ in range(2))
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.exports, again.exports)
    assert all(torch.equal(a, b) for a, b in zip(first.grads, again.grads, strict=True))


def test_convolution_matches_walk_along_paths() -> None:
    before = [-1, *range(199), 3, 3, 199, -1]
    layout = ConvLayout.from_predecessors(
        np.array(before), num_rows=len(before), num_received=0, width=4, device="cuda"
    )
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(len(before), 256, generator=random), torch.randn(256, 4, generator=random)
    leaves = [t.cuda().requires_grad_() for t in (x, weight)]
    y = causal_conv1d_fla(leaves[0], leaves[0][:0], leaves[1], ConvSegments.from_layout(layout))
    wanted_leaves = [t.double().requires_grad_() for t in (x, weight)]
    wanted = causal_conv1d_by_path(wanted_leaves[0], wanted_leaves[0][:0], wanted_leaves[1], before)
    assert relative_error(y, wanted) < 1e-6
    dy = torch.randn(y.shape, generator=random)
    found = torch.autograd.grad(y, leaves, dy.cuda())
    for a, b in zip(found, torch.autograd.grad(wanted, wanted_leaves, dy.double()), strict=True):
        assert relative_error(a, b) < 1e-6
