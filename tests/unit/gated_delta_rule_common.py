"""Inputs and comparisons shared by the tests of the gated delta rule."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(kw_only=True)
class Inputs:
    """Leaves [1, T, ...] of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.g, self.beta]

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(**{name: x.detach().to(dtype).requires_grad_() for name, x in vars(self).items()})


def make_inputs(
    num_rows: int,
    *,
    regime: str = "plain",
    Hk: int = 2,
    H: int = 6,
    K: int = 7,
    V: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Random inputs. Every head has gates of its own.

    "plain": moderate decay. "retention": nearly no decay, correlated keys, so that old states matter. "decay": most
    of the state is forgotten at every row.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    q, k, v = normal(1, num_rows, Hk, K), normal(1, num_rows, Hk, K), normal(1, num_rows, H, V)
    if regime == "plain":
        g = -uniform(1, num_rows, H) * torch.linspace(0.05, 1.5, H, dtype=torch.float64)
        beta = uniform(1, num_rows, H)
    elif regime == "retention":
        k = 0.9**0.5 * normal(1, 1, Hk, K) + 0.1**0.5 * k
        g = -torch.tensor([0.0, 1e-4, 1e-3], dtype=torch.float64).repeat(H)[:H].expand(1, num_rows, H).clone()
        beta = torch.full((1, num_rows, H), 0.05, dtype=torch.float64)
    elif regime == "decay":
        g = -uniform(1, num_rows, H) * torch.linspace(2, 40, H, dtype=torch.float64)
        beta = uniform(1, num_rows, H)
    else:
        raise ValueError(regime)
    k = F.normalize(k, dim=-1)
    return Inputs(q=q, k=k, v=v, g=g, beta=beta).to(dtype)


def relative_error(have: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; infinite if anything is not finite."""
    if have.shape != want.shape:
        raise AssertionError(f"shape {tuple(have.shape)} instead of {tuple(want.shape)}")
    have, want = have.detach().double(), want.detach().double()
    error = (have - want).norm() / want.norm().clamp_min(1e-30)
    return float(error) if torch.isfinite(error) else float("inf")


def assert_close(names: list[str], have: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Per tensor, never in aggregate."""
    errors = {n: relative_error(a, b) for n, a, b in zip(names, have, want, strict=True)}
    assert all(e <= tolerance for e in errors.values()), errors


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """Tensors made with `empty` hold NaN, so reading what was never written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
