"""The matrices inside chunks: decays, Gram matrices and the unit-triangular inverse.

Letters: B batch (chunks x heads), C rows of a chunk, H value heads, Hk key heads, K key dim.

The rows of a chunk see each other along their paths: row i sees its ancestors j and itself. With G_i the sum of g over
what row i sees, the decay from j to i is D_ij = exp(G_i - G_j), zero where i does not see j.
"""

import torch
from torch import Tensor

_BASE = 16


def path_sums(g_NHC: Tensor, ancestors_NCC: Tensor) -> Tensor:
    """G [N, H, C]: sum of g over the rows each row sees."""
    return g_NHC @ ancestors_NCC.to(g_NHC.dtype).mT


def path_sums_backward(dG_NHC: Tensor, ancestors_NCC: Tensor) -> Tensor:
    """Gradient of g: sum of dG over the rows that see each row."""
    return dG_NHC @ ancestors_NCC.to(dG_NHC.dtype)


def decay_matrix(G_NHC: Tensor, ancestors_NCC: Tensor) -> Tensor:
    """D [N, H, C, C]. Exponents of unseen pairs are replaced before `exp`: they may be large and positive."""
    seen = ancestors_NCC[:, None]
    D = (G_NHC[..., :, None] - G_NHC[..., None, :]).masked_fill_(~seen, 0.0)
    return D.exp_().mul_(seen)


def unit_lower_inverse(A: Tensor) -> Tensor:
    """Inverse of I + A for strictly lower triangular A [B, C, C], by block forward substitution.

    Halves are inverted first, then the block below the diagonal is -T2 A21 T1; blocks of at most 16 rows are solved row
    by row. Sums of powers of A would need fewer steps, but A^32 overflows the precision for coherent keys.
    """
    C = A.shape[-1]
    if C <= _BASE:
        return _substitute(A)
    if C % _BASE == 0 and (C // _BASE) & (C // _BASE - 1) == 0:
        return _inverse_of_equal_blocks(A)
    half = _BASE
    while half * 2 < C:
        half *= 2
    T = torch.zeros_like(A)
    T[:, :half, :half] = unit_lower_inverse(A[:, :half, :half])
    T[:, half:, half:] = unit_lower_inverse(A[:, half:, half:])
    T[:, half:, :half] = -(T[:, half:, half:] @ (A[:, half:, :half] @ T[:, :half, :half]))
    return T


def _inverse_of_equal_blocks(A: Tensor) -> Tensor:
    """All blocks of a size at once; C is 16 times a power of two."""
    B, C, _ = A.shape
    size = _BASE
    T = torch.zeros(B, C, C, dtype=A.dtype, device=A.device)
    _diagonal(T, size, C // size).copy_(
        _substitute(_diagonal(A, size, C // size).reshape(-1, size, size)).view(B, -1, size, size)
    )
    while size < C:
        n = C // (2 * size)
        upper = _pairs(T, size, n, 0, 0).reshape(-1, size, size)
        lower = _pairs(T, size, n, 1, 1).reshape(-1, size, size)
        below = _pairs(A, size, n, 1, 0).reshape(-1, size, size)
        product = torch.bmm(lower, torch.bmm(below, upper))
        torch.neg(product.view(B, n, size, size), out=_pairs(T, size, n, 1, 0))
        size *= 2
    return T


def _diagonal(A: Tensor, size: int, n: int) -> Tensor:
    """The n diagonal blocks [B, n, size, size], a view."""
    return _pairs(A, size, n, 0, 0, step=size)


def _pairs(A: Tensor, size: int, n: int, row: int, col: int, step: int = 0) -> Tensor:
    """Blocks (row, col) of the n diagonal squares of two blocks each, [B, n, size, size], a view."""
    step = step or 2 * size
    b, r, c = A.stride()
    offset = A.storage_offset() + row * size * r + col * size * c
    return A.as_strided((A.shape[0], n, size, size), (b, step * (r + c), r, c), offset)


def _substitute(A: Tensor) -> Tensor:
    """Forward substitution, column by column: every solved row is taken out of all rows below it at once."""
    B, C, _ = A.shape
    T = torch.eye(C, dtype=A.dtype, device=A.device).expand(B, C, C).contiguous()
    for j in range(C - 1):
        T[:, j + 1 :, : j + 1].addcmul_(A[:, j + 1 :, j : j + 1], T[:, j : j + 1, : j + 1], value=-1)
    return T
