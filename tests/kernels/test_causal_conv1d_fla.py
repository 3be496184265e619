"""The convolution by the library's kernels against a walk along each path, under Triton's interpreter."""

import numpy as np
import pytest
import torch

from deltamesh.ops.causal_conv1d import ConvLayout
from deltamesh.ops.causal_conv1d.fla import ConvSegments, causal_conv1d_fla
from deltamesh.ops.causal_conv1d.naive import causal_conv1d_by_path
from tests.kernels.cases import relative_error

pytestmark = pytest.mark.usefixtures("interpreted")

# 76 rows, 4 received: a run of 70, forks with one-row segments, halos that span two received rows and a parent
T, R, D, W = 76, 4, 24, 4
BEFORE = [-1, *range(69), 0, 69, 71, 69, T + 3, T + 1, -1, T, T + 1, -1]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_matches_walk_along_paths(dtype: torch.dtype, tolerance: float, activation: str | None) -> None:
    """bf16: the output is rounded once; gradients twice, as the library keeps the sum before SiLU in bf16."""
    random = torch.Generator().manual_seed(0)
    x, halo = (torch.randn(n, D, generator=random).to(dtype) for n in (T, R))
    weight, dy = torch.randn(D, W, generator=random), torch.randn(T, D, generator=random).to(dtype)
    layout = ConvLayout.from_predecessors(np.array(BEFORE), num_rows=T, num_received=R, width=W)
    leaves = [t.clone().requires_grad_() for t in (x, halo, weight)]
    wanted_leaves = [t.double().requires_grad_() for t in (x, halo, weight)]
    y = causal_conv1d_fla(*leaves, ConvSegments.from_layout(layout), activation)
    wanted = causal_conv1d_by_path(*wanted_leaves, BEFORE, activation)
    assert relative_error(y, wanted) < tolerance
    found_grads = torch.autograd.grad(y, leaves, dy)
    for found, want in zip(found_grads, torch.autograd.grad(wanted, wanted_leaves, dy.double()), strict=True):
        assert relative_error(found, want) < tolerance


@pytest.mark.parametrize("width", [1, 2])
def test_narrow_filters_and_empty_slices(width: int) -> None:
    x = torch.tensor([[1.0], [10.0], [100.0]])
    weight = torch.tensor([[2.0, 1.0]])[:, 2 - width :]
    layout = ConvLayout.from_predecessors(np.array([-1, 0, 0]), num_rows=3, num_received=0, width=width)
    y = causal_conv1d_fla(x, x[:0], weight, ConvSegments.from_layout(layout), None)
    assert y.flatten().tolist() == ([1.0, 10.0, 100.0] if width == 1 else [1.0, 12.0, 102.0])
    empty = ConvLayout.from_predecessors(np.zeros(0, dtype=np.int64), num_rows=0, num_received=0, width=width)
    assert causal_conv1d_fla(x[:0], x[:0], weight, ConvSegments.from_layout(empty), None).shape == (0, 1)
