"""Linear layers of rows that are derived from others: their backward makes the rows again instead of keeping them.

The gradient of a LoRA's A (or of a trained W) needs the layer's input. Where that is a norm or a gate of rows that are
kept anyway, it is the largest thing a layer would keep, and the cheapest to compute. Autograd offers saved-tensor hooks
for that, but hooks of a layer take the place of activation checkpointing's and hold what that drops; what a function
saves passes through them.

Large results come from the scan's cache of blocks. Taken from torch's own allocator they leave holes that the next rows
of the same size do not fill (glibc asks for more before it aligns): a quarter of the resident size of a training step.

Letters: n rows of any shape, I input and O output features, R LoRA rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from deltamesh.ops.memory import fresh


@dataclass(frozen=True, kw_only=True, eq=False)
class Derived:
    """Rows, and how to compute them again.

    Attributes:
        rows: part of the graph; gradients flow through them alone.
        make: (*sources) -> the same bits, in a shape with as many elements. Talks to no other rank.
        sources: what is kept in place of the rows; not part of the graph.
    """

    rows: Tensor
    make: Callable[..., Tensor]
    sources: tuple[Tensor, ...]

    @staticmethod
    def kept(rows: Tensor) -> "Derived":
        """Rows that are kept themselves."""
        return Derived(rows=rows, make=_itself, sources=(rows.detach(),))


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """Weight [O, I] of a linear layer, and the factors [R, I] and [O, R] of its LoRA, or None twice."""

    weight: Tensor
    a: Tensor | None
    b: Tensor | None
    scaling: float


def project(x: Derived, layers: Sequence[Factors]) -> tuple[Tensor, ...]:
    """y = x W^T + scaling (x A^T) B^T for each layer, all of the same rows [..., I] -> [..., O].

    In the dtype of W; LoRA terms are added in the dtype of the factors. The rows are made again once for all layers.

    Example:
        >>> ones = Factors(weight=torch.ones(1, 2), a=torch.ones(1, 2), b=torch.ones(1, 1), scaling=0.5)
        >>> project(Derived.kept(torch.tensor([[1.0, 3.0]])), [ones])[0].tolist()
        [[6.0]]
    """
    flat = [f for layer in layers for f in (layer.weight, layer.a, layer.b)]
    scalings = tuple(layer.scaling for layer in layers)
    outs = _Project.apply(x.rows[None].flatten(0, -2), x.make, x.sources, scalings, *flat)
    return tuple(y.view(*x.rows.shape[:-1], y.shape[-1]) for y in outs)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_nI: Tensor,
        make: Callable[..., Tensor],
        sources: tuple[Tensor, ...],
        scalings: tuple[float, ...],
        *factors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        outs, inners = [], []
        for (weight, a, b), scaling in zip(_threes(factors), scalings, strict=True):
            y, inner = _product(x_nI, weight.T), None
            if a is not None and b is not None:
                inner = F.linear(x_nI.to(a.dtype), a) * scaling  # scaled where it is R wide, not O wide
                y = y.addmm_(inner, b.T) if y.dtype == b.dtype else (y + F.linear(inner, b)).to(y.dtype)
            outs.append(y)
            inners.append(inner)
        wanted = ctx.needs_input_grad[4:]
        ctx.makes_rows = any(weight or a for weight, a, _ in _threes(wanted))
        ctx.make, ctx.scalings, ctx.shape = make, scalings, x_nI.shape
        ctx.save_for_backward(*factors, *inners, *(sources if ctx.makes_rows else ()))
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        count, saved = len(dys), ctx.saved_tensors
        factors, inners, sources = _threes(saved[: 3 * count]), saved[3 * count : 4 * count], saved[4 * count :]
        wanted = _threes(ctx.needs_input_grad[4:])
        x_nI: Any = ctx.make(*sources).reshape(ctx.shape) if ctx.makes_rows else None
        grads: list[Tensor | None] = []
        d_inners: list[Any] = []
        for (_, a, b), (wants_weight, wants_a, wants_b), dy, inner, scaling in zip(
            factors, wanted, dys, inners, ctx.scalings, strict=True
        ):
            d_inner: Any = None if inner is None else (dy.to(b.dtype) @ b) * scaling
            grads += [
                dy.T @ x_nI if wants_weight else None,
                d_inner.T @ x_nI.to(a.dtype) if wants_a else None,
                dy.to(b.dtype).T @ inner if wants_b else None,
            ]
            d_inners.append(d_inner)
        del x_nI  # its memory is the next product's

        dx_nI: Tensor | None = None
        # the last layer first, its LoRA before its weight: the order in which autograd would add the gradients up
        for (weight, a, _), dy, d_inner in zip(reversed(factors), reversed(dys), reversed(d_inners), strict=True):
            if not ctx.needs_input_grad[0]:
                break
            lora = [] if d_inner is None else [(d_inner, a)]
            for left, right in [*lora, (dy, weight)]:
                part = _product(left, right).to(dy.dtype)
                dx_nI = part if dx_nI is None else dx_nI.add_(part)
                del part
        return dx_nI, None, None, None, *grads


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in memory that the next layer and the next step use again."""
    return torch.mm(left, right, out=fresh((left.shape[0], right.shape[1]), left.dtype, left.device))


def _itself(x: Tensor) -> Tensor:
    return x


def _threes(flat: Sequence[Any]) -> list[Any]:
    return [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
