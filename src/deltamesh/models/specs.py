"""The parameters of a model and of its LoRA factors, by name, from the configuration alone.

Legend: D model width, F intermediate width, H value heads, Hk key heads, K key dim, V value dim, W convolution width.
"""

from dataclasses import dataclass
from typing import Literal

from transformers import Qwen3_5TextConfig

from deltamesh.models.config import LINEAR_ATTENTION
from deltamesh.models.sharding import ParamSpec, Section


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """A linear layer: weight [out, in], split by output rows ("column" parallel) or by input columns ("row" parallel).

    Attributes:
        name: module name, e.g. `model.layers.0.linear_attn.in_proj_qkv`.
        sections: sections of the split dimension.
    """

    name: str
    in_features: int
    out_features: int
    split: Literal["column", "row"]
    sections: tuple[Section, ...]

    @property
    def weight(self) -> ParamSpec:
        """The base weight."""
        return ParamSpec(
            name=f"{self.name}.weight",
            shape=(self.out_features, self.in_features),
            dim=0 if self.split == "column" else 1,
            sections=self.sections,
        )

    def lora(self, r: int) -> tuple[ParamSpec, ParamSpec]:
        """LoRA factors A [r, in] and B [out, r].

        Column: each rank's output part back-propagates a part of the gradient of A, so A is whole and summed over tp.
        Row: each rank multiplies B with a part of A x, so B is whole and summed over tp.
        """
        column = self.split == "column"
        a, b = f"{self.name}.lora_A.weight", f"{self.name}.lora_B.weight"
        return (
            ParamSpec(name=a, shape=(r, self.in_features), dim=None if column else 1,
                      sections=() if column else self.sections, keep_fp32=True),
            ParamSpec(name=b, shape=(self.out_features, r), dim=0 if column else None,
                      sections=self.sections if column else (), keep_fp32=True),
        )  # fmt: skip


def vocab_section(config: Qwen3_5TextConfig) -> Section:
    """Rows of the embedding and the head: blocks of ceil(vocab_size / tp)."""
    return Section(name="vocab_size", units=config.vocab_size, uneven=True)


def _layer_linears(config: Qwen3_5TextConfig, i: int) -> list[LinearSpec]:
    D, F = config.hidden_size, config.intermediate_size
    prefix = f"model.layers.{i}"

    def column(name: str, *sections: Section) -> LinearSpec:
        out = sum(s.size for s in sections)
        return LinearSpec(name=f"{prefix}.{name}", in_features=D, out_features=out, split="column", sections=sections)

    def row(name: str, section: Section) -> LinearSpec:
        return LinearSpec(
            name=f"{prefix}.{name}", in_features=section.size, out_features=D, split="row", sections=(section,)
        )

    if config.layer_types[i] == LINEAR_ATTENTION:
        qk, v = _delta_sections(config)
        heads = Section(name="linear_num_value_heads", units=config.linear_num_value_heads)
        mixer = [
            column("linear_attn.in_proj_qkv", qk, qk, v),
            column("linear_attn.in_proj_z", v),
            column("linear_attn.in_proj_b", heads),
            column("linear_attn.in_proj_a", heads),
            row("linear_attn.out_proj", v),
        ]
    else:
        n, d = config.num_attention_heads, config.head_dim
        kv = Section(name="num_key_value_heads", units=config.num_key_value_heads, unit_size=d, replicate=True)
        mixer = [
            # each head's rows are its query followed by its output gate
            column("self_attn.q_proj", Section(name="num_attention_heads", units=n, unit_size=2 * d)),
            column("self_attn.k_proj", kv),
            column("self_attn.v_proj", kv),
            row("self_attn.o_proj", Section(name="num_attention_heads", units=n, unit_size=d)),
        ]
    inner = Section(name="intermediate_size", units=F)
    return [*mixer, column("mlp.gate_proj", inner), column("mlp.up_proj", inner), row("mlp.down_proj", inner)]


def _delta_sections(config: Qwen3_5TextConfig) -> tuple[Section, Section]:
    return (
        Section(name="linear_num_key_heads", units=config.linear_num_key_heads, unit_size=config.linear_key_head_dim),
        Section(
            name="linear_num_value_heads", units=config.linear_num_value_heads, unit_size=config.linear_value_head_dim
        ),
    )


def linear_specs(config: Qwen3_5TextConfig) -> dict[str, LinearSpec]:
    """Every linear layer by module name, in module order; `lm_head` last, also when its weight is the embedding's.

    Example:
        >>> from deltamesh.models.config import tiny_config
        >>> linear_specs(tiny_config())["model.layers.2.self_attn.q_proj"].out_features
        384
    """
    specs = [spec for i in range(config.num_hidden_layers) for spec in _layer_linears(config, i)]
    head = LinearSpec(
        name="lm_head",
        in_features=config.hidden_size,
        out_features=config.vocab_size,
        split="column",
        sections=(vocab_section(config),),
    )
    return {spec.name: spec for spec in [*specs, head]}


def check_tp(config: Qwen3_5TextConfig, tp_size: int) -> None:
    """Passes if the model's heads, columns and vocabulary rows can be dealt to `tp_size` ranks.

    Raises:
        ValueError: the first thing that cannot, with the sizes of tp that it allows.
    """
    for section in dict.fromkeys(s for linear in linear_specs(config).values() for s in linear.sections):
        section.range(tp_size - 1, tp_size)


def param_specs(config: Qwen3_5TextConfig) -> dict[str, ParamSpec]:
    """Every base parameter by Hugging Face's name, in checkpoint order; no `lm_head.weight` where embeddings are tied.

    Example:
        >>> from deltamesh.models.config import tiny_config
        >>> param_specs(tiny_config())["model.layers.0.linear_attn.A_log"].local_shape(0, 4)
        (2,)
    """
    D, H = config.hidden_size, config.linear_num_value_heads
    linears = linear_specs(config)
    vocab = vocab_section(config)
    out = [ParamSpec(name="model.embed_tokens.weight", shape=(config.vocab_size, D), dim=0, sections=(vocab,))]
    qk, v = _delta_sections(config)
    heads = (Section(name="linear_num_value_heads", units=H),)
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        if config.layer_types[i] == LINEAR_ATTENTION:
            channels = qk.size * 2 + v.size
            mixer = prefix + "linear_attn."
            out += [
                ParamSpec(name=mixer + "dt_bias", shape=(H,), dim=0, sections=heads, keep_fp32=True),
                ParamSpec(name=mixer + "A_log", shape=(H,), dim=0, sections=heads, keep_fp32=True),
                ParamSpec(
                    name=mixer + "conv1d.weight",
                    shape=(channels, 1, config.linear_conv_kernel_dim),
                    dim=0,
                    sections=(qk, qk, v),
                ),
                # each rank sees its own heads only, whatever the rows: the gradients are parts
                ParamSpec(name=mixer + "norm.weight", shape=(config.linear_value_head_dim,)),
            ]
        else:
            out += [
                ParamSpec(name=f"{prefix}self_attn.{norm}.weight", shape=(config.head_dim,))
                for norm in ("q_norm", "k_norm")
            ]
        out += [linear.weight for name, linear in linears.items() if name.startswith(prefix)]
        out += [
            ParamSpec(name=f"{prefix}{norm}.weight", shape=(D,), partial="sp")
            for norm in ("input_layernorm", "post_attention_layernorm")
        ]
    out.append(ParamSpec(name="model.norm.weight", shape=(D,), partial="sp"))
    if not config.tie_word_embeddings:
        out.append(linears["lm_head"].weight)
    return {spec.name: spec for spec in out}
