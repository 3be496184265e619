"""Gradients summed over the mesh, the true global norm, and one AdamW step.

A gradient on one rank is a part of a sum over dp and cp (each computed other rows) and, for what several tp ranks hold,
often over tp as well; `ParamSpec` says which. Sums are made once per step, in few large messages.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltamesh.distributed.collectives import Group, all_reduce
from deltamesh.distributed.mesh import Mesh
from deltamesh.models.sharding import ParamSpec, scatter_to_full, take_local


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Settings of one AdamW step.

    Attributes:
        learning_rate, beta1, beta2, eps, weight_decay: as in `torch.optim.AdamW`.
        grad_clip_norm: gradients are scaled down to this global norm; None leaves them.

    Raises:
        ValueError: a setting outside its range.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float | None = None

    def __post_init__(self) -> None:
        clip = self.grad_clip_norm
        checks = {
            "learning_rate": 0 <= self.learning_rate < math.inf,
            "beta1": 0 <= self.beta1 < 1,
            "beta2": 0 <= self.beta2 < 1,
            "eps": 0 < self.eps < math.inf,
            "weight_decay": 0 <= self.weight_decay < math.inf,
            "grad_clip_norm": clip is None or 0 < clip < math.inf,
        }
        bad = [f"{name}={getattr(self, name)}" for name, good in checks.items() if not good]
        if bad:
            raise ValueError(f"AdamParams: {', '.join(bad)} is out of range; see torch.optim.AdamW for the ranges")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What `optim_step` did.

    Attributes:
        step: optimizer steps taken so far, this one included if it was taken.
        grad_norm: global L2 norm of the summed and scaled gradients, before clipping.
        skipped: the gradients were not finite; parameters and optimizer state are unchanged.
    """

    step: int
    grad_norm: float
    skipped: bool


class ShardedAdamW:
    """AdamW on this rank's parts of the trainable parameters.

    Parameters below fp32 get an fp32 master copy, which the optimizer updates and the parameter is rounded from.

    Args:
        parameters: trainable parameters by name; the same names on every rank.
        specs: how each is laid over tp.
        mesh: the groups of this rank.
        sp: whether rows are sharded over tp between layers.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], specs: Mapping[str, ParamSpec], mesh: Mesh, *, sp: bool
    ) -> None:
        self._parameters = {name: parameters[name] for name in sorted(parameters)}
        self._specs = {name: specs[name] for name in self._parameters}
        self._mesh = mesh
        self._sp = sp
        self._masters = {
            name: p.detach().float().requires_grad_() if p.element_size() < 4 else p
            for name, p in self._parameters.items()
        }
        self._adamw = torch.optim.AdamW(list(self._masters.values()), foreach=False)
        self.steps_taken = 0

    def reduced_gradients(self) -> dict[str, Tensor]:
        """Every rank's part of the gradient of the whole step, in fp32 or better; zeros where there was none."""
        tp, grads = self._mesh.tp, {}
        for name, p in self._parameters.items():
            grads[name] = torch.zeros_like(self._masters[name]) if p.grad is None else p.grad.to(self._masters[name])
        shared = [n for n in grads if self._specs[n].needs_tp_sum(tp.size, sp=self._sp)]
        full = {n: scatter_to_full(grads[n], self._specs[n], tp.rank, tp.size) for n in shared}
        for name, total in _sum_over(full, tp).items():
            grads[name] = take_local(total, self._specs[name], tp.rank, tp.size)
        return _sum_over(grads, self._mesh.dp_cp)

    def step(self, params: AdamParams, scale_grads: float = 1.0) -> StepResult:
        """Sums the gradients over the mesh, scales, clips and applies them, and forgets them.

        Args:
            params: settings of this step.
            scale_grads: factor on the summed gradients, for example 1 / number of tokens.
        """
        grads = {name: grad * scale_grads for name, grad in self.reduced_gradients().items()}
        norm = self.global_norm(grads)
        finite = math.isfinite(norm)
        if finite:
            clip = params.grad_clip_norm
            factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            self._apply(grads, factor, params)
            self.steps_taken += 1
        self.zero_grad()
        return StepResult(step=self.steps_taken, grad_norm=norm, skipped=not finite)

    def global_norm(self, grads: Mapping[str, Tensor]) -> float:
        """The L2 norm of the whole gradient; an element that several tp ranks hold counts once."""
        squares = [g.double().square().sum() / self._specs[n].copies(self._mesh.tp.size) for n, g in grads.items()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        return math.sqrt(all_reduce(total.reshape(1), self._mesh.tp).item())

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for p in self._parameters.values():
            p.grad = None

    def _apply(self, grads: Mapping[str, Tensor], factor: float, params: AdamParams) -> None:
        for group in self._adamw.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        for name, master in self._masters.items():
            master.grad = grads[name].mul_(factor)
        self._adamw.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                master.grad = None
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)


def _sum_over(tensors: Mapping[str, Tensor], group: Group, max_elements: int = 1 << 25) -> dict[str, Tensor]:
    """Sums same-named tensors over the group, in flat messages of about `max_elements`."""
    out: dict[str, Tensor] = {}
    for names in _buckets(tensors, max_elements):
        total = all_reduce(torch.cat([tensors[n].reshape(-1) for n in names]), group)
        sizes = [tensors[n].numel() for n in names]
        for name, part in zip(names, total.split(sizes), strict=True):
            out[name] = part.view(tensors[name].shape)
    return out


def _buckets(tensors: Mapping[str, Tensor], max_elements: int) -> Iterable[list[str]]:
    """Runs of names of one dtype whose sizes add up to at most `max_elements` (at least one name each)."""
    size_of: Callable[[str], int] = lambda n: tensors[n].numel()  # noqa: E731
    for dtype in sorted({t.dtype for t in tensors.values()}, key=str):
        bucket: list[str] = []
        for name in (n for n, t in tensors.items() if t.dtype == dtype):
            if bucket and sum(map(size_of, bucket)) + size_of(name) > max_elements:
                yield bucket
                bucket = []
            bucket.append(name)
        if bucket:
            yield bucket
