"""Model configurations: where they come from and what of them the model code can run.

A configuration is always a `transformers.Qwen3_5TextConfig`, whatever it was loaded from.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, Qwen3_5TextConfig

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"


class UnsupportedConfigError(ValueError):
    """The configuration asks for something the model code does not compute."""


def tiny_config() -> Qwen3_5TextConfig:
    """A model of 4 layers whose sizes are awkward on purpose; runs at tp 1, 2 and 4.

    The vocabulary (256 bytes, bos, eos, pad) divides by no tp, tp 4 exceeds the 2 KV heads, key and value head sizes
    differ, and an attention layer has DeltaNet layers below and above it.

    Example:
        >>> tiny_config().vocab_size
        259
    """
    return Qwen3_5TextConfig(
        vocab_size=259,
        hidden_size=44,
        intermediate_size=104,
        num_hidden_layers=4,
        layer_types=[LINEAR_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION, LINEAR_ATTENTION],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=24,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 1],
            "mrope_interleaved": True,
        },
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        tie_word_embeddings=False,
    )


def qwen3_5_27b_config() -> Qwen3_5TextConfig:
    """The shape of the public 27B checkpoint (48 DeltaNet and 16 attention layers), for planning; it has no weights."""
    return Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def built_in_configs() -> dict[str, Callable[[], Qwen3_5TextConfig]]:
    """Names that `load_config` knows without a file. Only `tiny` can be run: the others have shapes, no weights."""
    return {"tiny": tiny_config, "qwen3.5-27b-shape": qwen3_5_27b_config}


def load_config(name_or_path: str | Path) -> Qwen3_5TextConfig:
    """The validated text configuration of a built-in name, a Hugging Face directory, or a Hub id.

    Reads both a text configuration (`qwen3_5_text`) and the outer one of the vision-language class (`qwen3_5`).

    Raises:
        UnsupportedConfigError: see `validate_config`.
        FileNotFoundError: a local path without config.json.

    Example:
        >>> load_config("tiny").linear_num_value_heads
        8
    """
    built_in = built_in_configs().get(str(name_or_path))
    if built_in is not None:
        return validate_config(built_in())
    path = Path(name_or_path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json; give a directory written by save_pretrained")
    if not path.exists() and (path.is_absolute() or str(name_or_path).startswith((".", "~"))):
        raise FileNotFoundError(
            f"{path} does not exist; give a model directory, a Hub id, or one of {', '.join(built_in_configs())}"
        )
    loaded = AutoConfig.from_pretrained(str(name_or_path))
    return validate_config(text_config(loaded, _tied(path)))


def _tied(path: Path) -> bool | None:
    """tie_word_embeddings as written in a local config.json; None where the file does not say (or is remote)."""
    file = path / "config.json"
    if not file.is_file():
        return None
    outer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    inner = outer.get("text_config") or {}
    stated = {d["tie_word_embeddings"] for d in (outer, inner) if d.get("tie_word_embeddings") is not None}
    if len(stated) > 1:
        raise UnsupportedConfigError(
            f"{file}: tie_word_embeddings is {outer['tie_word_embeddings']} for the model and "
            f"{inner['tie_word_embeddings']} in text_config, so it is not known whether lm_head has its own weights; "
            "make the two equal"
        )
    return stated.pop() if stated else None


def text_config(config: PreTrainedConfig, tied: bool | None = None) -> Qwen3_5TextConfig:
    """The `Qwen3_5TextConfig` inside `config` (or `config` itself), with `tie_word_embeddings` set to `tied` if given.

    Raises:
        UnsupportedConfigError: another model family.
    """
    inner = config.get_text_config()
    if not isinstance(inner, Qwen3_5TextConfig):
        raise UnsupportedConfigError(
            f"model_type {config.model_type!r} is not supported; give a dense Qwen3.5 model "
            "(model_type qwen3_5 or qwen3_5_text)"
        )
    if tied is None and inner is not config:
        tied = bool(inner.tie_word_embeddings or config.tie_word_embeddings)
    if tied is not None:
        inner.tie_word_embeddings = tied
    return inner


def validate_config(config: Qwen3_5TextConfig) -> Qwen3_5TextConfig:
    """Returns `config` unchanged if the model code computes all of it.

    Raises:
        UnsupportedConfigError: one message that lists every unsupported field, its value and what is supported.
    """
    rope = config.rope_parameters or {}
    rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    layer_types = config.layer_types or []
    known = {LINEAR_ATTENTION, FULL_ATTENTION}
    checks: list[tuple[bool, str]] = [
        (config.hidden_act == "silu", f"hidden_act={config.hidden_act!r}: only 'silu' is supported"),
        (rope.get("rope_type") == "default", f"rope_type={rope.get('rope_type')!r}: only 'default' is supported"),
        (rotary_dim % 2 == 0, f"rotary dimension {rotary_dim} (head_dim * partial_rotary_factor) must be even"),
        (not config.attention_bias, "attention_bias=True: projections with a bias are not supported"),
        (not config.attention_dropout, f"attention_dropout={config.attention_dropout}: must be 0"),
        (len(layer_types) == config.num_hidden_layers,
         f"layer_types names {len(layer_types)} layers, num_hidden_layers={config.num_hidden_layers}"),
        (set(layer_types) <= known, f"layer_types has {sorted(set(layer_types) - known)}: known are {sorted(known)}"),
        (config.linear_num_value_heads % config.linear_num_key_heads == 0,
         f"linear_num_value_heads={config.linear_num_value_heads} must be a multiple of "
         f"linear_num_key_heads={config.linear_num_key_heads}"),
        (config.num_attention_heads % config.num_key_value_heads == 0,
         f"num_attention_heads={config.num_attention_heads} must be a multiple of "
         f"num_key_value_heads={config.num_key_value_heads}"),
        (config.linear_conv_kernel_dim >= 1, f"linear_conv_kernel_dim={config.linear_conv_kernel_dim} must be >= 1"),
    ]  # fmt: skip
    problems = [text for good, text in checks if not good]
    if problems:
        raise UnsupportedConfigError("this model configuration cannot be run:\n  " + "\n  ".join(problems))
    return config
