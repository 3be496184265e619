"""Which fields of a `peft.LoraConfig` are honoured; every other field must have its default value."""

from dataclasses import fields

from peft import LoraConfig

_HONOURED = frozenset(
    {
        "r", "target_modules", "exclude_modules", "lora_alpha", "use_rslora", "init_lora_weights",
        "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    }
)  # fmt: skip
# about the file or another use of it: without influence on training here
_NEUTRAL = frozenset(
    {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
     "runtime_config", "qalora_group_size", "megatron_core"}
)  # fmt: skip


class UnsupportedLoraError(ValueError):
    """A LoRA option that is not computed here."""


def _reasons() -> dict[str, str]:
    return {
        "lora_dropout": "dropout would draw other masks on every topology; use 0",
        "bias": "the layers have no biases; use 'none'",
        "modules_to_save": "only LoRA factors are trained; target the module with a LoRA, or leave it frozen",
        "trainable_token_indices": "the embedding stays frozen",
        "use_dora": "its magnitudes need the norm of the whole merged weight; use plain or rank-stabilised LoRA",
        "lora_bias": "the layers have no biases",
        "target_parameters": "factors go on linear layers only; use target_modules",
        "fan_in_fan_out": "weights are stored [out, in]",
        "megatron_config": "tensor parallelism is given by the topology",
        "layer_replication": "the model's layers are used as they are",
    }


def check_lora_config(lora: LoraConfig) -> None:
    """Passes if everything in `lora` is honoured.

    Raises:
        UnsupportedLoraError: one message that names every option that is not, with its value and the reason.

    Example:
        >>> check_lora_config(LoraConfig(r=8, target_modules="all-linear", use_rslora=True))
    """
    plain, reasons, problems = LoraConfig(), _reasons(), []
    for field in fields(lora):
        value, default = getattr(lora, field.name), getattr(plain, field.name)
        if field.name in _HONOURED | _NEUTRAL or value == default or (not value and not default):
            continue
        reason = reasons.get(field.name, "this variant is not computed here; leave it at its default")
        problems.append(f"{field.name}={value!r}: {reason}")
    if not (isinstance(lora.init_lora_weights, bool) or lora.init_lora_weights == "gaussian"):
        problems.append(
            f"init_lora_weights={lora.init_lora_weights!r}: only True, False and 'gaussian' start from the seed alone; "
            "the others need the whole base weight or data"
        )
    if lora.r < 1:
        problems.append(f"r={lora.r}: must be at least 1")
    if lora.target_modules is None:
        problems.append("target_modules=None: PEFT has no default for this model; use 'all-linear' or a list of names")
    if problems:
        raise UnsupportedLoraError("this LoraConfig cannot be trained:\n  " + "\n  ".join(problems))
