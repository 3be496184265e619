"""Slices of small forests, their inputs, and what the token-by-token rule makes of them.

Letters: T rows, H value heads, Hk key heads, K key dim, V value dim.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.naive import naive_gated_delta_rule
from deltamesh.plan.pieces import Pieces

NAMES = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True, kw_only=True)
class Regime:
    """How inputs are drawn. The default decays; "retaining" is where only a right M gives a right result."""

    gates: tuple[float, ...] = (-0.05, -0.2)
    beta: float = 0.6
    coherence: float = 0.5


RETAINING = Regime(gates=(0.0, -1e-4, -1e-3), beta=0.05, coherence=0.9)


def make_pieces(
    nodes: list[tuple[int, int, int]], *, exports: tuple[int, ...] = (), num_slots: int | None = None
) -> Pieces:
    """Pieces from (length, parent, slot)."""
    length, parent, slot = (np.array(column, dtype=np.int64) for column in zip(*nodes, strict=True))
    return Pieces(
        start=np.cumsum(length) - length,
        length=length,
        parent=parent,
        slot=slot,
        num_slots=int(slot.max()) + 1 if num_slots is None else num_slots,
        exports=np.array(exports, dtype=np.int64),
    )


# Two slots and two roots of their own; a fork at a slot's first piece, one below it and one in a root; one-token
# pieces; a piece of 66 rows and one of 70 cross the border of a chunk of 64. Exports: through, through at a leaf, own.
FOREST = make_pieces(
    [(70, -1, 0), (1, 0, -1), (3, 0, -1), (66, 2, -1), (2, 2, -1), (5, -1, -1), (1, 5, -1), (3, 5, -1), (4, -1, 1)],
    exports=(2, 3, 6),
)


def predecessors(pieces: Pieces) -> list[int]:
    """The row before each row on its path, -1 for none, -2 - i for slot i."""
    before: list[int] = []
    last = pieces.start + pieces.length - 1
    for start, length, parent, slot in zip(
        *(x.tolist() for x in (pieces.start, pieces.length, pieces.parent, pieces.slot)), strict=True
    ):
        before.append(int(last[parent]) if parent >= 0 else -2 - slot if slot >= 0 else -1)
        before.extend(range(start, start + length - 1))
    return before


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Inputs of a slice and the gradients that come back to it."""

    pieces: Pieces
    finals: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    incoming: Tensor
    d_out: Tensor
    d_finals: Tensor
    d_exports: Tensor
    scale: float


