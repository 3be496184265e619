"""What `gpu.py` holds against fp64 before it times anything, and what it needs for that.

Letters: T rows, H value heads, Hk key heads, K = V = dim.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _data import Sequences, forward_inputs, group
from _model import trainer
from torch import Tensor

from deltamesh.ops.gated_delta_rule import ExchangeCarrier, ScanContext, gated_delta_rule
from deltamesh.plan.pieces import Pieces, chain_pieces
from deltamesh.train.micro_batches import Item
from deltamesh.train.trainer_rank import TrainerRank

NAMES = ("q", "k", "v", "g", "beta")
# bf16: 4 x 2^-9 for what is rounded inside, as in tests/kernels; as much again, as the loss is quadratic in states.
FP32_BOUND, BF16_BOUND = 2e-5, 1.6e-2
# Where the library solves its triangular systems with TF32 products, whatever the rows' type is: 4 x 2^-11.
TF32_BOUND = 2e-3
# A whole model in bf16 rounds every activation of every layer: backend "torch" is 7.6e-2 off in the worst gradient of
# the checked case, and this is twice that. In fp32 a model is held to what an op is, with TF32 to twice that.
MODEL_BF16_BOUND = 0.15
Sizes = dict[str, Any]


def draw(T: int, H: int, Hk: int, dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Inputs [1, T, ...] that retain much of what they read."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    k = torch.nn.functional.normalize(normal(1, 1, Hk, dim) + normal(1, T, Hk, dim), dim=-1)
    rows = {"q": normal(1, T, Hk, dim), "k": k, "v": normal(1, T, H, dim)}
    gates = {"g": -0.02 * torch.rand(1, T, H, generator=random), "beta": torch.rand(1, T, H, generator=random)}
    return {name: x.to(device, dtype) for name, x in rows.items()} | {name: x.to(device) for name, x in gates.items()}


def leaves_of(inputs: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies that want gradients."""
    return {name: x.detach().to(dtype or x.dtype).clone().requires_grad_() for name, x in inputs.items()}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """In the Frobenius norm; NaN, which is within no bound, if anything is not finite."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def within(errors: dict[str, float], bound: float) -> bool:
    """Whether there are errors, and each is a number no larger than the bound."""
    return bool(errors) and all(error <= bound for error in errors.values())


# ---------------------------------------------------------------- the library's tuning


def autotuners() -> list[Any]:
    """Every autotuner of the library's kernels that our path calls."""
    from triton.runtime.autotuner import Autotuner

    for module in ("gated_delta_rule.cuda.engine", "causal_conv1d.fla"):
        importlib.import_module(f"deltamesh.ops.{module}")
    importlib.import_module("fla.modules.causal_conv1d")
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for kernel in list(vars(module).values()):
            while kernel is not None and type(kernel).__module__.startswith(("triton.", "fla.")):
                if isinstance(kernel, Autotuner):
                    found[id(kernel)] = kernel
                kernel = vars(kernel).get("fn") if hasattr(kernel, "__dict__") else None
    return list(found.values())


@contextmanager
def untuned() -> Iterator[None]:
    """One configuration of every kernel, for a check: to compile all of them takes minutes in exact fp32.

    That with the most warps: each thread then has the least code, over which the assembler can brood for minutes.
    """
    before = [(tuner, tuner.configs) for tuner in autotuners()]
    for tuner, configs in before:
        tuner.configs = [max(configs, key=lambda config: (config.num_warps, -config.num_stages))]
    try:
        yield
    finally:
        for tuner, configs in before:
            tuner.configs = configs


def triangular_solve() -> str:
    """How the library multiplies fp32 numbers in its triangular solve: "ieee", or "tf32" on devices that have it."""
    from fla.ops.gated_delta_rule import chunk_fwd

    return str(chunk_fwd.SOLVE_TRIL_DOT_PRECISION.value)


def bound_of(dtype: torch.dtype, *, whole_model: bool) -> float:
    """The largest relative error that is right."""
    if dtype == torch.bfloat16:
        return MODEL_BF16_BOUND if whole_model else BF16_BOUND
    if triangular_solve() == "tf32":
        return TF32_BOUND * (2 if whole_model else 1)
    return FP32_BOUND


# ---------------------------------------------------------------- the op


