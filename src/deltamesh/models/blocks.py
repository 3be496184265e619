"""The blocks of a layer on this tp rank's heads and columns: token mixers and MLP, without norms and residual.

Legend: T rows of this cp rank's slice, D model width, H value (or query) heads, Hk key heads, J KV heads, K key dim,
V value dim; heads are those of this tp rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3_5TextConfig

from deltamesh.models.layers import (
    ConvWeight,
    GatedRMSNorm,
    KeepsFp32,
    Linear,
    ParamFactory,
    RMSNorm,
    project,
    rotate,
    wide_dtype,
)
from deltamesh.models.pointwise import sigmoid_gate, swiglu
from deltamesh.models.projection import Derived
from deltamesh.ops.causal_conv1d import causal_conv1d
from deltamesh.ops.context import SliceContext
from deltamesh.ops.gated_delta_rule import gated_delta_rule
from deltamesh.ops.tree_attention import tree_attention

Backend = Literal["torch", "naive", "fla"]
Tables = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A module that runs inner functions through `run`: plainly, or with recomputation in the backward."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute

    def run(self, fn: Callable[..., Tensor], *args: Any) -> Tensor:
        if not self.recompute:
            return fn(*args)
        # no early stop: ranks with other row counts may save other numbers of tensors, and would then stop before
        # different collectives
        out: Tensor = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        return out


@dataclass(frozen=True, kw_only=True)
class OpBackends:
    """Which version of each op a model runs."""

    delta_rule: str
    convolution: str
    attention: str

    @staticmethod
    def named(backend: Backend) -> "OpBackends":
        """The versions that go under one name: "torch" (any device), "naive" (references), "fla" (CUDA kernels).

        Raises:
            ValueError: another name.
        """
        match backend:
            case "torch" | "naive":
                return OpBackends(delta_rule=backend, convolution=backend, attention=backend)
            case "fla":
                return OpBackends(delta_rule="fla", convolution="fla", attention="flex")
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(get_args(Backend))}")


class GatedDeltaNet(Block, KeepsFp32):
    """Gated DeltaNet token mixer; `A_log` and `dt_bias` stay in fp32."""

    fp32_names = ("A_log", "dt_bias")

    def __init__(
        self, config: Qwen3_5TextConfig, prefix: str, make: ParamFactory, *, backends: OpBackends, recompute: bool
    ) -> None:
        super().__init__(recompute=recompute)
        self.dt_bias = make(f"{prefix}.dt_bias")
        self.A_log = make(f"{prefix}.A_log")
        self.conv1d = ConvWeight(make(f"{prefix}.conv1d.weight"))
        self.norm = GatedRMSNorm(make(f"{prefix}.norm.weight"), config.rms_norm_eps)
        self.in_proj_qkv = Linear(make(f"{prefix}.in_proj_qkv.weight"))
        self.in_proj_z = Linear(make(f"{prefix}.in_proj_z.weight"))
        self.in_proj_b = Linear(make(f"{prefix}.in_proj_b.weight"))
        self.in_proj_a = Linear(make(f"{prefix}.in_proj_a.weight"))
        self.out_proj = Linear(make(f"{prefix}.out_proj.weight"))
        self.K, self.V = config.linear_key_head_dim, config.linear_value_head_dim
        self.H = self.A_log.shape[0]
        self.Hk = self.H * config.linear_num_key_heads // config.linear_num_value_heads
        self.backends = backends

    def forward(self, x_TD: Derived, context: SliceContext) -> Tensor:
        """[T, D] -> this rank's part of [T, D]."""
        qkv, z, b, a = project(x_TD, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        o_THV = self.run(self.core, qkv, b, a, context)
        normed: Derived = self.norm(o_THV, z.view(o_THV.shape))
        return project(replace(normed, rows=normed.rows.flatten(1)), self.out_proj)[0]

    def core(self, qkv: Tensor, b: Tensor, a: Tensor, context: SliceContext) -> Tensor:
        """From the projections to the rule's outputs: qkv [T, 2 Hk K + H V], b and a [T, H] -> [T, H, V]."""
        T, key = qkv.shape[0], self.Hk * self.K
        qkv = causal_conv1d(
            qkv,
            self.conv1d.weight.squeeze(1),
            context=context.conv,
            activation="silu",
            backend=self.backends.convolution,
        )
        q, k, v = qkv.split([key, key, self.H * self.V], dim=-1)
        wide = wide_dtype(a.dtype)
        g_TH = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        o, _ = gated_delta_rule(
            q.view(1, T, self.Hk, self.K),
            k.view(1, T, self.Hk, self.K),
            v.view(1, T, self.H, self.V),
            g_TH[None],
            b.sigmoid()[None],
            use_qk_l2norm=True,
            context=context.scan,
            backend=self.backends.delta_rule,
        )
        return o[0]


class GatedAttention(Block):
    """Softmax attention whose output is gated per head by the second half of that head's rows of `q_proj`."""

    def __init__(
        self, config: Qwen3_5TextConfig, prefix: str, make: ParamFactory, *, backends: OpBackends, recompute: bool
    ) -> None:
        super().__init__(recompute=recompute)
        self.q_proj = Linear(make(f"{prefix}.q_proj.weight"))
        self.k_proj = Linear(make(f"{prefix}.k_proj.weight"))
        self.v_proj = Linear(make(f"{prefix}.v_proj.weight"))
        self.o_proj = Linear(make(f"{prefix}.o_proj.weight"))
        self.q_norm = RMSNorm(make(f"{prefix}.q_norm.weight"), config.rms_norm_eps)
        self.k_norm = RMSNorm(make(f"{prefix}.k_norm.weight"), config.rms_norm_eps)
        self.K = config.head_dim
        self.H = self.o_proj.weight.shape[1] // self.K
        self.J = self.k_proj.weight.shape[0] // self.K
        self.backends = backends

    def forward(self, x_TD: Derived, tables: Tables, context: SliceContext) -> Tensor:
        """[T, D] -> this rank's part of [T, D]."""
        q, k, v = project(x_TD, self.q_proj, self.k_proj, self.v_proj)
        q_THK, gate_THK = q.view(-1, self.H, 2 * self.K).chunk(2, dim=-1)
        gated = sigmoid_gate(self.run(self.core, q_THK, k, v, tables, context), gate_THK)
        return project(replace(gated, rows=gated.rows.flatten(1)), self.o_proj)[0]

    def core(self, q_THK: Tensor, k: Tensor, v: Tensor, tables: Tables, context: SliceContext) -> Tensor:
        """From the projections to the attended values: q [T, H, K], k and v [T, J K] -> [T, H, K]."""
        T = q_THK.shape[0]
        q_THK = rotate(self.q_norm(q_THK), tables)
        k_TJK = rotate(self.k_norm(k.view(T, self.J, self.K)), tables)
        v_TJK = v.view(T, self.J, self.K)
        return tree_attention(
            q_THK,
            k_TJK,
            v_TJK,
            scale=self.K**-0.5,
            context=context.attention,
            backend=self.backends.attention,
        )


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, prefix: str, make: ParamFactory) -> None:
        super().__init__()
        self.gate_proj = Linear(make(f"{prefix}.gate_proj.weight"))
        self.up_proj = Linear(make(f"{prefix}.up_proj.weight"))
        self.down_proj = Linear(make(f"{prefix}.down_proj.weight"))

    def forward(self, x_TD: Derived) -> Tensor:
        """[T, D] -> this rank's part of [T, D]."""
        return project(swiglu(*project(x_TD, self.gate_proj, self.up_proj)), self.down_proj)[0]