def make_case(
    pieces: Pieces,
    *,
    K: int,
    V: int,
    Hk: int = 1,
    H: int = 2,
    dtype: torch.dtype = torch.float32,
    finals: tuple[int, ...] = (),
    regime: Regime | None = None,
    seed: int = 0,
) -> Case:
    """Draws a case; gates differ by head and row."""
    regime = Regime() if regime is None else regime
    random = torch.Generator().manual_seed(seed)
    T = pieces.num_rows

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    common, own = unit(normal(Hk, K)), unit(normal(T, Hk, K))
    k = unit(regime.coherence**0.5 * common + (1 - regime.coherence) ** 0.5 * own)
    gates = torch.tensor(regime.gates)[torch.randint(len(regime.gates), (T, H), generator=random)]
    beta = regime.beta * (0.5 + 0.5 * torch.rand(T, H, generator=random))
    return Case(
        pieces=pieces,
        finals=finals,
        inputs=(normal(T, Hk, K).to(dtype), k.to(dtype), normal(T, H, V).to(dtype), gates, beta),
        incoming=normal(pieces.num_slots, H, K, V),
        d_out=normal(T, H, V).to(dtype),
        d_finals=normal(len(finals), H, K, V),
        d_exports=normal(len(pieces.exports), H, K, V),
        scale=K**-0.5,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """What both sides report: `d_incoming` has the exported gradients zero, the other gradients do not."""

    out: Tensor
    finals: Tensor
    exports: Tensor
    d_incoming: Tensor
    d_given: Tensor
    grads: tuple[Tensor, ...]


def naive_results(case: Case, *, num_given: int = 0, use_qk_l2norm: bool = False) -> Results:
    """In fp64, from the same (possibly rounded) inputs."""
    leaves = [x.double().requires_grad_() for x in case.inputs]
    incoming = case.incoming.double().requires_grad_()
    out, states = naive_gated_delta_rule(
        *leaves,
        predecessor=predecessors(case.pieces),
        scale=case.scale,
        initial_state=incoming,
        use_qk_l2norm=use_qk_l2norm,
    )
    last = case.pieces.start + case.pieces.length - 1
    empty = incoming.new_zeros(0, *incoming.shape[1:])
    finals = torch.stack([states[last[f]] for f in case.finals]) if case.finals else empty
    exports = torch.stack([states[last[e]] for e in case.pieces.exports]) if len(case.pieces.exports) else empty
    loss = (out * case.d_out.double()).sum() + (finals * case.d_finals.double()).sum()
    d_incoming = torch.zeros_like(incoming)
    if case.pieces.num_slots:
        (d_incoming,) = torch.autograd.grad(loss, incoming, retain_graph=True)
    loss = loss + (exports * case.d_exports.double()).sum()
    *grads, d_all = torch.autograd.grad(loss, [*leaves, incoming], allow_unused=True)
    return Results(
        out=out.detach(),
        finals=finals.detach(),
        exports=exports.detach(),
        d_incoming=d_incoming[num_given:],
        d_given=torch.zeros_like(incoming)[:0] if d_all is None else d_all[:num_given],
        grads=tuple(grads),
    )


def kernel_results(
    case: Case,
    *,
    num_given: int = 0,
    split: str | None = None,
    use_qk_l2norm: bool = False,
    device: str = "cpu",
) -> Results:
    """All phases of forward and backward, the carrier played by hand."""
    from deltamesh.ops.gated_delta_rule.backward import Gradients
    from deltamesh.ops.gated_delta_rule.cuda.engine import FlaKept, FlaSliceBackward, FlaSliceEngine
    from deltamesh.ops.gated_delta_rule.cuda.schedule import FlaSchedule

    schedule = FlaSchedule(case.pieces, torch.device(device), num_given=num_given, finals=case.finals, split=split)  # type: ignore[arg-type]
    kept = FlaKept()
    inputs = [x.to(device) for x in case.inputs]
    incoming = case.incoming.to(device)

    def engine() -> FlaSliceEngine:
        return FlaSliceEngine(schedule, *inputs, scale=case.scale, use_qk_l2norm=use_qk_l2norm, kept=kept)

    forward = engine()
    out = torch.full(case.d_out.shape, float("nan"), dtype=case.d_out.dtype, device=device)
    forward.before_exchange(out, incoming[:num_given])
    E, M = forward.transitions()
    exports = forward.exported(E).clone()
    forward.during_exchange(out, incoming[:num_given])
    forward.after_exchange(out, incoming)
    for n, position in enumerate(schedule.through):
        slot = case.pieces.entry_slot[case.pieces.exports[position]]
        exports[position] += M[n] @ incoming[slot]
    finals = forward.finals()
    backward = FlaSliceBackward(
        engine(),
        Gradients(**{name: torch.empty_like(x) for name, x in zip(NAMES, inputs, strict=True)}),
        incoming=incoming,
        d_out=case.d_out.to(device),
        d_finals=case.d_finals.to(device),
    )
    d_incoming = backward.before_exchange().clone()
    backward.during_exchange()
    d_given = backward.after_exchange(case.d_exports.to(device))
    g = backward.grads
    return Results(
        out=out, finals=finals, exports=exports, d_incoming=d_incoming, d_given=d_given,
        grads=(g.q, g.k, g.v, g.g, g.beta),
    )  # fmt: skip


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """In the Frobenius norm; 0 if both are empty."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if wanted.numel() == 0:
        return 0.0
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    assert torch.isfinite(found).all()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def worst_errors(found: Results, wanted: Results) -> dict[str, float]:
    """Relative error of every tensor; states are compared one by one."""
    errors = {"out": relative_error(found.out, wanted.out)}
    for name in ("finals", "exports", "d_incoming", "d_given"):
        pairs = zip(getattr(found, name), getattr(wanted, name), strict=True)
        errors |= {f"{name}[{n}]": relative_error(a, b) for n, (a, b) in enumerate(pairs)}
    errors |= {f"d_{n}": relative_error(a, b) for n, a, b in zip(NAMES, found.grads, wanted.grads, strict=True)}
    return errors


def assert_close(found: Results, wanted: Results, tolerance: float) -> None:
    """Every tensor by itself, never in aggregate."""
    wrong = {name: error for name, error in worst_errors(found, wanted).items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance}: {wrong}"