class ChainCarrier(ExchangeCarrier):
    """Carries the states of a chain whose slices run one after another in this process."""

    def __init__(self, board: dict[str, dict[int, Tensor]], rank: int) -> None:
        self.board, self.rank = board, rank

    def incoming(self, states: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        before = self.board["states"].get(self.rank - 1)
        for state in states:
            M = transitions[0] if before is not None else None
            self.board["states"][self.rank] = state.clone() if M is None else state + M @ before
        found = states[:0] if before is None else before[None]
        return lambda: found

    def outgoing_gradient(self, d_incoming: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        owed = self.board["gradients"].get(self.rank)
        for gradient in d_incoming:
            through = 0 if owed is None else transitions[0].mT @ owed
            self.board["gradients"][self.rank - 1] = gradient + through
        found = d_incoming[:0] if owed is None else owed[None]
        return lambda: found


def check_tree(dtype: torch.dtype, device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Relative errors of a tree against fp64."""
    lengths, heads = sizes["lengths"], sizes["heads"]
    inputs = draw(sum(lengths), heads, heads // 2, sizes["dim"][dtype], dtype, device)
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    results = []
    for backend, kind in (("fla", None), ("naive", torch.float64)):
        leaves = leaves_of(inputs, kind)
        o, final = gated_delta_rule(
            **leaves, cu_seqlens=offsets, parents=sizes["parents"], output_final_state=True, backend=backend
        )
        assert final is not None
        weight = torch.linspace(-1, 1, o.numel(), device=device, dtype=torch.float64).view(o.shape)
        loss = (o.double() * weight).sum() + final.double().square().sum()
        results.append([o, final, *torch.autograd.grad(loss, list(leaves.values()))])
    return dict(zip(("o", "final", *NAMES), map(relative_error, *results)))


def check_slices(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Relative errors of a chain in three slices, in fp32."""
    T, heads = sizes["chain"], sizes["heads"]
    inputs = draw(T, heads, heads // 2, sizes["dim"][torch.float32], torch.float32, device)
    weight = torch.linspace(-1, 1, inputs["v"].numel(), device=device).view(inputs["v"].shape)
    leaves = leaves_of(inputs, torch.float64)
    o, _ = gated_delta_rule(**leaves, backend="naive")
    wanted = [o, *torch.autograd.grad((o * weight).sum(), list(leaves.values()))]
    board: dict[str, dict[int, Tensor]] = {"states": {}, "gradients": {}}
    edges = [0, T // 3 + 1, 2 * T // 3 + 5, T]
    runs = []
    for rank in range(3):
        rows = slice(edges[rank], edges[rank + 1])
        part = leaves_of({name: x[:, rows] for name, x in inputs.items()})
        chain = chain_pieces(edges[rank + 1] - edges[rank], has_initial_state=rank > 0)
        exports = chain.start[: int(rank < 2)]
        pieces = Pieces(
            start=chain.start, length=chain.length, parent=chain.parent, slot=chain.slot, num_slots=chain.num_slots,
            exports=exports,
        )  # fmt: skip
        context = ScanContext.build(pieces, device=device, carrier=ChainCarrier(board, rank))
        o, _ = gated_delta_rule(**part, context=context, backend="fla")
        runs.append((o, list(part.values()), weight[:, rows]))
    grads = [torch.autograd.grad((o * w).sum(), part) for o, part, w in reversed(runs)][::-1]
    found = [torch.cat(columns, 1) for columns in ([o for o, _, _ in runs], *zip(*grads))]
    return dict(zip(("o", *NAMES), map(relative_error, found, wanted)))


# ---------------------------------------------------------------- whole models


def backward(rank: TrainerRank, items: list[Item]) -> Tensor:
    """The summed loss; gradients are left in the parameters."""
    total = []
    for batch in rank.forward_micro_batches(items):
        losses = [-out.target_logprobs.sum() for out in batch.outputs if out.target_logprobs is not None]
        loss = torch.stack(losses).sum()
        loss.backward()
        total.append(loss.detach().double())
    return torch.stack(total).sum()


def check_model(
    name_or_path: str | Path, data: Sequences, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Relative errors of the loss and of every LoRA gradient, backend "fla" against backend "torch" in fp64.

    Both hold the same weights: those of the model in `dtype`.
    """
    items: list[Item] = [forward_inputs(data)]
    results = []
    weights: dict[str, Tensor] = {}
    for backend, kind in (("fla", dtype), ("torch", torch.float64)):
        rank = trainer(name_or_path, max_rows=1 << 16, dtype=kind, device=device, backend=backend)
        for name, p in rank.model.named_parameters():
            p.data.copy_(weights.setdefault(name, p.detach().clone()))
        loss = backward(rank, items)
        gradients = {name: p.grad for name, p in rank.trainable_parameters().items()}
        missing = [name for name, gradient in gradients.items() if gradient is None]
        assert not missing, f"no gradients of {missing}"
        results.append({"loss": loss, **gradients})
    found, wanted = results
    return {name: relative_error(found[name], wanted[name]) for name in wanted}  # type: ignore[arg-type]


# ---------------------------------------------------------------- all of it


def check(
    device: torch.device,
    sizes: Sizes,
    models: dict[str, tuple[str | Path, torch.dtype]],
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Every case with its bound, its errors (of a model only the largest) and whether it is right.

    Args:
        device: where to check.
        sizes: "lengths" and "parents" of a tree, "chain", "heads", "dim" by dtype, and "group" of the models.
        models: what to check and in which dtype, by name.
        only: cases, where not all are wanted.
    """
    found: dict[str, Any] = {}
    with untuned():
        for case, (dtype, work) in check_cases(device, sizes, models).items():
            if only is not None and case not in only:
                continue
            errors, bound = work(), bound_of(dtype, whole_model=case.startswith("model"))
            worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
            shown = errors if len(errors) < 10 else {worst: errors[worst]}
            found[case] = {"right": within(errors, bound), "bound": bound, "errors": shown}
    return found


def check_cases(
    device: torch.device, sizes: Sizes, models: dict[str, tuple[str | Path, torch.dtype]]
) -> dict[str, tuple[torch.dtype, Callable[[], dict[str, float]]]]:
    """What `check` runs: a dtype and a comparison by name."""
    data = group(np.random.default_rng(0), 200, **sizes["group"])
    return {
        "tree, fp32": (torch.float32, partial(check_tree, torch.float32, device, sizes)),
        "tree, bf16": (torch.bfloat16, partial(check_tree, torch.bfloat16, device, sizes)),
        "three slices, fp32": (torch.float32, partial(check_slices, device, sizes)),
    } | {
        f"model {label}": (dtype, partial(check_model, path, data, dtype, device))
        for label, (path, dtype) in models.items()
    }
