"""The hybrid Gated DeltaNet + attention language model, one tp rank's part of it, on the rows of one slice.

Legend: T rows of this cp rank's slice, S rows of the residual stream here (T, or a tp shard of T), D model width,
H value (or query) heads, Hk key heads, J KV heads, K key dim, V value dim; heads are those of this tp rank.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3_5TextConfig

from deltamesh.models.config import LINEAR_ATTENTION, validate_config
from deltamesh.models.layers import (
    ConvWeight,
    GatedRMSNorm,
    KeepsFp32,
    Linear,
    ParamFactory,
    RMSNorm,
    Rotary,
    VocabParallelEmbedding,
    enter_tp,
    leave_tp,
    rotate,
    wide_dtype,
)
from deltamesh.models.sharding import ParamSpec
from deltamesh.models.specs import check_tp, param_specs, vocab_section
from deltamesh.ops.causal_conv1d import causal_conv1d
from deltamesh.ops.context import SliceContext
from deltamesh.ops.gated_delta_rule import gated_delta_rule
from deltamesh.ops.tree_attention import tree_attention

Recompute = Literal["none", "selective", "full"]
Tables = tuple[Tensor, Tensor]


class _Block(nn.Module):
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


def _rows_backend(backend: str) -> str:
    """Backend of convolution and attention, which have a naive version and one other."""
    return "naive" if backend == "naive" else "torch"


class GatedDeltaNet(_Block, KeepsFp32):
    """Gated DeltaNet token mixer; `A_log` and `dt_bias` stay in fp32."""

    fp32_names = ("A_log", "dt_bias")

    def __init__(
        self, config: Qwen3_5TextConfig, prefix: str, make: ParamFactory, *, backend: str, recompute: bool
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
        self.backend = backend

    def forward(self, x_TD: Tensor, context: SliceContext) -> Tensor:
        """[T, D] -> this rank's part of [T, D]."""
        projected = (self.in_proj_qkv(x_TD), self.in_proj_z(x_TD), self.in_proj_b(x_TD), self.in_proj_a(x_TD))
        y_TD: Tensor = self.out_proj(self.run(self.core, *projected, context))
        return y_TD

    def core(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, context: SliceContext) -> Tensor:
        """Everything between the projections: qkv [T, 2 Hk K + H V], z [T, H V], b and a [T, H] -> [T, H V]."""
        T, key = qkv.shape[0], self.Hk * self.K
        qkv = causal_conv1d(
            qkv,
            self.conv1d.weight.squeeze(1),
            context=context.conv,
            activation="silu",
            backend=_rows_backend(self.backend),
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
            backend=self.backend,
        )
        normed: Tensor = self.norm(o[0], z.view(T, self.H, self.V))
        return normed.reshape(T, self.H * self.V)


class GatedAttention(_Block):
    """Softmax attention whose output is gated per head by the second half of that head's rows of `q_proj`."""

    def __init__(
        self, config: Qwen3_5TextConfig, prefix: str, make: ParamFactory, *, backend: str, recompute: bool
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
        self.backend = backend

    def forward(self, x_TD: Tensor, tables: Tables, context: SliceContext) -> Tensor:
        """[T, D] -> this rank's part of [T, D]."""
        projected = (self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD))
        y_TD: Tensor = self.o_proj(self.run(self.core, *projected, tables, context))
        return y_TD

    def core(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, context: SliceContext) -> Tensor:
        """Everything between the projections: q [T, H 2K] (query, gate per head), k and v [T, J K] -> [T, H K]."""
        T = q.shape[0]
        q_THK, gate_THK = q.view(T, self.H, 2 * self.K).chunk(2, dim=-1)
        q_THK = rotate(self.q_norm(q_THK), tables)
        k_TJK = rotate(self.k_norm(k.view(T, self.J, self.K)), tables)
        v_TJK = v.view(T, self.J, self.K)
        o_THK = tree_attention(
            q_THK,
            k_TJK,
            v_TJK,
            scale=self.K**-0.5,
            context=context.attention,
            backend=_rows_backend(self.backend),
        )
        gated: Tensor = o_THK * gate_THK.sigmoid()
        return gated.reshape(T, self.H * self.K)


class MLP(_Block):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, prefix: str, make: ParamFactory, *, recompute: bool) -> None:
        super().__init__(recompute=recompute)
        self.gate_proj = Linear(make(f"{prefix}.gate_proj.weight"))
        self.up_proj = Linear(make(f"{prefix}.up_proj.weight"))
        self.down_proj = Linear(make(f"{prefix}.down_proj.weight"))

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> this rank's part of [T, D]."""
        y_TD: Tensor = self.down_proj(self.run(self.core, self.gate_proj(x_TD), self.up_proj(x_TD)))
        return y_TD

    @staticmethod
    def core(gate: Tensor, up: Tensor) -> Tensor:
        """The activation product."""
        return F.silu(gate) * up


