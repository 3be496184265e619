"""The public op: FLA's shapes, packed sequences and trees, on one process or on a slice of many."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.context import ScanContext
from deltamesh.ops.gated_delta_rule.function import GatedDeltaRuleFunction
from deltamesh.ops.gated_delta_rule.naive import naive_gated_delta_rule
from deltamesh.ops.gated_delta_rule.segments import segments_of
from deltamesh.ops.gated_delta_rule.validate import check_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKENDS = ("torch", "fla", "naive")


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    cu_seqlens: "Tensor | Sequence[int] | None" = None,
    parents: "Tensor | Sequence[int] | None" = None,
    context: ScanContext | None = None,
    backend: str = "torch",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over sequences, packed sequences, prefix trees, or one rank's slice of them.

    Computes, per value head and along each path (S [K, V] is zero or given at a root)

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_pred(t) + beta_t k_t v_t^T        o_t = scale S_t^T q_t

    Everything is computed in fp32, or in fp64 if v is fp64; o has q's dtype, states have the computation's dtype and
    every gradient its input's.

    Args:
        q, k: [B, T, Hk, K]. Value head h reads key head h // (H // Hk).
        v: [B, T, H, V].
        g: [B, T, H], log decay, at most 0.
        beta: [B, T, H], write strength, usually in [0, 1].
        scale: factor on q; K**-0.5 unless given.
        initial_state: [N, H, K, V], one per segment (B segments without `cu_seqlens`). Not together with `parents`: a
            segment that continues another starts from that one's state. With `context`, [context.num_given, H, K, V].
        output_final_state: return the state after the last row of every segment; with `context`, of `context.finals`.
        use_qk_l2norm: normalise q and k over K with `x * rsqrt(sum(x^2) + 1e-6)`.
        cu_seqlens: [N + 1] ascending row offsets of N segments packed in one row of the batch (B = 1). Segments may be
            empty: the final state of an empty one is the state it starts from.
        parents: [N], the segment that each segment continues, -1 at roots; a parent stands before its children.
        context: the slice of a stream this call runs on; then B = 1 and neither cu_seqlens nor parents are given.
        backend: "torch" (any device), "fla" (CUDA: flash-linear-attention's chunk kernels and our pass over the states;
            products of rows in v's dtype with fp32 sums, states in fp32), or "naive" for the token by token reference.

    Returns:
        o [B, T, H, V], and the final states [N, H, K, V] or None.

    Raises:
        ValueError: shapes, dtypes or indices that do not fit each other or the backend.
        ImportError: flash-linear-attention is missing or of another version (backend "fla").

    Example:
        >>> q, k, v = (torch.randn(1, 7, 2, 8) for _ in range(3))
        >>> g, beta = -torch.rand(1, 7, 2), torch.rand(1, 7, 2)
        >>> o, final = gated_delta_rule(q, k, v, g, beta, cu_seqlens=[0, 3, 5, 7], parents=[-1, 0, 0],
        ...                             output_final_state=True)
        >>> o.shape, final.shape
        (torch.Size([1, 7, 2, 8]), torch.Size([3, 2, 8, 8]))
    """
    inputs = [q, k, v, g, beta]
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in [*inputs, initial_state])

    def describe() -> dict[str, object]:
        check_inputs(q, k, v, g, beta)
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is not known; use one of {', '.join(BACKENDS)}")
        if context is not None:
            _check_context(context, v, k.shape[-1], cu_seqlens, parents, initial_state)
        shared = {"backend": backend, "scale": scale, "use_qk_l2norm": use_qk_l2norm, "needs a backward": keep}
        return shared | {"heads and dims": (*k.shape[2:], *v.shape[2:]), "dtypes": [x.dtype for x in inputs]}

    if context is None:
        describe()
    else:
        context.check(describe)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    rows = [x.flatten(0, 1) for x in inputs]
    if context is None:
        segments = segments_of(
            v.shape, cu_seqlens, parents, initial_state, k.shape[-1], output_final_state=output_final_state
        )
        context = ScanContext.build(
            segments.pieces, device=v.device, num_given=segments.num_given, finals=segments.finals
        )
        given = segments.select(initial_state)
    else:
        segments, given = None, initial_state
    if backend == "naive":
        o, finals = _run_naive(rows, given, context, scale, use_qk_l2norm)
    else:
        o, finals = GatedDeltaRuleFunction.apply(*rows, given, context, scale, use_qk_l2norm, keep, backend)
    o = o.view(v.shape)
    if not output_final_state:
        return o, None
    return o, finals if segments is None else segments.arrange(finals, initial_state)


def _check_context(
    context: ScanContext,
    v: Tensor,
    key_dim: int,
    cu_seqlens: object,
    parents: object,
    initial_state: Tensor | None,
) -> None:
    if cu_seqlens is not None or parents is not None:
        raise ValueError("cu_seqlens and parents are given beside context, which already holds the pieces; give one")
    batch, num_rows, num_heads, value_dim = v.shape
    if batch != 1 or num_rows != context.schedule.num_rows:
        raise ValueError(
            f"v has {batch} x {num_rows} rows but context describes 1 x {context.schedule.num_rows}; "
            f"give the rows of the slice that the context was made for"
        )
    want = (context.num_given, num_heads, key_dim, value_dim)
    have = (0, *want[1:]) if initial_state is None else tuple(initial_state.shape)
    if have != want:
        raise ValueError(
            f"initial_state holds {have} but context has num_given={context.num_given} given states; give {want}"
        )


def _run_naive(
    rows: list[Tensor], given: Tensor | None, context: ScanContext, scale: float, use_qk_l2norm: bool
) -> tuple[Tensor, Tensor]:
    pieces = context.schedule.pieces
    if len(pieces.exports) or pieces.num_slots > context.num_given:
        raise ValueError(
            f"backend='naive' runs a whole stream, but this slice exports {len(pieces.exports)} states and imports "
            f"{pieces.num_slots - context.num_given}; use backend='torch', or one process"
        )
    ends = pieces.start + pieces.length - 1
    predecessor = list(range(-1, pieces.num_rows - 1))
    for start, parent, slot in zip(pieces.start.tolist(), pieces.parent.tolist(), pieces.slot.tolist(), strict=True):
        predecessor[start] = int(ends[parent]) if parent >= 0 else -2 - slot if slot >= 0 else -1
    o, states = naive_gated_delta_rule(
        *rows,
        predecessor=predecessor,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        initial_state=given,
    )
    finals = [states[int(ends[p])] for p in context.finals]
    _, _, v, _, _ = rows
    empty = v.new_zeros(0, v.shape[1], rows[1].shape[-1], v.shape[2])
    return o, torch.stack(finals) if finals else empty
