"""The model of the whole-model benchmarks: 6 layers of width 512, random weights, in a Hugging Face directory."""

from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import Qwen3_5TextConfig

import deltamesh as dm
from deltamesh.models import param_specs, save_directory
from deltamesh.models.tiny import random_state
from deltamesh.train.trainer_rank import TrainerRank


def six_layers() -> Qwen3_5TextConfig:
    """Three of four layers are Gated DeltaNet; about 20M weights."""
    return Qwen3_5TextConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


def weights() -> dict[str, Tensor]:
    """Whole tensors by name."""
    return random_state(param_specs(six_layers()), 0)


def write_model(directory: Path) -> Path:
    """Writes the model below `directory`; returns where."""
    path = directory / "six-layers"
    save_directory(weights().items(), six_layers(), path, dtype=torch.float32)
    return path


def trainer(
    name_or_path: str | Path,
    *,
    max_rows: int,
    recompute: str = "none",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    backend: str = "torch",
) -> TrainerRank:
    """One process that trains a LoRA of rank 8 on every linear layer; the rest as in `from_pretrained`."""
    # without zeros in B, so that all factors have gradients from the first step on
    lora = LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return TrainerRank.from_pretrained(
        name_or_path, topology=dm.Topology(), lora=lora, max_rows=max_rows, recompute=recompute, dtype=dtype,
        device=device, backend=backend,
    )  # fmt: skip
