"""Models: configuration, sharding, the model code, weights and LoRA."""

from deltamesh.models.config import UnsupportedConfigError, load_config, tiny_config, validate_config
from deltamesh.models.lora import add_lora, export_adapter, load_adapter
from deltamesh.models.lora_targets import LoraTargets, match_lora_targets
from deltamesh.models.qwen3_5 import HybridCausalLM
from deltamesh.models.sharding import ParamSpec, assemble, scatter_to_full, take_local
from deltamesh.models.specs import linear_specs, param_specs
from deltamesh.models.tiny import random_weights
from deltamesh.models.weights import WeightsError, load_directory, save_directory

__all__ = [
    "HybridCausalLM",
    "LoraTargets",
    "ParamSpec",
    "UnsupportedConfigError",
    "WeightsError",
    "add_lora",
    "assemble",
    "export_adapter",
    "linear_specs",
    "load_adapter",
    "load_config",
    "load_directory",
    "match_lora_targets",
    "param_specs",
    "random_weights",
    "save_directory",
    "scatter_to_full",
    "take_local",
    "tiny_config",
    "validate_config",
]
