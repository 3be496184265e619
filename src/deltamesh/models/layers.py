"""Layers that hold one tp rank's part of their weights, under Hugging Face's parameter names.

Legend: T rows of this cp rank's slice, S rows of the residual stream here (T, or a tp shard of T), D model width,
I input and O output features of this rank's part, R LoRA rank, V this rank's vocabulary rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltamesh.distributed.collectives import copy_to_group, gather_rows, reduce_from_group, scatter_rows
from deltamesh.models import projection
from deltamesh.models.pointwise import gated_rms_norm, rms_norm
from deltamesh.models.projection import Derived, Factors
from deltamesh.models.sharding import ParamSpec
from deltamesh.ops.context import SliceContext


def enter_tp(x_SD: Tensor, context: SliceContext) -> Tensor:
    """Rows of the residual stream [S, D] -> all rows [T, D] of the slice, for layers that each hold some heads.

    With sequence parallelism this rank's padded row shard is gathered; without, the rows are there already and only
    their gradient is summed over tp.
    """
    if context.sp:
        return gather_rows(x_SD, context.num_rows, context.tp)
    return copy_to_group(x_SD, context.tp)


def enter_tp_derived(h_SD: Derived, context: SliceContext) -> Derived:
    """`enter_tp` of derived rows; gathered rows are kept, since to make them again would take a message."""
    rows_TD = enter_tp(h_SD.rows, context)
    return Derived.kept(rows_TD) if context.sp else replace(h_SD, rows=rows_TD)


def leave_tp(y_TD: Tensor, context: SliceContext) -> Tensor:
    """Every tp rank's part [T, D] of a row-parallel output -> their sum, as residual-stream rows [S, D]."""
    if context.sp:
        return scatter_rows(y_TD, context.tp)
    return reduce_from_group(y_TD, context.tp)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, gates and LoRA factors in a model of `dtype`: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class ParamFactory:
    """Makes this rank's part of named parameters, filled with NaN so that a weight nobody loaded cannot pass unseen."""

    specs: Mapping[str, ParamSpec]
    tp_rank: int
    tp_size: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self, name: str) -> nn.Parameter:
        """The parameter `name` (Hugging Face's), in this rank's shape."""
        return self.make(self.specs[name])

    def make(self, spec: ParamSpec) -> nn.Parameter:
        """A parameter for a spec that need not be among `specs`."""
        dtype = wide_dtype(self.dtype) if spec.keep_fp32 else self.dtype
        shape = spec.local_shape(self.tp_rank, self.tp_size)
        return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype, device=self.device))


class KeepsFp32(nn.Module):
    """A module whose parameters named in `fp32_names` are never cast below fp32 by `.to`, `.half` or `.bfloat16`.

    A decay rate rounded to bf16 is off by up to 0.4%, which a long sequence compounds; and a second cast up cannot
    bring the lost bits back.
    """

    fp32_names: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsFp32":
        def guarded(t: Tensor) -> Tensor:
            out = fn(t)
            if id(t) in guard and out.is_floating_point() and out.element_size() < 4:
                return t.to(out.device)
            return out

        guard = set()
        for name in self.fp32_names:
            parameter = cast(nn.Parameter, getattr(self, name))
            guard |= {id(parameter), id(parameter.grad)}
        for child in self.children():
            child._apply(fn)
        super()._apply(guarded, recurse=False)
        return self


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, computed in fp32 or better: the zero-centred norm."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in the dtype of `x`."""
        return self.derived(x).rows

    def derived(self, x: Tensor) -> Derived:
        """The same rows, for layers that had better not keep them."""
        return rms_norm(x, self.weight, self.eps, wide_dtype(x.dtype))


