"""The built-in tiny model: random weights, so that everything runs without a download."""

from collections.abc import Mapping

from torch import Tensor

from deltamesh.models.initialize import fill, normal, uniform
from deltamesh.models.qwen3_5 import HybridCausalLM
from deltamesh.models.sharding import ParamSpec


def _draw(spec: ParamSpec, seed: int) -> Tensor:
    name = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if name == "A_log":  # with dt_bias: per-token decays between about 1e-4 and 0.1, so that states are kept for long
        return uniform(spec, seed, 0.02, 0.3).log()
    if name == "dt_bias":
        return uniform(spec, seed, -4.0, -1.0)
    if name == "norm" and ".linear_attn." in spec.name:
        return normal(spec, seed, 0.1, mean=1.0)
    if name == "norm" or name.endswith(("_norm", "layernorm")):
        return normal(spec, seed, 0.1)
    if name == "conv1d":
        return normal(spec, seed, spec.shape[-1] ** -0.5)
    if name == "embed_tokens":
        return normal(spec, seed, 0.5)
    if name in ("out_proj", "o_proj", "down_proj", "in_proj_a", "lm_head"):
        return normal(spec, seed, 0.5 * spec.shape[-1] ** -0.5)
    return normal(spec, seed, spec.shape[-1] ** -0.5)


def random_weights(model: HybridCausalLM, seed: int) -> None:
    """Fills every base parameter with this rank's part of a tensor drawn from (`seed`, full parameter name).

    Drawn in fp32 for the full tensor and then cut, so models of any topology (and, up to rounding, dtype) are equal.

    Example:
        >>> from deltamesh.models import HybridCausalLM, tiny_config
        >>> model = HybridCausalLM(tiny_config())
        >>> random_weights(model, seed=0)
        >>> bool(model.lm_head.weight.isnan().any())
        False
    """
    parameters = dict(model.named_parameters())
    for name, spec in model.base_specs.items():
        fill(parameters[name], _draw(spec, seed), spec, model.tp_rank, model.tp_size)


def random_state(specs: Mapping[str, ParamSpec], seed: int) -> dict[str, Tensor]:
    """The full fp32 tensors that `random_weights` cuts, by name; small models only."""
    return {name: _draw(spec, seed) for name, spec in specs.items()}
