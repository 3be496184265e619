"""Rows of a slice as batches of chunks: loaded, normalised, spread over value heads, and stored.

Letters: T rows of the slice, N chunks of a batch, C rows of a chunk, H value heads, Hk key heads, J value heads per key
head, K key dim, V value dim; B = N H.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.memory import Workspace
from deltamesh.ops.gated_delta_rule.naive import L2NORM_EPS
from deltamesh.ops.gated_delta_rule.schedule import ChunkBatch


class SliceRows:
    """The rows of one slice, or of a block of its heads.

    Args:
        q, k: [T, Hk, K], any strides.
        v: [T, H, V].
        scale: factor on q.
        use_qk_l2norm: normalise q and k.
        buffer: for what lives as long as a batch.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, use_qk_l2norm: bool, buffer: Workspace
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.scale, self.use_qk_l2norm, self.buffer = scale, use_qk_l2norm, buffer
        self.H, self.V = v.shape[1:]
        self.Hk, self.K = k.shape[1:]
        self.J = self.H // self.Hk
        self.dtype = buffer.dtype

    def gram(self, qk: Tensor, batch: ChunkBatch) -> Tensor:
        """Q K^T above K K^T, [N, Hk, 2 C, C]."""
        C = batch.length
        gram = torch.bmm(qk, qk[:, C:].mT, out=self.buffer("gram", len(qk), 2 * C, C))
        return gram.view(batch.count, self.Hk, 2 * C, C)

    def over_value_heads(self, D: Tensor, gram: Tensor, out: Tensor) -> Tensor:
        """D [N, H, C, C] times the Gram matrix [N, Hk, C, C] of each head's key head, into `out` [B, C, C]."""
        N, Hk, C, _ = gram.shape
        shape = (N, Hk, self.J, C, C)
        torch.mul(D.view(shape), gram[:, :, None], out=out.view(shape))
        return out

    def per_value_head(self, x: Tensor, batch: ChunkBatch, buffer: str = "many") -> Tensor:
        """[N Hk, R, K] -> [N H, R, K]; where value heads share key heads, a copy that stays in the cache."""
        if self.J == 1:
            return x
        R, K = x.shape[1:]
        many = self.buffer(buffer, batch.count, self.Hk, self.J, R, K)
        return many.copy_(x.view(batch.count, self.Hk, 1, R, K)).view(-1, R, K)

    def over_key_heads(self, x: Tensor, batch: ChunkBatch) -> Tensor:
        """[N H, R, K] -> [N Hk, R, K], summed over the value heads of each key head."""
        if self.J == 1:
            return x
        R, K = x.shape[1:]
        return x.view(batch.count, self.Hk, self.J, R, K).sum(2).view(-1, R, K)

    def load(self, batch: ChunkBatch, x: Tensor) -> Tensor:
        """Rows of x [T, h, d] as [N, h, C, d] in the dtype of the computation; a view if possible."""
        if batch.first_row >= 0:
            rows = x[batch.first_row : batch.first_row + batch.count * batch.length]
        else:
            rows = x.index_select(0, batch.rows)
        return rows.view(batch.count, batch.length, *x.shape[1:]).to(self.dtype).transpose(1, 2)

    def load_k(self, batch: ChunkBatch, buffer: str = "qk") -> Tensor:
        """k [N Hk, C, K], normalised if asked for."""
        k = self.buffer(buffer, batch.count, self.Hk, batch.length, self.K)
        self._normalise_into(k, batch, self.k, 1.0)
        return k.view(-1, batch.length, self.K)

    def load_q(self, batch: ChunkBatch) -> Tensor:
        """Scaled q [N Hk, C, K], normalised if asked for."""
        q = self.buffer("q", batch.count, self.Hk, batch.length, self.K)
        self._normalise_into(q, batch, self.q, self.scale)
        return q.view(-1, batch.length, self.K)

    def load_v(self, batch: ChunkBatch) -> Tensor:
        """v [N, H, C, V]."""
        return self.load(batch, self.v)

    def load_qk(self, batch: ChunkBatch) -> tuple[Tensor, Tensor | None]:
        """Scaled q above k [N Hk, 2 C, K], so that one product serves both, and the norms' inverses [N Hk, 2 C, 1]."""
        C = batch.length
        qk = self.buffer("qk", batch.count, self.Hk, 2 * C, self.K)
        q_inverse = self._normalise_into(qk[:, :, :C], batch, self.q, self.scale)
        k_inverse = self._normalise_into(qk[:, :, C:], batch, self.k, 1.0)
        qk = qk.view(-1, 2 * C, self.K)
        if q_inverse is None or k_inverse is None:
            return qk, None
        return qk, torch.cat((q_inverse, k_inverse), 2).view(-1, 2 * C, 1)

    def _normalise_into(self, out: Tensor, batch: ChunkBatch, x: Tensor, scale: float) -> Tensor | None:
        rows = self.load(batch, x)
        if not self.use_qk_l2norm:
            torch.mul(rows, scale, out=out)
            return None
        inverse: Tensor = torch.linalg.vecdot(rows, rows)[..., None].add_(L2NORM_EPS).rsqrt_()
        torch.mul(rows, inverse if scale == 1 else inverse * scale, out=out)
        return inverse

    @contextmanager
    def rows_of(self, batch: ChunkBatch, out: Tensor) -> Iterator[Tensor]:
        """A place [N, h, C, d] to write the batch's rows of `out` [T, h, d] to; straight into it if possible."""
        if batch.first_row >= 0:
            rows = out[batch.first_row : batch.first_row + batch.count * batch.length]
            yield rows.unflatten(0, (batch.count, batch.length)).transpose(1, 2)
            return
        h, d = out.shape[1:]
        place = self.buffer("rows", batch.count, h, batch.length, d)
        yield place
        self.store(batch, out, place)

    def store(self, batch: ChunkBatch, out: Tensor, x: Tensor) -> None:
        """Writes x [N, h, C, d] to the rows of `out` [T, h, d]."""
        rows = x.view(batch.count, -1, *x.shape[-2:]).transpose(1, 2)
        if batch.first_row >= 0:
            place = out[batch.first_row : batch.first_row + batch.count * batch.length]
            place.unflatten(0, (batch.count, batch.length)).copy_(rows)
            return
        rows = rows.reshape(-1, *rows.shape[2:]).to(out.dtype)
        if batch.valid is None:
            out.index_copy_(0, batch.rows, rows)
        else:
            out.index_copy_(0, batch.rows[batch.valid], rows[batch.valid])
