"""What a `peft.LoraConfig` matches in a model, by PEFT's own matcher; from the configuration alone."""

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import INCLUDE_LINEAR_LAYERS_SHORTHAND
from peft.utils.other import get_pattern_key
from transformers import Qwen3_5TextConfig

from deltamesh.models.lora_config import check_lora_config
from deltamesh.models.sharding import ParamSpec
from deltamesh.models.specs import linear_specs, param_specs

HEAD = "lm_head"


class LoraTargetError(ValueError):
    """`target_modules` matches nothing, or something that cannot carry a LoRA here."""


@dataclass(frozen=True, kw_only=True)
class LoraModule:
    """The LoRA of one linear layer: its rank and the factor in front of B A."""

    r: int
    scaling: float


@dataclass(frozen=True, kw_only=True)
class LoraTargets:
    """What a `LoraConfig` matches in a model.

    Attributes:
        modules: matched linear layers by module name, in module order.
        counts: matched layers per kind (`in_proj_qkv`, `q_proj`, ...), for showing; kinds without a match count 0.
        available: layers per kind in the model.
        unmatched: entries of a list in `target_modules` that match no layer (usually a name of another model).
    """

    modules: Mapping[str, LoraModule]
    counts: Mapping[str, int]
    available: Mapping[str, int]
    unmatched: tuple[str, ...]

    def summary(self) -> str:
        """One line, e.g. `in_proj_qkv 48/48, q_proj 16/16, lm_head 0/1`."""
        return ", ".join(f"{kind} {self.counts[kind]}/{n}" for kind, n in self.available.items())


def is_all_linear(lora: LoraConfig) -> bool:
    """Whether `target_modules` is PEFT's shorthand."""
    asked = lora.target_modules
    return isinstance(asked, str) and asked.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND


def _kind(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _other_modules(config: Qwen3_5TextConfig) -> list[str]:
    """Names of all modules that are not linear layers: containers, norms, convolutions, the embedding."""
    names: dict[str, None] = {}
    for parameter in param_specs(config):
        parts = parameter.split(".")[:-1]
        names.update(dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts) + 1)))
    linear = linear_specs(config)
    return [name for name in names if name not in linear]


def match_lora_targets(lora: LoraConfig, config: Qwen3_5TextConfig) -> LoraTargets:
    """The linear layers that PEFT would put a LoRA on, with their ranks and scalings. Needs no model and no ranks.

    `target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern`, `rank_pattern` and `alpha_pattern`
    are read by PEFT's own matcher. "all-linear" is every linear layer but the output head.

    Raises:
        UnsupportedLoraError: see `check_lora_config`.
        LoraTargetError: nothing is matched, or a module that is not a linear layer.

    Example:
        >>> from deltamesh.models.config import tiny_config
        >>> targets = match_lora_targets(LoraConfig(r=1, target_modules=["q_proj", "in_proj_qkv"]), tiny_config())
        >>> targets.counts["in_proj_qkv"], targets.counts["q_proj"]
        (3, 1)
    """
    check_lora_config(lora)
    linear = linear_specs(config)
    available = Counter(_kind(name) for name in linear)
    asked = lora.target_modules
    matcher = deepcopy(lora)
    if is_all_linear(lora):
        matcher.target_modules = {name for name in linear if name != HEAD}
    names = [name for name in linear if check_target_module_exists(matcher, name)]
    others = [name for name in _other_modules(config) if check_target_module_exists(matcher, name)]
    if others:
        raise LoraTargetError(
            f"target_modules={asked!r} matches modules that are not linear layers: {', '.join(others[:5])}"
            f"{' ...' if len(others) > 5 else ''}; a LoRA can go on {', '.join(available)}"
        )
    if not names:
        raise LoraTargetError(
            f"target_modules={asked!r} (exclude_modules={lora.exclude_modules!r}, "
            f"layers_to_transform={lora.layers_to_transform!r}) matches no linear layer; available are "
            f"{', '.join(available)} in layers 0 to {config.num_hidden_layers - 1}, or 'all-linear'"
        )
    if HEAD in names and config.tie_word_embeddings:
        raise LoraTargetError("a LoRA on lm_head is not supported where its weight is the embedding's; exclude lm_head")
    counts = Counter(_kind(name) for name in names)
    entries = [] if isinstance(asked, str) else sorted(asked)
    return LoraTargets(
        modules={name: lora_module(lora, name) for name in names},
        counts={kind: counts[kind] for kind in available},
        available=dict(available),
        unmatched=tuple(e for e in entries if not any(n == e or n.endswith(f".{e}") for n in linear)),
    )


def lora_module(lora: LoraConfig, name: str) -> LoraModule:
    """Rank and scaling that `lora` gives the layer `name`, patterns included."""
    r = lora.rank_pattern.get(get_pattern_key(list(lora.rank_pattern), name), lora.r)
    alpha = lora.alpha_pattern.get(get_pattern_key(list(lora.alpha_pattern), name), lora.lora_alpha)
    if r < 1:
        raise LoraTargetError(f"rank_pattern gives {name} the rank {r}; ranks must be at least 1")
    return LoraModule(r=r, scaling=alpha / (r**0.5 if lora.use_rslora else r))


def lora_param_specs(targets: LoraTargets, config: Qwen3_5TextConfig) -> dict[str, ParamSpec]:
    """The factors `<module>.lora_A.weight` [r, in] and `<module>.lora_B.weight` [out, r] of every matched layer."""
    linear = linear_specs(config)
    return {spec.name: spec for name, module in targets.modules.items() for spec in linear[name].lora(module.r)}
