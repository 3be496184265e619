"""The analytic backwards of row-wise functions against autograd of their plain formulas."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltamesh.models.layers import Linear
from deltamesh.models.pointwise import gated_rms_norm, rms_norm, swiglu


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def _plain_norm(x: Tensor, weight: Tensor, eps: float, wide: torch.dtype) -> Tensor:
    u = x.to(wide)
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)
    return (u * (1.0 + weight.to(wide))).to(x.dtype)


def _plain_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, wide: torch.dtype) -> Tensor:
    u = x.to(wide)
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * u.to(x.dtype) * F.silu(gate.to(wide))).to(x.dtype)


def _assert_same(ours: Tensor, plain: Tensor, leaves: list[Tensor], tolerance: float) -> None:
    assert torch.equal(ours, plain), "the forward is the plain formula, to the bit"
    dy = torch.randn_like(ours)
    for mine, other in zip(torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(plain, leaves, dy), strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert (mine - other).norm() <= tolerance * other.norm()


def test_swiglu_is_the_plain_product() -> None:
    leaves = _leaves((5, 7), (5, 7))
    gate, up = leaves
    _assert_same(swiglu(gate, up).rows, F.silu(gate) * up, leaves, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 8), (0, 8)])
def test_rms_norm_is_the_plain_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    leaves = _leaves(shape, (8,), dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    _assert_same(rms_norm(*leaves, 1e-6, wide).rows, _plain_norm(*leaves, 1e-6, wide), leaves, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 8), (0, 3, 8)])
def test_gated_rms_norm_is_the_plain_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    leaves = _leaves(shape, shape, (8,), dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    _assert_same(gated_rms_norm(*leaves, 1e-6, wide).rows, _plain_gated(*leaves, 1e-6, wide), leaves, tolerance)


def test_gradients_that_nobody_wants_are_not_made() -> None:
    x, gate, weight = _leaves((5, 8), (5, 8), (8,))
    frozen = weight.detach()
    total = rms_norm(x, frozen, 1e-6, torch.float64).rows + gated_rms_norm(x, gate, frozen, 1e-6, torch.float64).rows
    total.sum().backward()
    assert frozen.grad is None and x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_linear_adds_its_scaled_lora(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    weight, x = (torch.randn(shape).to(dtype) for shape in ((6, 4), (2, 3, 4)))
    a, b = torch.randn(2, 4, dtype=wide), torch.randn(6, 2, dtype=wide)
    layer = Linear(torch.nn.Parameter(weight))
    layer.add_lora(torch.nn.Parameter(a), torch.nn.Parameter(b), 0.3)
    expected = F.linear(x.double(), weight.double()) + 0.3 * x.double() @ a.double().T @ b.double().T
    y = layer(x)
    assert y.dtype == dtype and y.shape == (2, 3, 6)
    assert (y - expected).norm() <= (1e-14 if dtype == torch.float64 else 1e-2) * expected.norm()