class GatedRMSNorm(nn.Module):
    """weight * x / rms(x) * silu(gate) over the last dimension: the norm comes before the gate."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Derived:
        """x, gate [..., V] -> [..., V] in the dtype of `x`."""
        return gated_rms_norm(x, gate, self.weight, self.eps, wide_dtype(x.dtype))


class LoraFactor(KeepsFp32):
    """One LoRA factor; a module of its own because PEFT names it `lora_A.weight` / `lora_B.weight`."""

    fp32_names = ("weight",)

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Linear(nn.Module):
    """This rank's part of a linear layer, with an optional LoRA: y = x W^T + scaling (x A^T) B^T.

    Whether W is split by rows or by columns is a matter of its `ParamSpec`: the sum over tp that a row-parallel layer
    needs is made once per block, by `leave_tp`. Both terms are then parts of the same sum.
    """

    lora_A: LoraFactor | None
    lora_B: LoraFactor | None

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.lora_A = None
        self.lora_B = None
        self.scaling = 0.0

    def add_lora(self, a_RI: nn.Parameter, b_OR: nn.Parameter, scaling: float) -> None:
        """Puts a LoRA of the given factors on the layer."""
        self.lora_A, self.lora_B, self.scaling = LoraFactor(a_RI), LoraFactor(b_OR), scaling

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O] in the dtype of the weight; LoRA terms are added in the dtype of the factors."""
        return project(Derived.kept(x), self)[0]

    @property
    def factors(self) -> Factors:
        """What `projection.project` needs."""
        if self.lora_A is None or self.lora_B is None:
            return Factors(weight=self.weight, a=None, b=None, scaling=0.0)
        return Factors(weight=self.weight, a=self.lora_A.weight, b=self.lora_B.weight, scaling=self.scaling)

    def effective_weight(self) -> Tensor:
        """[O, I]: W, or W + scaling B A where there is a LoRA (then materialised, and differentiable)."""
        if self.lora_A is None or self.lora_B is None:
            return self.weight
        return (self.weight + self.scaling * (self.lora_B.weight @ self.lora_A.weight)).to(self.weight.dtype)


def project(x: Derived, *layers: Linear) -> tuple[Tensor, ...]:
    """The outputs of layers that share one input, of which their backward keeps `x.sources` only."""
    return projection.project(x, [layer.factors for layer in layers])


class ConvWeight(nn.Module):
    """Holder of a depthwise convolution's weight [channels, 1, width], under the name `conv1d.weight`."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class VocabParallelEmbedding(nn.Module):
    """Embedding of which this rank holds the rows `vocab_start` and following.

    Args:
        padding_idx: token whose row gets no gradient (as in `torch.nn.Embedding`), or None.
    """

    def __init__(self, weight_VD: nn.Parameter, vocab_start: int, padding_idx: int | None) -> None:
        super().__init__()
        self.weight = weight_VD
        self.vocab_start = vocab_start
        local = -1 if padding_idx is None else padding_idx - vocab_start
        self.padding_idx = local if 0 <= local < weight_VD.shape[0] else None

    def forward(self, tokens_T: Tensor, context: SliceContext) -> Tensor:
        """int64 [T] -> residual-stream rows [S, D]; the rows that other ranks hold arrive with the sum over tp."""
        local_T = tokens_T - self.vocab_start
        elsewhere_T = (local_T < 0) | (local_T >= self.weight.shape[0])
        rows_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight, padding_idx=self.padding_idx)
        return leave_tp(rows_TD.masked_fill(elsewhere_T[:, None], 0.0), context)


class Rotary:
    """Rotary position embedding of the first `rotary_dim` of each head's dimensions; the rest pass unchanged.

    Text positions are equal on all axes of the multi-axis variant, so that variant is the plain one here.
    """

    def __init__(self, *, head_dim: int, rope_parameters: Mapping[str, Any]) -> None:
        self.rotary_dim = int(head_dim * rope_parameters.get("partial_rotary_factor", 1.0))
        self.theta = float(rope_parameters["rope_theta"])

    def tables(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rotary_dim] in `dtype`; the angles are computed in fp32 (fp64 for fp64)."""
        wide = wide_dtype(dtype)
        steps = torch.arange(0, self.rotary_dim, 2, dtype=wide, device=positions_T.device)
        angles = positions_T.to(wide)[:, None] * (1.0 / self.theta ** (steps / self.rotary_dim))
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_THK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (i, i + rotary_dim / 2) of every head by the angles of `Rotary.tables`."""
    cos, sin = tables
    turned, rest = x_THK.split([cos.shape[-1], x_THK.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)
