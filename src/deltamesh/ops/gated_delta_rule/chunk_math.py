"""The unit-triangular inverse of a chunk's system. Letters: B batch (chunks x heads), C rows of a chunk."""

import torch
from torch import Tensor

_BASE = 16


def unit_lower_inverse(A: Tensor, out: Tensor | None = None) -> Tensor:
    """Inverse of I + L by block forward substitution, where L is the part of A [B, C, C] below the diagonal.

    Diagonal blocks of at most 16 rows are solved row by row; two inverted blocks T1, T2 join into one with
    -T2 L21 T1 below the diagonal. Sums of powers of L would need fewer steps, but L^32 overflows the precision for
    coherent keys. Nothing on or above the diagonal of A is read.

    Example:
        >>> unit_lower_inverse(torch.tensor([[[9.0, 9.0], [0.5, 9.0]]]))
        tensor([[[ 1.0000,  0.0000],
                 [-0.5000,  1.0000]]])
    """
    C = A.shape[-1]
    T = torch.zeros_like(A) if out is None else out.zero_()
    if C <= _BASE:
        return T.copy_(_substitute(A))
    if C % _BASE == 0 and (C // _BASE) & (C // _BASE - 1) == 0:
        return _inverse_of_equal_blocks(A, T)
    half = _BASE
    while half * 2 < C:
        half *= 2
    first, second = unit_lower_inverse(A[:, :half, :half]), unit_lower_inverse(A[:, half:, half:])
    T[:, :half, :half] = first
    T[:, half:, half:] = second
    T[:, half:, :half] = -(second @ (A[:, half:, :half] @ first))
    return T


def _inverse_of_equal_blocks(A: Tensor, T: Tensor) -> Tensor:
    """All blocks of a size at once; C is 16 times a power of two."""
    B, C, _ = A.shape
    size = _BASE
    done = _substitute(_blocks(A, size, C // size, 0, 0, size).reshape(-1, size, size))
    _blocks(T, size, C // size, 0, 0, size).copy_(done.view(B, -1, size, size))
    while size < C:
        n = C // (2 * size)
        pairs = done.view(B, n, 2, size, size)
        first, second = (pairs[:, :, i].reshape(-1, size, size) for i in range(2))
        below = _blocks(A, size, n, 1, 0, 2 * size).reshape(-1, size, size)
        joint = torch.bmm(second, torch.bmm(below, first)).view(B, n, size, size)
        torch.neg(joint, out=_blocks(T, size, n, 1, 0, 2 * size))
        size *= 2
        done = _blocks(T, size, n, 0, 0, size).reshape(-1, size, size)
    return T


def _blocks(A: Tensor, size: int, n: int, row: int, col: int, step: int) -> Tensor:
    """Blocks [B, n, size, size] that start at (i step + row size, i step + col size), a view."""
    b, r, c = A.stride()
    offset = A.storage_offset() + row * size * r + col * size * c
    return A.as_strided((A.shape[0], n, size, size), (b, step * (r + c), r, c), offset)


def _substitute(A: Tensor) -> Tensor:
    """Row by row; at this size the library's triangular solve is plain forward substitution."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
    T: Tensor = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
    return T
