"""Models: configuration, sharding, the model code, weights and LoRA."""

from deltamesh.models.config import UnsupportedConfigError, load_config, tiny_config, validate_config
from deltamesh.models.qwen3_5 import HybridCausalLM
from deltamesh.models.sharding import ParamSpec, assemble, scatter_to_full, take_local
from deltamesh.models.specs import linear_specs, param_specs
from deltamesh.models.tiny import ByteTokenizer, random_weights

__all__ = [
    "ByteTokenizer",
    "HybridCausalLM",
    "ParamSpec",
    "UnsupportedConfigError",
    "assemble",
    "linear_specs",
    "load_config",
    "param_specs",
    "random_weights",
    "scatter_to_full",
    "take_local",
    "tiny_config",
    "validate_config",
]
