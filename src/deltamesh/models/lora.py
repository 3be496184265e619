"""LoRA on the sharded model: its factors, and PEFT's files."""

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from deltamesh.models.files import new_directory, resolve_directory
from deltamesh.models.initialize import fill, normal, uniform
from deltamesh.models.layers import Linear
from deltamesh.models.lora_config import check_lora_config
from deltamesh.models.lora_targets import (
    LoraTargetError,
    LoraTargets,
    is_all_linear,
    lora_module,
    lora_param_specs,
    match_lora_targets,
)
from deltamesh.models.qwen3_5 import HybridCausalLM
from deltamesh.models.sharding import ParamSpec
from deltamesh.models.weights import checkpoint_name, load_files

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def add_lora(model: HybridCausalLM, lora: LoraConfig, *, seed: int) -> LoraTargets:
    """Puts the LoRA on `model`, draws its factors, and freezes everything else. `model.specs` gains the factors.

    Factors are drawn for the whole layer from (`seed`, full parameter name) and then cut: A uniform in
    +-1 / sqrt(in) (Kaiming with a = sqrt(5)), or normal with deviation 1 / r for "gaussian"; B zero. With
    `init_lora_weights=False` B is uniform in +-1 / sqrt(r) as in PEFT, so that the adapter changes the model at once.

    Raises:
        UnsupportedLoraError, LoraTargetError: before anything is changed.
        ValueError: the model has a LoRA already.

    Example:
        >>> from deltamesh.models import HybridCausalLM, tiny_config
        >>> targets = add_lora(HybridCausalLM(tiny_config()), LoraConfig(r=1, target_modules="all-linear"), seed=0)
        >>> targets.counts["lm_head"], len(targets.modules)
        (0, 31)
    """
    targets = match_lora_targets(lora, model.config)
    specs = lora_param_specs(targets, model.config)
    if model.lora_specs:
        raise ValueError("the model has a LoRA already; build a new model to put on another")
    model.requires_grad_(False)
    model.lora_specs.update(specs)
    make = model.factory(model.lm_head.weight.device)
    for name, module in targets.modules.items():
        a, b = specs[f"{name}.lora_A.weight"], specs[f"{name}.lora_B.weight"]
        a_RI, b_OR = make.make(a), make.make(b)
        fill(a_RI, _draw_a(a, lora, seed), a, model.tp_rank, model.tp_size)
        fill(b_OR, _draw_b(b, lora, seed), b, model.tp_rank, model.tp_size)
        _linear(model, name).add_lora(a_RI, b_OR, module.scaling)
    return targets


def _linear(model: HybridCausalLM, name: str) -> Linear:
    module = model.get_submodule(name)
    assert isinstance(module, Linear), name
    return module


def _draw_a(spec: ParamSpec, lora: LoraConfig, seed: int) -> Tensor:
    r, fan_in = spec.shape
    if lora.init_lora_weights == "gaussian":
        return normal(spec, seed, 1 / r)
    return uniform(spec, seed, -(fan_in**-0.5), fan_in**-0.5)


def _draw_b(spec: ParamSpec, lora: LoraConfig, seed: int) -> Tensor:
    if lora.init_lora_weights is False:
        return uniform(spec, seed, -(spec.shape[1] ** -0.5), spec.shape[1] ** -0.5)
    return torch.zeros(spec.shape)


def export_adapter(
    named_full_tensors: Iterable[tuple[str, Tensor]],
    lora: LoraConfig,
    targets: LoraTargets,
    path: str | Path,
    *,
    base_model_name_or_path: str | None,
    conditional_generation: bool = False,
) -> None:
    """Writes an adapter directory that PEFT loads. Atomic: whole or absent.

    Args:
        named_full_tensors: `<module>.lora_A.weight` and `<module>.lora_B.weight` of every matched layer, whole.
        targets: the result of `add_lora`; "all-linear" is written as the kinds that were matched.
        path: must not exist.
        base_model_name_or_path: noted in adapter_config.json.
        conditional_generation: name the layers as the vision-language class does (`model.language_model.layers...`),
            for servers that load that class.

    Raises:
        FileExistsError: `path` exists.
        ValueError: factors missing or left over.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named_full_tensors}
    expected = {f"{name}.lora_{factor}.weight" for name in targets.modules for factor in "AB"}
    if tensors.keys() != expected:
        raise ValueError(
            f"the adapter needs exactly its factors: missing {sorted(expected - tensors.keys())}, "
            f"left over {sorted(tensors.keys() - expected)}"
        )
    written = deepcopy(lora)
    written.base_model_name_or_path = base_model_name_or_path
    written.task_type = written.task_type or "CAUSAL_LM"
    written.inference_mode = True
    if is_all_linear(lora):
        # PEFT reads the shorthand too, but would also put factors on a vision tower, for which there are no weights
        written.target_modules = {kind for kind, n in targets.counts.items() if n}
    if isinstance(written.target_modules, set):
        written.target_modules = sorted(written.target_modules)  # the same file from every process
    inside = "model.language_model." if conditional_generation else "model."
    keyed = {_PREFIX + name.replace("model.", inside, 1): tensor for name, tensor in tensors.items()}
    with new_directory(path) as temporary:
        written.save_pretrained(str(temporary))
        save_file(keyed, temporary / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapter(model: HybridCausalLM, name_or_path: str | Path) -> None:
    """Fills the LoRA factors of `model` (after `add_lora`) with this rank's part of an adapter directory.

    Raises:
        WeightsError: the factors are not those of the model (other layers, or another rank); nothing was changed.
        LoraTargetError: the adapter scales its factors otherwise than the model; nothing was changed.
        UnsupportedLoraError: the adapter is more than a plain LoRA.
        FileNotFoundError: no such directory, or no adapter in it.
    """
    directory = resolve_directory(name_or_path)
    file = directory / ADAPTER_WEIGHTS
    if not file.is_file():
        raise FileNotFoundError(f"{directory} has no {ADAPTER_WEIGHTS}; give a directory written by PEFT")
    saved = LoraConfig.from_pretrained(str(directory))
    saved.lora_dropout = 0.0  # of the training that wrote it; nothing of it is in the factors
    check_lora_config(saved)
    parameters = dict(model.named_parameters())
    factors = {name: parameters[name] for name in model.lora_specs}
    for name in factors:
        module = name.rsplit(".lora_", 1)[0]
        wanted, here = lora_module(saved, module).scaling, _linear(model, module).scaling
        if wanted != here:
            raise LoraTargetError(
                f"{directory} scales the LoRA of {module} by {wanted}, the model by {here}; give the model the "
                "adapter's r, lora_alpha, use_rslora and patterns"
            )
    load_files(
        [file],
        factors,
        model.lora_specs,
        tp_rank=model.tp_rank,
        tp_size=model.tp_size,
        rename=lambda key: checkpoint_name(key.removeprefix(_PREFIX)),
        source=str(directory),
    )
