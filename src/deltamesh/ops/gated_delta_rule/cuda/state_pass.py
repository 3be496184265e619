# mypy: disable-error-code="no-untyped-def"
"""The pass over the states of a forest of pieces, forward and backward, as Triton kernels.

One program owns a job (see walks.py), a value head and a block of value columns: no atomics, and the same sums in the
same order every time. Per chunk of 64 rows, with w and u from the solved triangular system, G the decays inside the
chunk (base 2, as flash-linear-attention keeps them), S the state at its start and dS the gradient at its end:

    W = u - w S           S' = 2^G_last S + K^T (2^(G_last - G) W)
    dW = dO-part + 2^(G_last - G) K dS        dS' = 2^G_last dS + scale (2^G Q)^T dO - w^T dW

Transitions ride along: the columns V..V+K-1 of a "through" job start from the identity and write nothing (u = 0), so
they end as M beside the E of columns 0..V-1. Their products are fp32 without TF32 whatever the rows' type is.

Letters: T rows, H value heads, Hk key heads, K key dim, V value dim, N chunks, C chunk length, B block of columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltamesh.ops.gated_delta_rule.cuda.tables import BackwardTables, ForwardTables
from deltamesh.ops.gated_delta_rule.cuda.walks import CHUNK_ROWS

# ---------------------------------------------------------------- forward


@triton.jit
def _dot_exact(a, b):
    """a (of the rows' type) times b (fp32), with the error of an fp32 product.

    A bf16 number times the three bf16 parts of an fp32 number is exact in fp32, so tensor cores can do it without TF32.
    """
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))
    else:
        product = tl.dot(a.to(tl.float32), b, input_precision="ieee")
    return product


@triton.jit
def _forward_job(
    job,
    i_h,
    i_b,
    k,
    w,
    u,
    g,
    h,
    v_new,
    states,
    ranges,
    visits,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    B: tl.constexpr,
    THROUGH: tl.constexpr,
):
    COLUMNS: tl.constexpr = V + K if THROUGH else V
    o_k = tl.arange(0, BK)
    o_v = i_b * B + tl.arange(0, B)
    m_k = o_k < K
    m_v = o_v < V
    o_state = o_k[:, None] * COLUMNS + o_v[None, :]
    m_state = m_k[:, None] & (o_v < COLUMNS)[None, :]
    i_hk = i_h // (H // HK)
    b_s = tl.zeros([BK, B], dtype=tl.float32)
    for i_visit in range(tl.load(ranges + 2 * job), tl.load(ranges + 2 * job + 1)):
        visit = visits + i_visit * 5
        row = tl.load(visit).to(tl.int64)
        end = tl.load(visit + 1).to(tl.int64)
        chunk = tl.load(visit + 2).to(tl.int64)
        source = tl.load(visit + 3).to(tl.int64)
        target = tl.load(visit + 4).to(tl.int64)
        if source >= 0:
            tl.debug_barrier()  # other threads of this program may have stored it
            b_s = tl.load(states + (source * H + i_h) * (K * COLUMNS) + o_state, mask=m_state, other=0.0)
        if source == -1:
            if THROUGH:
                b_s = tl.where(o_k[:, None] + V == o_v[None, :], 1.0, 0.0)
            else:
                b_s = tl.zeros([BK, B], dtype=tl.float32)
        for i_chunk in range(tl.cdiv(end - row, C)):
            o_t = row + i_chunk * C + tl.arange(0, C)
            m_t = o_t < end
            last = tl.minimum(row + i_chunk * C + C, end) - 1
            b_w = tl.load(w + (o_t[:, None] * H + i_h) * K + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
            b_u = tl.load(u + (o_t[:, None] * H + i_h) * V + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
            b_k = tl.load(
                k + (o_t[None, :] * HK + i_hk) * K + o_k[:, None], mask=m_k[:, None] & m_t[None, :], other=0.0
            )
            b_g = tl.load(g + o_t * H + i_h, mask=m_t, other=0.0)
            g_last = tl.load(g + last * H + i_h)
            if THROUGH:
                b_v = b_u.to(tl.float32) - _dot_exact(b_w, b_s)
            else:
                p_h = h + ((chunk + i_chunk) * H + i_h) * (K * V) + o_state
                tl.store(p_h, b_s.to(h.dtype.element_ty), mask=m_state)
                b_v = b_u.to(tl.float32) - tl.dot(b_w, b_s.to(b_w.dtype), input_precision="ieee")
                p_v = v_new + (o_t[:, None] * H + i_h) * V + o_v[None, :]
                tl.store(p_v, b_v.to(v_new.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])
            b_v *= tl.where(m_t, tl.exp2(tl.where(m_t, g_last - b_g, 0.0)), 0.0)[:, None]
            b_s *= tl.exp2(g_last)
            if THROUGH:
                b_s += _dot_exact(b_k, b_v)
            else:
                b_s += tl.dot(b_k, b_v.to(b_k.dtype), input_precision="ieee")
        if target >= 0:
            tl.store(states + (target * H + i_h) * (K * COLUMNS) + o_state, b_s, mask=m_state)


@triton.jit(do_not_specialize=["first_job", "num_jobs", "first_through"])
def _forward_kernel(
    k,
    w,
    u,
    g,
    h,
    v_new,
    states,
    wide_states,
    ranges,
    visits,
    through_ranges,
    through_visits,
    first_job,
    num_jobs,
    first_through,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    B: tl.constexpr,
    HAS_THROUGH: tl.constexpr,
):
    i, i_h = tl.program_id(0), tl.program_id(1)
    NB: tl.constexpr = (V + B - 1) // B
    if HAS_THROUGH:
        NB_WIDE: tl.constexpr = (V + K + B - 1) // B
        if i < num_jobs * NB:
            _forward_job(
                first_job + i // NB, i_h, i % NB, k, w, u, g, h, v_new, states, ranges, visits,
                H, HK, K, V, C, BK, B, False,
            )  # fmt: skip
        else:
            i -= num_jobs * NB
            _forward_job(
                first_through + i // NB_WIDE, i_h, i % NB_WIDE, k, w, u, g, h, v_new, wide_states, through_ranges,
                through_visits, H, HK, K, V, C, BK, B, True,
            )  # fmt: skip
    else:
        _forward_job(
            first_job + i // NB, i_h, i % NB, k, w, u, g, h, v_new, states, ranges, visits,
            H, HK, K, V, C, BK, B, False,
        )  # fmt: skip


def state_pass(
    tables: ForwardTables,
    *,
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    h: Tensor,
    v_new: Tensor,
    states: Tensor,
    through: ForwardTables | None = None,
    wide_states: Tensor | None = None,
) -> None:
    """Walks the jobs forward. One launch per wave, for own and through jobs together.

    Args:
        tables: jobs whose chunk states are wanted.
        k: [T, Hk, K]. w: [T, H, K]. u: [T, H, V], all of one dtype.
        g: fp32 [T, H], decays summed inside each chunk, base 2.
        h: [N, H, K, V], filled: the state at the start of each chunk visited.
        v_new: [T, H, V], filled: what each row visited writes.
        states: fp32 [tables.num_states, H, K, V]; given ones are read, saved ones filled.
        through: jobs of which only the end states are wanted, from zero and from the identity.
        wide_states: fp32 [through.num_states, H, K, V + K], filled: E beside M.
    """
    _require_contiguous(k=k, w=w, u=u, g=g, h=h, v_new=v_new, states=states)
    num_heads, V = u.shape[1:]
    Hk, K = k.shape[1:]
    BK, B = _blocks(K, V)
    if through is None or wide_states is None:
        through, wide_states = None, states
    through_waves = () if through is None else through.waves
    for n in range(max(len(tables.waves), len(through_waves))):
        first, count = tables.waves[n] if n < len(tables.waves) else (0, 0)
        first_through, count_through = through_waves[n] if n < len(through_waves) else (0, 0)
        programs = count * triton.cdiv(V, B) + count_through * triton.cdiv(V + K, B)
        other = tables if through is None or count_through == 0 else through
        _forward_kernel[(programs, num_heads)](
            k,
            w,
            u,
            g,
            h,
            v_new,
            states,
            wide_states,
            tables.ranges,
            tables.visits,
            other.ranges,
            other.visits,
            first,
            count,
            first_through,
            H=num_heads,
            HK=Hk,
            K=K,
            V=V,
            C=CHUNK_ROWS,
            BK=BK,
            B=B,
            HAS_THROUGH=count_through > 0,
            num_warps=_warps(BK, k.dtype, has_through=count_through > 0),
            num_stages=1 if k.dtype == torch.float32 else 2,
        )


# ---------------------------------------------------------------- backward


@triton.jit(do_not_specialize=["first_job", "scale"])
def _backward_kernel(
    q,
    k,
    w,
    g,
    do,
    dv,
    dh,
    dv_new,
    gradients,
    ranges,
    forward_visits,
    backward_visits,
    added,
    scale,
    first_job,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    B: tl.constexpr,
):
    i, i_h = tl.program_id(0), tl.program_id(1)
    NB: tl.constexpr = (V + B - 1) // B
    job, i_b = first_job + i // NB, i % NB
    i_hk = i_h // (H // HK)
    o_k = tl.arange(0, BK)
    o_v = i_b * B + tl.arange(0, B)
    m_k = o_k < K
    m_v = o_v < V
    o_state = o_k[:, None] * V + o_v[None, :]
    m_state = m_k[:, None] & m_v[None, :]
    b_ds = tl.zeros([BK, B], dtype=tl.float32)
    for i_visit in range(tl.load(ranges + 2 * job + 1) - 1, tl.load(ranges + 2 * job) - 1, -1):
        row = tl.load(forward_visits + i_visit * 5).to(tl.int64)
        end = tl.load(forward_visits + i_visit * 5 + 1).to(tl.int64)
        chunk = tl.load(forward_visits + i_visit * 5 + 2).to(tl.int64)
        visit = backward_visits + i_visit * 5
        held = tl.load(visit)
        target = tl.load(visit + 3).to(tl.int64)
        m_written = o_v < V * tl.load(visit + 4)  # as `m_v`, or nothing where chunks are only passed through
        b_ds = tl.where(held > 0, b_ds, 0.0)
        tl.debug_barrier()  # other threads of this program may have stored what is added now
        for i_added in range(tl.load(visit + 1), tl.load(visit + 2)):
            number = tl.load(added + i_added).to(tl.int64)
            b_ds += tl.load(gradients + (number * H + i_h) * (K * V) + o_state, mask=m_state, other=0.0)
        num_chunks = tl.cdiv(end - row, C)
        for i_back in range(num_chunks):
            i_chunk = num_chunks - 1 - i_back
            o_t = row + i_chunk * C + tl.arange(0, C)
            m_t = o_t < end
            last = tl.minimum(row + i_chunk * C + C, end) - 1
            p_dh = dh + ((chunk + i_chunk) * H + i_h) * (K * V) + o_state
            tl.store(p_dh, b_ds.to(dh.dtype.element_ty), mask=m_k[:, None] & m_written[None, :])
            m_tv = m_t[:, None] & m_v[None, :]
            m_kt = m_k[:, None] & m_t[None, :]
            b_k = tl.load(
                k + (o_t[:, None] * HK + i_hk) * K + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0
            )
            b_q = tl.load(q + (o_t[None, :] * HK + i_hk) * K + o_k[:, None], mask=m_kt, other=0.0)
            b_w = tl.load(w + (o_t[None, :] * H + i_h) * K + o_k[:, None], mask=m_kt, other=0.0)
            b_do = tl.load(do + (o_t[:, None] * H + i_h) * V + o_v[None, :], mask=m_tv, other=0.0)
            b_dv = tl.load(dv + (o_t[:, None] * H + i_h) * V + o_v[None, :], mask=m_tv, other=0.0).to(tl.float32)
            b_g = tl.load(g + o_t * H + i_h, mask=m_t, other=0.0)
            g_last = tl.load(g + last * H + i_h)
            b_left = tl.where(m_t, tl.exp2(tl.where(m_t, g_last - b_g, 0.0)), 0.0)
            b_dv += tl.dot(b_k, b_ds.to(b_k.dtype), input_precision="ieee") * b_left[:, None]
            tl.store(
                dv_new + (o_t[:, None] * H + i_h) * V + o_v[None, :],
                b_dv.to(dv_new.dtype.element_ty),
                mask=m_t[:, None] & m_written[None, :],
            )
            b_qg = (b_q.to(tl.float32) * (tl.exp2(b_g) * scale)[None, :]).to(b_do.dtype)
            b_ds *= tl.exp2(g_last)
            b_ds += tl.dot(b_qg, b_do, input_precision="ieee")
            b_ds -= tl.dot(b_w, b_dv.to(b_w.dtype), input_precision="ieee")
        if target >= 0:
            tl.store(gradients + (target * H + i_h) * (K * V) + o_state, b_ds, mask=m_state)


def state_pass_backward(
    tables: ForwardTables,
    backward: BackwardTables,
    *,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    g: Tensor,
    do: Tensor,
    dv: Tensor,
    dh: Tensor,
    dv_new: Tensor,
    gradients: Tensor,
    scale: float,
) -> None:
    """Walks the jobs in reverse, last wave first.

    Args:
        tables, backward: of the same jobs.
        q, k: [T, Hk, K]. w: [T, H, K]. do: [T, H, V], all of one dtype.
        g: fp32 [T, H], as in `state_pass`.
        dv: [T, H, V], the part of the gradient of `v_new` that comes through outputs of the same chunk.
        dh: [N, H, K, V], any type, filled: the gradient of the state at the end of each chunk.
        dv_new: [T, H, V], filled: the whole gradient of `v_new`. Only visits marked as written fill `dh` and `dv_new`.
        gradients: fp32 [n, H, K, V], gradients of states in memory, read and filled.
        scale: factor on q.
    """
    _require_contiguous(q=q, k=k, w=w, g=g, do=do, dv=dv, dh=dh, dv_new=dv_new, gradients=gradients)
    num_heads, V = do.shape[1:]
    Hk, K = k.shape[1:]
    BK, B = _blocks(K, V)
    for first, count in reversed(tables.waves):
        _backward_kernel[(count * triton.cdiv(V, B), num_heads)](
            q,
            k,
            w,
            g,
            do,
            dv,
            dh,
            dv_new,
            gradients,
            tables.ranges,
            tables.visits,
            backward.visits,
            backward.added,
            scale,
            first,
            H=num_heads,
            HK=Hk,
            K=K,
            V=V,
            C=CHUNK_ROWS,
            BK=BK,
            B=B,
            num_warps=_warps(BK, k.dtype, has_through=False),
            num_stages=1 if k.dtype == torch.float32 else 2,
        )


def programs_per_job(num_heads: int, key_dim: int, value_dim: int) -> int:
    """Programs that share the chunks of one job."""
    return num_heads * int(triton.cdiv(value_dim, _blocks(key_dim, value_dim)[1]))


def _blocks(K: int, V: int) -> tuple[int, int]:
    """Rows and columns of a program's block of the state. A dot needs 16 of each."""
    if K > 256:
        raise ValueError(f"key dim {K} is too large for the state pass, which holds all key rows; use K <= 256")
    return max(16, triton.next_power_of_2(K)), 32 if V >= 32 else 16


def _warps(BK: int, dtype: torch.dtype, *, has_through: bool) -> int:
    """As few as hold the block without spilling registers: seen in what ptxas reports for sm_90."""
    return 8 if BK > 128 or has_through or dtype == torch.float32 else 4


def _require_contiguous(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        assert x.is_contiguous(), f"{name} must be contiguous: the kernels compute its offsets from its shape"
