"""The parts of the gated delta rule that need no other chunk, by flash-linear-attention's kernels.

Every piece is one sequence of a packed batch, so its chunks start at its first row. The library keeps decays in base 2
and everything else in the type of the rows; its triangular solve is a block forward substitution in fp32.

Letters: T rows, H value heads, Hk key heads, K key dim, V value dim, N chunks, C chunk length.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.cuda.versions import check_fla_version
from deltamesh.ops.gated_delta_rule.cuda.walks import CHUNK_ROWS
from deltamesh.ops.gated_delta_rule.naive import L2NORM_EPS
from deltamesh.plan.pieces import Ints

check_fla_version()  # before the imports below, so that a missing library is reported with the command that adds it

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # its layers, which are imported too, ask for flash-attn
    import triton
    import triton.language as tl
    from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
    from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o
    from fla.ops.gated_delta_rule import chunk_fwd
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

if triton.knobs.language.fp32_default is not None:
    # The library fixes its triangular solve to TF32 where a device has it. Who sets TRITON_F32_DEFAULT=ieee means all
    # products of fp32 numbers.
    chunk_fwd.SOLVE_TRIL_DOT_PRECISION = tl.constexpr(triton.knobs.language.fp32_default)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedChunks:
    """The chunks of a slice.

    Attributes:
        cu_seqlens: int32 [pieces + 1], first row of each piece and the end.
        chunk_indices: int32 [N, 2], piece and number within the piece of each chunk.
    """

    cu_seqlens: Tensor
    chunk_indices: Tensor

    @property
    def count(self) -> int:
        """Chunks N."""
        return self.chunk_indices.shape[0]

    @staticmethod
    def build(start: Ints, length: Ints, device: torch.device) -> "PackedChunks":
        """Chunks of pieces that tile the rows."""
        count = -(-length // CHUNK_ROWS)
        piece = np.repeat(np.arange(len(length)), count)
        number = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
        edges = np.append(start, start[-1] + length[-1] if len(start) else 0)
        return PackedChunks(
            cu_seqlens=torch.from_numpy(edges.astype(np.int32)).to(device),
            chunk_indices=torch.from_numpy(np.stack((piece, number), 1).astype(np.int32)).to(device),
        )


@dataclass(kw_only=True, eq=False)
class Factors:
    """What the forward keeps for the backward; all tensors have a leading dim of 1, as the library's kernels want.

    Attributes:
        q, k: [1, T, Hk, K], normalised if asked for.
        v: [1, T, H, V].
        g: fp32 [1, T, H], decays summed inside each chunk, base 2.
        beta: [1, T, H].
        A: [1, T, H, C], the inverse of the unit lower triangular matrix of each chunk.
        q_rstd, k_rstd: what normalised q and k, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None


def factors(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, use_qk_l2norm: bool, chunks: PackedChunks
) -> tuple[Factors, Tensor, Tensor]:
    """Solves the triangular system of every chunk.

    Args:
        q, k: [T, Hk, K]. v: [T, H, V]. g, beta: [T, H]. At least one row.
        use_qk_l2norm: normalise q and k.
        chunks: of the slice.

    Returns:
        The factors, w [1, T, H, K] and u [1, T, H, V].
    """
    q, k, v, g, beta = (x.contiguous()[None] for x in (q.to(v.dtype), k.to(v.dtype), v, g, beta))
    q_rstd = k_rstd = None
    if use_qk_l2norm:
        q, q_rstd = l2norm_fwd(q, L2NORM_EPS)
        k, k_rstd = l2norm_fwd(k, L2NORM_EPS)
    g = chunk_local_cumsum(
        g, chunk_size=CHUNK_ROWS, scale=RCP_LN2, cu_seqlens=chunks.cu_seqlens, chunk_indices=chunks.chunk_indices
    )
    w, u, A = chunk_gated_delta_rule_fwd_intra(
        k=k, v=v, g=g, beta=beta, cu_seqlens=chunks.cu_seqlens, chunk_indices=chunks.chunk_indices
    )
    return Factors(q=q, k=k, v=v, g=g, beta=beta, A=A, q_rstd=q_rstd, k_rstd=k_rstd), w, u


def recompute_writes(f: Factors, chunks: PackedChunks) -> tuple[Tensor, Tensor]:
    """w [1, T, H, K] and u [1, T, H, V] again."""
    w, u = recompute_w_u_fwd(
        k=f.k,
        v=f.v,
        beta=f.beta,
        A=f.A,
        g=f.g,
        cu_seqlens=chunks.cu_seqlens,
        chunk_indices=chunks.chunk_indices,
    )
    return w, u


def outputs(f: Factors, h: Tensor, v_new: Tensor, *, scale: float, chunks: PackedChunks) -> Tensor:
    """[T, H, V] from the state at the start of each chunk, h [1, N, H, K, V], and what its rows write."""
    o: Tensor = chunk_fwd_o(
        q=f.q,
        k=f.k,
        v=v_new,
        h=h,
        g=f.g,
        scale=scale,
        cu_seqlens=chunks.cu_seqlens,
        chunk_indices=chunks.chunk_indices,
    )
    return o[0]


def local_write_gradient(f: Factors, do: Tensor, *, scale: float, chunks: PackedChunks) -> Tensor:
    """The gradient of v_new through the outputs of the same chunk, [1, T, H, V]."""
    dv: Tensor = chunk_bwd_dv_local(
        q=f.q,
        k=f.k,
        g=f.g,
        do=do,
        scale=scale,
        cu_seqlens=chunks.cu_seqlens,
        chunk_indices=chunks.chunk_indices,
    )
    return dv


def input_gradients(
    f: Factors,
    *,
    w: Tensor,
    h: Tensor,
    v_new: Tensor,
    do: Tensor,
    dh: Tensor,
    dv_new: Tensor,
    scale: float,
    chunks: PackedChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k [T, Hk, K], v [T, H, V], g and beta [T, H].

    Args:
        f: of the forward.
        w: from `recompute_writes`.
        h, dh: [1, N, H, K, V], the state at the start and the gradient of the state at the end of each chunk.
        v_new, dv_new: [1, T, H, V], what each row writes and its gradient.
        do: [1, T, H, V].
        scale: factor on q.
        chunks: of the slice.
    """
    cu_seqlens, chunk_indices = chunks.cu_seqlens, chunks.chunk_indices
    dq, dk, dw, dg = chunk_bwd_dqkwg(
        q=f.q,
        k=f.k,
        v=v_new,
        w=w,
        g=f.g,
        h=h,
        dv=dv_new,
        do=do,
        dh=dh,
        scale=scale,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    dk_solve, dv, dbeta, dg_solve = prepare_wy_repr_bwd(
        k=f.k,
        v=f.v,
        beta=f.beta,
        g=f.g,
        A=f.A,
        dw=dw,
        du=dv_new,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    dk.add_(dk_solve)
    dg.add_(dg_solve)
    dg = chunk_local_cumsum(dg, chunk_size=CHUNK_ROWS, reverse=True, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    if f.q_rstd is not None:
        dq = l2norm_bwd(f.q, f.q_rstd, dq)
        dk = l2norm_bwd(f.k, f.k_rstd, dk)
    return dq[0], dk[0], dv[0], dg[0], dbeta[0]
