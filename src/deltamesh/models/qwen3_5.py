"""The hybrid Gated DeltaNet + attention language model, one tp rank's part of it, on the rows of one slice.

Legend: T rows of this cp rank's slice, S rows of the residual stream here (T, or a tp shard of T), D model width,
V this rank's vocabulary rows.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig

from deltamesh.models.blocks import MLP, Backend, Block, GatedAttention, GatedDeltaNet, OpBackends, Tables
from deltamesh.models.config import LINEAR_ATTENTION, validate_config
from deltamesh.models.layers import (
    Linear,
    ParamFactory,
    RMSNorm,
    Rotary,
    VocabParallelEmbedding,
    enter_tp_derived,
    leave_tp,
)
from deltamesh.models.sharding import ParamSpec
from deltamesh.models.specs import check_tp, param_specs, vocab_section
from deltamesh.ops.context import SliceContext

Recompute = Literal["none", "selective", "full"]


class DecoderLayer(nn.Module):
    """Token mixer and MLP, each between a norm and the residual; one gather and one scatter per block."""

    def __init__(
        self, config: Qwen3_5TextConfig, index: int, make: ParamFactory, *, backends: OpBackends, selective: bool
    ):
        super().__init__()
        prefix = f"model.layers.{index}"
        self.is_linear = config.layer_types[index] == LINEAR_ATTENTION
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(
                config, f"{prefix}.linear_attn", make, backends=backends, recompute=selective
            )
        else:
            self.self_attn = GatedAttention(config, f"{prefix}.self_attn", make, backends=backends, recompute=selective)
        self.mlp = MLP(f"{prefix}.mlp", make)
        self.input_layernorm = RMSNorm(make(f"{prefix}.input_layernorm.weight"), config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(make(f"{prefix}.post_attention_layernorm.weight"), config.rms_norm_eps)

    def forward(self, x_SD: Tensor, tables: Tables, context: SliceContext) -> Tensor:
        """[S, D] -> [S, D]."""
        h_TD = enter_tp_derived(self.input_layernorm.derived(x_SD), context)
        if self.is_linear:
            mixed_TD = self.linear_attn(h_TD, context)
        else:
            mixed_TD = self.self_attn(h_TD, tables, context)
        x_SD = x_SD + leave_tp(mixed_TD, context)
        h_TD = enter_tp_derived(self.post_attention_layernorm.derived(x_SD), context)
        return x_SD + leave_tp(self.mlp(h_TD), context)


class Decoder(Block):
    """Embedding, layers and final norm: the part named `model.` in checkpoints."""

    def __init__(
        self, config: Qwen3_5TextConfig, make: ParamFactory, *, backends: OpBackends, recompute: Recompute
    ) -> None:
        super().__init__(recompute=recompute == "full")
        vocab_start, _ = vocab_section(config).range(make.tp_rank, make.tp_size)
        self.embed_tokens = VocabParallelEmbedding(make("model.embed_tokens.weight"), vocab_start, config.pad_token_id)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, make, backends=backends, selective=recompute == "selective")
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
            between their projections), or "full" (whole layers). Norms and gates are never kept.
        backend: versions of the ops, see `OpBackends.named`.

    Raises:
        UnsupportedConfigError: the configuration asks for something that is not computed here.
        ValueError: `tp_size` cannot deal out the heads, or an unknown `recompute` or `backend`.

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
        backend: Backend = "torch",
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
        self.model = Decoder(config, make, backends=OpBackends.named(backend), recompute=recompute)
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