class DecoderLayer(nn.Module):
    """Token mixer and MLP, each between a norm and the residual; one gather and one scatter per block."""

    def __init__(self, config: Qwen3_5TextConfig, index: int, make: ParamFactory, *, backend: str, selective: bool):
        super().__init__()
        prefix = f"model.layers.{index}"
        self.is_linear = config.layer_types[index] == LINEAR_ATTENTION
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(
                config, f"{prefix}.linear_attn", make, backend=backend, recompute=selective
            )
        else:
            self.self_attn = GatedAttention(config, f"{prefix}.self_attn", make, backend=backend, recompute=selective)
        self.mlp = MLP(f"{prefix}.mlp", make, recompute=selective)
        self.input_layernorm = RMSNorm(make(f"{prefix}.input_layernorm.weight"), config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(make(f"{prefix}.post_attention_layernorm.weight"), config.rms_norm_eps)

    def forward(self, x_SD: Tensor, tables: Tables, context: SliceContext) -> Tensor:
        """[S, D] -> [S, D]."""
        h_TD = enter_tp(self.input_layernorm(x_SD), context)
        if self.is_linear:
            mixed_TD = self.linear_attn(h_TD, context)
        else:
            mixed_TD = self.self_attn(h_TD, tables, context)
        x_SD = x_SD + leave_tp(mixed_TD, context)
        h_TD = enter_tp(self.post_attention_layernorm(x_SD), context)
        return x_SD + leave_tp(self.mlp(h_TD), context)


class Decoder(_Block):
    """Embedding, layers and final norm: the part named `model.` in checkpoints."""

    def __init__(self, config: Qwen3_5TextConfig, make: ParamFactory, *, backend: str, recompute: Recompute) -> None:
        super().__init__(recompute=recompute == "full")
        vocab_start, _ = vocab_section(config).range(make.tp_rank, make.tp_size)
        self.embed_tokens = VocabParallelEmbedding(make("model.embed_tokens.weight"), vocab_start, config.pad_token_id)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, make, backend=backend, selective=recompute == "selective")
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(make("model.norm.weight"), config.rms_norm_eps)
        self.rotary = Rotary(head_dim=config.head_dim, rope_parameters=config.rope_parameters)

    def forward(self, tokens_T: Tensor, context: SliceContext) -> Tensor:
        """int64 [T] -> [S, D]."""
        x_SD = self.embed_tokens(tokens_T, context)
        tables = self.rotary.tables(context.positions_T, x_SD.dtype)
        for layer in self.layers:
            x_SD = self.run(layer, x_SD, tables, context)
        hidden_SD: Tensor = self.norm(x_SD)
        return hidden_SD


class HybridCausalLM(nn.Module):
    """One tp rank's part of the language model, with Hugging Face's parameter names.

    Parameters are NaN until weights are loaded (`weights.load_directory`) or drawn (`tiny.random_weights`).

    Args:
        config: validated here.
        tp_rank, tp_size: which part; no process group is needed to build it.
        dtype: of the parameters; `A_log`, `dt_bias` and LoRA factors are never below fp32.
        device: where to allocate them.
        recompute: what to compute again in the backward instead of keeping: "none", "selective" (the token mixers
            between their projections, and the MLP's product), or "full" (whole layers).
        backend: of the delta rule ("torch", "naive", "fla"); "naive" is passed to the other ops too.

    Raises:
        UnsupportedConfigError: the configuration asks for something that is not computed here.
        ValueError: `tp_size` cannot deal out the heads, or an unknown `recompute`.

    Example:
        >>> from deltamesh.models import HybridCausalLM, tiny_config
        >>> model = HybridCausalLM(tiny_config(), tp_rank=1, tp_size=2)
        >>> tuple(model.lm_head.weight.shape), model.vocab_start
        ((129, 44), 130)
    """

    def __init__(
        self,
        config: Qwen3_5TextConfig,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        recompute: Recompute = "none",
        backend: str = "torch",
    ) -> None:
        super().__init__()
        if recompute not in get_args(Recompute):
            raise ValueError(f"recompute={recompute!r} is unknown; use one of {', '.join(get_args(Recompute))}")
        self.config = validate_config(config)
        check_tp(config, tp_size)
        self.tp_rank, self.tp_size, self.dtype = tp_rank, tp_size, dtype
        self.base_specs: dict[str, ParamSpec] = param_specs(config)
        self.lora_specs: dict[str, ParamSpec] = {}
        make = self.factory(torch.device(device))
        self.model = Decoder(config, make, backend=backend, recompute=recompute)
        tied = config.tie_word_embeddings
        self.lm_head = Linear(self.model.embed_tokens.weight if tied else make("lm_head.weight"))

    def factory(self, device: torch.device) -> ParamFactory:
        """Makes further parameters of this rank (LoRA factors)."""
        return ParamFactory(
            specs=self.base_specs, tp_rank=self.tp_rank, tp_size=self.tp_size, dtype=self.dtype, device=device
        )

    @property
    def specs(self) -> dict[str, ParamSpec]:
        """Every parameter by name: base weights, then LoRA factors. Same names as `named_parameters()`."""
        return {**self.base_specs, **self.lora_specs}

    @property
    def vocab_start(self) -> int:
        """First vocabulary row of this rank's embedding and head."""
        return self.model.embed_tokens.vocab_start

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: this rank's rows of the output head, for `ops.target_logprobs`."""
        return self.lm_head.effective_weight()

    def forward(self, tokens_T: Tensor, context: SliceContext) -> Tensor:
        """Final-normed hidden rows.

        Args:
            tokens_T: int64 [T], the tokens of this cp rank's slice (the same on all its tp ranks).
            context: positions, groups and exchanges of the slice.

        Returns:
            [S, D]: all T rows, or with `context.sp` this tp rank's shard of them, padded to ceil(T / tp) rows.
        """
        hidden_SD: Tensor = self.model(tokens_T, context)
        return hidden_SD
