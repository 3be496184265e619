"""Row-wise functions with analytic backwards, which keep only what their layer holds anyway.

Autograd of the plain formulas keeps every intermediate: a third of a layer's activations, read and written from main
memory. The forwards are those formulas to the bit. Each gives its rows as `Derived`: a layer that needs them in its
backward computes them again, from what is kept here.

Letters: n rows of any shape, D width, r = 1 / rms(x), u = r x.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltamesh.models.projection import Derived
from deltamesh.ops.memory import fresh


def swiglu(gate: Tensor, up: Tensor) -> Derived:
    """silu(gate) * up.

    Example:
        >>> swiglu(torch.zeros(2), torch.ones(2)).rows.tolist()
        [0.0, 0.0]
    """
    return Derived(rows=_SwiGLU.apply(gate, up), make=_swiglu, sources=(gate.detach(), up.detach()))


def sigmoid_gate(x: Tensor, gate: Tensor) -> Derived:
    """x * sigmoid(gate).

    Example:
        >>> sigmoid_gate(torch.ones(2), torch.zeros(2)).rows.tolist()
        [0.5, 0.5]
    """
    return Derived(rows=_SigmoidGate.apply(x, gate), make=_sigmoid_gate, sources=(x.detach(), gate.detach()))


def rms_norm(x_nD: Tensor, weight_D: Tensor, eps: float, wide: torch.dtype) -> Derived:
    """x / rms(x) * (1 + weight) over the last dimension, computed in `wide`; in the dtype of `x`.

    Example:
        >>> rms_norm(torch.full((1, 4), 3.0), torch.zeros(4), 0.0, torch.float32).rows.tolist()
        [[1.0, 1.0, 1.0, 1.0]]
    """
    rows, r_n1 = _RMSNorm.apply(x_nD, weight_D, eps, wide)
    return Derived(rows=rows, make=_normed, sources=(x_nD.detach(), weight_D.detach(), r_n1))


def gated_rms_norm(x_nD: Tensor, gate_nD: Tensor, weight_D: Tensor, eps: float, wide: torch.dtype) -> Derived:
    """weight * x / rms(x) * silu(gate) over the last dimension; both in `wide`; in the dtype of `x`.

    The normed rows are rounded to the dtype of `x` before the weight, as in the published models.

    Example:
        >>> gated_rms_norm(torch.ones(1, 4), torch.zeros(1, 4), torch.ones(4), 0.0, torch.float32).rows.tolist()
        [[0.0, 0.0, 0.0, 0.0]]
    """
    rows, r_n1 = _GatedRMSNorm.apply(x_nD, gate_nD, weight_D, eps, wide)
    sources = (x_nD.detach(), gate_nD.detach(), weight_D.detach(), r_n1)
    return Derived(rows=rows, make=_gated_normed, sources=sources)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _silu_backward(_times(dy, up), gate), _silu(gate).mul_(dy)


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return _sigmoid_gate(x, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        share = gate.sigmoid()
        return _times(dy, share), torch.ops.aten.sigmoid_backward(_times(dy, x), share)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nD: Tensor, weight_D: Tensor, eps: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        r_n1 = _inverse_rms(x_nD.to(wide), eps)
        ctx.save_for_backward(x_nD, weight_D, r_n1)
        ctx.mark_non_differentiable(r_n1)
        return _normed(x_nD, weight_D, r_n1), r_n1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_nD: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_nD, weight_D, r_n1 = ctx.saved_tensors
        u_nD, dy_nD = _times(x_nD.to(r_n1.dtype), r_n1), dy_nD.to(r_n1.dtype)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        d_weight = _sum_rows(_times(dy_nD, u_nD)).to(weight_D.dtype) if wants_weight else None
        d_x = None
        if wants_x:
            d_x = _norm_backward(_times(dy_nD, 1.0 + weight_D.to(r_n1.dtype)), u_nD, r_n1).to(x_nD.dtype)
        return d_x, d_weight, None, None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_nD: Tensor, gate_nD: Tensor, weight_D: Tensor, eps: float, wide: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        r_n1 = _inverse_rms(x_nD.to(wide), eps)
        ctx.save_for_backward(x_nD, gate_nD, weight_D, r_n1)
        ctx.mark_non_differentiable(r_n1)
        return _gated_normed(x_nD, gate_nD, weight_D, r_n1), r_n1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_nD: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x_nD, gate_nD, weight_D, r_n1 = ctx.saved_tensors
        wide = r_n1.dtype
        u_nD, dy_nD, gate_wide = _times(x_nD.to(wide), r_n1), dy_nD.to(wide), gate_nD.to(wide)
        weight_wide = weight_D.to(wide)
        d_gate = _silu_backward(_times(u_nD, weight_wide).mul_(dy_nD), gate_wide).to(gate_nD.dtype)
        d_scaled_nD = _silu(gate_wide).mul_(dy_nD)
        d_weight = _sum_rows(_times(d_scaled_nD, u_nD)).to(weight_D.dtype) if ctx.needs_input_grad[2] else None
        d_x = _norm_backward(d_scaled_nD.mul_(weight_wide), u_nD, r_n1).to(x_nD.dtype)
        return d_x, d_gate, d_weight, None, None


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _silu(gate).mul_(up)


def _sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return _times(x, gate.sigmoid())


def _normed(x_nD: Tensor, weight_D: Tensor, r_n1: Tensor) -> Tensor:
    return _times(x_nD.to(r_n1.dtype), r_n1).mul_(1.0 + weight_D.to(r_n1.dtype)).to(x_nD.dtype)


def _gated_normed(x_nD: Tensor, gate_nD: Tensor, weight_D: Tensor, r_n1: Tensor) -> Tensor:
    u_nD = _times(x_nD.to(r_n1.dtype), r_n1).to(x_nD.dtype)
    return _silu(gate_nD.to(r_n1.dtype)).mul_(_times(weight_D, u_nD)).to(x_nD.dtype)


def _inverse_rms(x_nD: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(_times(x_nD, x_nD).mean(-1, keepdim=True) + eps)


def _norm_backward(du_nD: Tensor, u_nD: Tensor, r_n1: Tensor) -> Tensor:
    """r (du - u mean(u du)); overwrites `du_nD`."""
    mean_n1 = _times(du_nD, u_nD).mean(-1, keepdim=True)
    return du_nD.addcmul_(u_nD, mean_n1, value=-1.0).mul_(r_n1)


def _sum_rows(x_nD: Tensor) -> Tensor:
    return x_nD.flatten(0, -2).sum(0)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """x * y, in memory that the next layer and the next step use again."""
    out = fresh(torch.broadcast_shapes(x.shape, y.shape), torch.result_type(x, y), x.device)
    return torch.mul(x, y, out=out)


def _silu(x: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.silu.out(x, out=fresh(x.shape, x.dtype, x.device))
    return out


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Overwrites `dy`."""
    out: Tensor = torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=dy)
    return out
