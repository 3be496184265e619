"""From a name to this rank's part of a model with weights and adapter."""

from dataclasses import dataclass, fields
from typing import cast, get_args

import torch
from peft import LoraConfig
from transformers import Qwen3_5TextConfig

from deltamesh.distributed.mesh import Mesh
from deltamesh.models import HybridCausalLM, load_config, random_weights
from deltamesh.models.blocks import Backend
from deltamesh.models.config import FULL_ATTENTION, built_in_configs
from deltamesh.models.lora import add_lora
from deltamesh.models.lora_targets import LoraTargets
from deltamesh.models.qwen3_5 import Recompute
from deltamesh.models.weights import load_directory
from deltamesh.plan.carrier import CarrierName, RuleShape
from deltamesh.plan.cost import CostModel
from deltamesh.plan.plan import CutRule


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The arguments of `TrainerRank.from_pretrained`; see there. `cuts`: places the cuts instead of the cost."""

    name_or_path: str
    lora: LoraConfig | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str | None = None
    recompute: str = "none"
    max_rows: int = 16384
    seed: int = 0
    backend: str = "torch"
    cuts: CutRule | None = None
    carrier: CarrierName = "auto"

    def shared(self) -> dict[str, object]:
        """What must be the same on every rank."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("device", "cuts")}
        lora = self.lora and sorted((key, repr(value)) for key, value in self.lora.to_dict().items())
        return values | {"lora": lora}


def build_model(settings: ModelSettings, mesh: Mesh) -> tuple[HybridCausalLM, LoraTargets | None]:
    """Checks everything that can be wrong, then builds, loads and adapts this rank's part.

    Returns:
        The model, and what the adapter was put on (None without one).

    Raises:
        ValueError: the topology does not fit the model, a dtype or `max_rows` that cannot be used, unsupported
            configuration or adapter, weights that are not the model's.
    """
    if settings.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"dtype={settings.dtype} is not supported; use torch.float64, torch.float32 or torch.bfloat16")
    if settings.max_rows < 1:
        raise ValueError(f"max_rows={settings.max_rows} must be at least 1")
    if settings.carrier not in get_args(CarrierName):
        raise ValueError(f"carrier={settings.carrier!r} is not known; use one of {', '.join(get_args(CarrierName))}")
    if settings.backend == "fla" and settings.carrier == "pipeline":
        raise ValueError("carrier='pipeline' does not drive the kernels of backend='fla'; use carrier='scan' or 'auto'")
    config = load_config(settings.name_or_path)
    mesh.topology.check_model(config)
    if settings.name_or_path in built_in_configs() and settings.name_or_path != "tiny":
        raise ValueError(
            f"{settings.name_or_path!r} is a shape for planning and has no weights; "
            "give 'tiny', a directory or a Hub id"
        )
    model = HybridCausalLM(
        config,
        tp_rank=mesh.tp.rank,
        tp_size=mesh.tp.size,
        dtype=settings.dtype,
        device=_device(settings),
        recompute=cast(Recompute, settings.recompute),
        backend=cast(Backend, settings.backend),
    )
    if settings.name_or_path == "tiny":
        random_weights(model, settings.seed)
    else:
        load_directory(model, settings.name_or_path)
    targets = None if settings.lora is None else add_lora(model, settings.lora, seed=settings.seed)
    return model, targets


def _device(settings: ModelSettings) -> torch.device:
    if settings.device is not None:
        return torch.device(settings.device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def rule_shape(config: Qwen3_5TextConfig, tp: int) -> RuleShape:
    """What a rank has of the gated delta rule of one layer."""
    return RuleShape(
        heads=config.linear_num_value_heads // tp,
        key_heads=config.linear_num_key_heads // tp,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
    )


def cost_model(config: Qwen3_5TextConfig) -> CostModel:
    """Multiply-adds of one row of the model, per row and per attended key."""
    attention = sum(kind == FULL_ATTENTION for kind in config.layer_types)
    linear = config.num_hidden_layers - attention
    hidden, q_heads, head = config.hidden_size, config.num_attention_heads, config.head_dim
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    keys, values = config.linear_num_key_heads * key_dim, config.linear_num_value_heads * value_dim
    mlp = 3 * hidden * config.intermediate_size
    softmax = hidden * head * (3 * q_heads + 2 * config.num_key_value_heads)
    chunk = 64  # rows that the chunked delta rule multiplies with each other
    delta = hidden * (2 * keys + 3 * values) + config.linear_num_value_heads * (
        3 * key_dim * value_dim + chunk * (2 * key_dim + value_dim + chunk / 3)
    )
    return CostModel(
        row=config.num_hidden_layers * mlp + attention * softmax + linear * delta,
        key=attention * 2 * q_heads * head,
        head=hidden * config.vocab_size,
        through=linear * config.linear_num_value_heads * key_dim * 2 * (value_dim + key_dim),
    )
