"""Row-wise functions with analytic backwards, which keep only what their layer holds anyway.

Autograd of the plain formulas keeps every intermediate: a third of a layer's activations, read and written from main
memory. The forwards are those formulas to the bit.

Letters: n rows of any shape, D width, r = 1 / rms(x), u = r x.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up.

    Example:
        >>> swiglu(torch.zeros(2), torch.ones(2)).tolist()
        [0.0, 0.0]
    """
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


def rms_norm(x_nD: Tensor, weight_D: Tensor, eps: float, wide: torch.dtype) -> Tensor:
    """x / rms(x) * (1 + weight) over the last dimension, computed in `wide`; in the dtype of `x`.

    Example:
        >>> rms_norm(torch.full((1, 4), 3.0), torch.zeros(4), 0.0, torch.float32).tolist()
        [[1.0, 1.0, 1.0, 1.0]]
    """
    out: Tensor = _RMSNorm.apply(x_nD, weight_D, eps, wide)
    return out


def gated_rms_norm(x_nD: Tensor, gate_nD: Tensor, weight_D: Tensor, eps: float, wide: torch.dtype) -> Tensor:
    """weight * x / rms(x) * silu(gate) over the last dimension; both in `wide`; in the dtype of `x`.

    The normed rows are rounded to the dtype of `x` before the weight, as in the published models.

    Example:
        >>> gated_rms_norm(torch.ones(1, 4), torch.zeros(1, 4), torch.ones(4), 0.0, torch.float32).tolist()
        [[0.0, 0.0, 0.0, 0.0]]
    """
    out: Tensor = _GatedRMSNorm.apply(x_nD, gate_nD, weight_D, eps, wide)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nD: Tensor, weight_D: Tensor, eps: float, wide: torch.dtype) -> Tensor:
        x_wide = x_nD.to(wide)
        r_n1 = _inverse_rms(x_wide, eps)
        ctx.save_for_backward(x_nD, weight_D, r_n1)
        return (x_wide * r_n1).mul_(1.0 + weight_D.to(wide)).to(x_nD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_nD: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_nD, weight_D, r_n1 = ctx.saved_tensors
        u_nD, dy_nD = x_nD.to(r_n1.dtype) * r_n1, dy_nD.to(r_n1.dtype)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        d_weight = _sum_rows(dy_nD * u_nD).to(weight_D.dtype) if wants_weight else None
        d_x = _norm_backward(dy_nD * (1.0 + weight_D.to(r_n1.dtype)), u_nD, r_n1).to(x_nD.dtype) if wants_x else None
        return d_x, d_weight, None, None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nD: Tensor, gate_nD: Tensor, weight_D: Tensor, eps: float, wide: torch.dtype) -> Tensor:
        x_wide = x_nD.to(wide)
        r_n1 = _inverse_rms(x_wide, eps)
        ctx.save_for_backward(x_nD, gate_nD, weight_D, r_n1)
        return (weight_D * (x_wide * r_n1).to(x_nD.dtype) * F.silu(gate_nD.to(wide))).to(x_nD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_nD: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x_nD, gate_nD, weight_D, r_n1 = ctx.saved_tensors
        wide = r_n1.dtype
        u_nD, dy_nD, gate_wide = x_nD.to(wide) * r_n1, dy_nD.to(wide), gate_nD.to(wide)
        weight_wide = weight_D.to(wide)
        d_gate = torch.ops.aten.silu_backward((u_nD * weight_wide).mul_(dy_nD), gate_wide).to(gate_nD.dtype)
        d_scaled_nD = F.silu(gate_wide).mul_(dy_nD)
        d_weight = _sum_rows(d_scaled_nD * u_nD).to(weight_D.dtype) if ctx.needs_input_grad[2] else None
        d_x = _norm_backward(d_scaled_nD.mul_(weight_wide), u_nD, r_n1).to(x_nD.dtype)
        return d_x, d_gate, d_weight, None, None


def _inverse_rms(x_nD: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x_nD.pow(2).mean(-1, keepdim=True) + eps)


def _norm_backward(du_nD: Tensor, u_nD: Tensor, r_n1: Tensor) -> Tensor:
    """r (du - u mean(u du)); overwrites `du_nD`."""
    mean_n1 = (du_nD * u_nD).mean(-1, keepdim=True)
    return du_nD.addcmul_(u_nD, mean_n1, value=-1.0).mul_(r_n1)


def _sum_rows(x_nD: Tensor) -> Tensor:
    return x_nD.flatten(0, -2).sum(0)
