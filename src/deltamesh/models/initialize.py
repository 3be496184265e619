"""Random tensors that depend on a seed and a parameter's full name only, so that every topology starts equal."""

import hashlib

import torch
from torch import Tensor, nn

from deltamesh.models.sharding import ParamSpec, take_local


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one parameter: its seed is a hash of `seed` and `name`.

    Example:
        >>> generator(0, "a").initial_seed() == generator(0, "b").initial_seed()
        False
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def normal(spec: ParamSpec, seed: int, std: float, mean: float = 0.0) -> Tensor:
    """The full tensor, fp32 on the CPU, normally distributed."""
    return torch.randn(spec.shape, generator=generator(seed, spec.name), dtype=torch.float32) * std + mean


def uniform(spec: ParamSpec, seed: int, low: float, high: float) -> Tensor:
    """The full tensor, fp32 on the CPU, uniform in [low, high)."""
    return torch.rand(spec.shape, generator=generator(seed, spec.name), dtype=torch.float32) * (high - low) + low


@torch.no_grad()
def fill(parameter: nn.Parameter, full: Tensor, spec: ParamSpec, tp_rank: int, tp_size: int) -> None:
    """Copies this rank's part of `full` into `parameter`, cast to its dtype."""
    parameter.copy_(take_local(full, spec, tp_rank, tp_size))
