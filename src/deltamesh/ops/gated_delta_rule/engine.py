"""The gated delta rule on one slice, chunk by chunk, forward.

Letters: T rows of the slice, N chunks of a batch, C rows of a chunk, H value heads, Hk key heads, J value heads per key
head, K key dim, V value dim; B = N H. q and k below are normalised if asked for; scale is applied where q is used.

Inside a chunk that starts from state S, with D the decays along paths (chunk_math.py) and gamma_i = exp(G_i):

    T  = (I + diag(beta) (K K^T * D below the diagonal))^-1
    W  = T diag(beta) (V - gamma K S)                       what each row writes, [C, V]
    O  = scale gamma (Q S) + scale (Q K^T * D) W
    S' = gamma_e S + (D_e K)^T W                            after row e

The map from S to S' is affine. Its linear part M follows from the same formulas with S = I and V = 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.chunk_math import decay_matrix, path_sums, unit_lower_inverse
from deltamesh.ops.gated_delta_rule.naive import L2NORM_EPS
from deltamesh.ops.gated_delta_rule.schedule import ChunkBatch, Schedule
from deltamesh.ops.precision import full_precision_matmul

# Rows x value heads of a batch. On a CPU the operands of one batch should stay in the cache.
_CPU_BATCH = 64 * 16
_GPU_BATCH = 64 * 4096
# A smaller |beta| is replaced: the gradient of beta divides by its square. Writes of 1e-12 of a value are far below
# fp32's, 1e-20 below fp64's resolution.
_LEAST_BETA = {torch.float32: 1e-12, torch.float64: 1e-20}


@dataclass(kw_only=True, eq=False)
class Kept:
    """What the forward keeps for the backward, per batch number or per exit state.

    Attributes:
        solve: T diag(beta) [B, C, C].
        writes: W [B, C, V].
        states: [H, K, V].
    """

    solve: dict[int, Tensor] = field(default_factory=dict)
    writes: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Gates:
    """Decays and write strengths of a batch of chunks.

    Attributes:
        gamma: [N, H, C], zero at padding.
        D: [N, H, C, C].
        beta: [N, H, C].
    """

    gamma: Tensor
    D: Tensor
    beta: Tensor


class SliceEngine:
    """One slice, or a block of its heads; its methods are the phases between which a carrier exchanges states.

    Args:
        schedule: of the slice.
        q, k: [T, Hk, K], any strides.
        v: [T, H, V].
        g, beta: [T, H].
        scale: factor on q.
        use_qk_l2norm: normalise q and k.
        kept: filled by the forward, read by the backward.
        keep: whether a backward will come.
    """

    def __init__(
        self,
        schedule: Schedule,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        scale: float,
        use_qk_l2norm: bool,
        kept: Kept,
        keep: bool = True,
    ) -> None:
        self.schedule = schedule
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.scale, self.use_qk_l2norm, self.kept, self.keep = scale, use_qk_l2norm, kept, keep
        self.H, self.V = v.shape[1:]
        self.Hk, self.K = k.shape[1:]
        self.J = self.H // self.Hk
        self.state_shape = (self.H, self.K, self.V)
        self.dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        per_batch = _CPU_BATCH if v.device.type == "cpu" else _GPU_BATCH
        self.batches = schedule.batches(max(1, per_batch // self.H))

    # Phases

    def run_local(self, out: Tensor, given: Tensor) -> None:
        """Everything that needs no carried state; fills its rows of `out` [T, H, V].

        `given` is [num_given, H, K, V].
        """
        with self.precise():
            for number, batch in self.numbered(entering=False):
                self._forward(number, batch, out, given)

    def transitions(self) -> tuple[Tensor, Tensor]:
        """E [n_through, H, K, V] and M [n_through, H, K, K] of the exports whose path enters at a carried slot."""
        wanted = {self.schedule.exports[t] for t in self.schedule.through}
        uses: dict[int, int] = {}
        for _, batch in self.numbered(entering=True, exporting=True):
            for p in batch.parents or ():
                uses[p] = uses.get(p, 0) + 1
        wide: dict[int, Tensor] = {}  # [H, K, V + K]: E beside M
        with self.precise():
            for number, batch in self.numbered(entering=True, exporting=True):
                self._through(number, batch, wide)
                for p in batch.parents or ():
                    uses[p] -= 1
                    if not uses[p] and p not in wanted:
                        del wide[p]
        found = [wide[self.schedule.exports[t]] for t in self.schedule.through]
        both = torch.stack(found) if found else self._empty(0, self.H, self.K, self.V + self.K)
        return both[..., : self.V].contiguous(), both[..., self.V :].contiguous()

    def exported(self, through_states: Tensor) -> Tensor:
        """[n_exports, H, K, V]: true states of own exports, E of the through ones."""
        through = dict(zip(self.schedule.through, through_states, strict=True))
        states = [through[n] if n in through else self.kept.states[s] for n, s in enumerate(self.schedule.exports)]
        return torch.stack(states) if states else self._empty(0, self.H, self.K, self.V)

    def run_entering(self, out: Tensor, incoming: Tensor) -> None:
        """The rest, with the states of all slots [num_slots, H, K, V]."""
        with self.precise():
            for number, batch in self.numbered(entering=True):
                self._forward(number, batch, out, incoming)

    def finals(self) -> Tensor:
        """[n_finals, H, K, V]."""
        states = [self.kept.states[s] for s in self.schedule.finals]
        return torch.stack(states) if states else self._empty(0, self.H, self.K, self.V)

    # One batch of chunks

    def _forward(self, number: int, batch: ChunkBatch, out: Tensor, slots: Tensor) -> None:
        gates = self.gates(batch)
        qk, _ = self.load_qk(batch)
        C = batch.length
        gram = torch.bmm(qk, qk[:, C:].mT).view(batch.count, self.Hk, 2 * C, C)
        solve = self.kept.solve.get(number)
        if solve is None:
            solve = self._solve(gates, gram[:, :, C:])
            if self.keep:
                self.kept.solve[number] = solve
        v = self.load(batch, self.v).reshape(-1, C, self.V)
        P = self.attention(gates, gram[:, :, :C])
        if batch.has_state:
            S = self.parent_states(batch, slots)
            read = torch.bmm(self.per_value_head(qk, batch.count), S)
            gamma = gates.gamma.reshape(-1, C, 1)
            W = torch.bmm(solve, torch.addcmul(v, gamma, read[:, C:], value=-1))
            o = read[:, :C].mul_(gamma.mul(self.scale)).baddbmm_(P, W)
        else:
            S = None
            W = torch.bmm(solve, v)
            o = torch.bmm(P, W)
        self.store(batch, out, o.view(batch.count, self.H, C, self.V))
        k = self.per_value_head(qk[:, C:], batch.count) if batch.exits else qk
        self._exits(batch, gates, k, W, S, self.kept.states, through=False)
        if self.keep:
            self.kept.writes[number] = W

    def _through(self, number: int, batch: ChunkBatch, wide: dict[int, Tensor]) -> None:
        gates = self.gates(batch)
        k = self.load_k(batch)
        gram = torch.bmm(k, k.mT).view(batch.count, self.Hk, batch.length, batch.length)
        solve = self._solve(gates, gram)
        self.kept.solve[number] = solve
        k = self.per_value_head(k, batch.count)
        U = torch.zeros(len(k), batch.length, self.V + self.K, dtype=self.dtype, device=k.device)
        U[..., : self.V] = self.load(batch, self.v).reshape(-1, batch.length, self.V)
        gamma = gates.gamma.reshape(-1, batch.length, 1)
        if batch.parents is None:  # at its slot: E = 0, M = I
            S = torch.zeros(len(k), self.K, self.V + self.K, dtype=self.dtype, device=k.device)
            S[..., self.V :].diagonal(dim1=-2, dim2=-1).fill_(1)
        else:
            S = torch.stack([wide[p] for p in batch.parents]).view(-1, self.K, self.V + self.K)
        U.addcmul_(gamma, torch.bmm(k, S), value=-1)
        self._exits(batch, gates, k, torch.bmm(solve, U), S, wide, through=True)

    def _exits(
        self,
        batch: ChunkBatch,
        gates: Gates,
        k: Tensor,
        W: Tensor,
        S: Tensor | None,
        states: dict[int, Tensor],
        *,
        through: bool,
    ) -> None:
        """Adds the states after the exit rows to `states`."""
        for group in batch.exits:
            if through and not group.exporting:
                continue
            left = exit_decay(gates.D, group.at, group.position).reshape(-1, batch.length, 1)
            reached = torch.mul(W, left)
            if S is None:
                new = torch.bmm(k.mT, reached)
            else:
                decay = exit_decay(gates.gamma[..., None], group.at, group.position).reshape(-1, 1, 1)
                new = torch.mul(S, decay).baddbmm_(k.mT, reached)
            states.update(zip(group.states, new.view(batch.count, self.H, self.K, -1), strict=True))

    def _solve(self, gates: Gates, kk: Tensor) -> Tensor:
        """T diag(beta) [B, C, C] from K K^T [N, Hk, C, C]."""
        N, H, C = gates.beta.shape
        A = self.over_value_heads(gates.D, kk).mul_(gates.beta[..., None]).view(-1, C, C)
        A.diagonal(dim1=-2, dim2=-1).zero_()
        return unit_lower_inverse(A).mul_(gates.beta.reshape(N * H, 1, C))

    # Pieces shared with the backward

    def gates(self, batch: ChunkBatch) -> Gates:
        """Decays and write strengths of a batch."""
        g, beta = (self._gather(batch, x).to(self.dtype).transpose(1, 2) for x in (self.g, self.beta))
        G = path_sums(g, batch.ancestors)
        gamma = G.exp()
        if batch.valid is not None:
            gamma = gamma * batch.ancestors.diagonal(dim1=-2, dim2=-1)[:, None]
        least = _LEAST_BETA[self.dtype]
        return Gates(
            gamma=gamma,
            D=decay_matrix(G, batch.ancestors),
            beta=torch.where(beta.abs() < least, least, beta),
        )

    def attention(self, gates: Gates, qk: Tensor) -> Tensor:
        """scale (Q K^T * D) [B, C, C] from Q K^T [N, Hk, C, C]."""
        C = qk.shape[-1]
        return self.over_value_heads(gates.D, qk).mul_(self.scale).view(-1, C, C)

    def over_value_heads(self, x_NHCC: Tensor, gram: Tensor) -> Tensor:
        """x times the Gram matrix of each head's key head."""
        N, _, C, _ = gram.shape
        return (x_NHCC.view(N, self.Hk, self.J, C, C) * gram[:, :, None]).view(N, self.H, C, C)

    def per_value_head(self, x: Tensor, count: int) -> Tensor:
        """[N Hk, R, K] -> [N H, R, K]; copies inside the cache where value heads share key heads."""
        if self.J == 1:
            return x
        R, K = x.shape[1:]
        return x.view(count, self.Hk, 1, R, K).expand(-1, -1, self.J, -1, -1).reshape(-1, R, K)

    def over_key_heads(self, x: Tensor, count: int) -> Tensor:
        """[N H, R, K] -> [N Hk, R, K], summed over the value heads of each key head."""
        if self.J == 1:
            return x
        R, K = x.shape[1:]
        return x.view(count, self.Hk, self.J, R, K).sum(2).view(-1, R, K)

    def load(self, batch: ChunkBatch, x: Tensor) -> Tensor:
        """Rows of x [T, h, d] as [N, h, C, d] in the dtype of the computation; a view if possible."""
        return self._gather(batch, x).to(self.dtype).transpose(1, 2)

    def load_k(self, batch: ChunkBatch) -> Tensor:
        """k [N Hk, C, K], normalised if asked for."""
        k = self._buffer(batch.count, self.Hk, batch.length, self.K)
        self._normalise_into(k, batch, self.k)
        return k.view(-1, batch.length, self.K)

    def load_qk(self, batch: ChunkBatch) -> tuple[Tensor, Tensor | None]:
        """q above k [N Hk, 2 C, K], so that one product serves both, and what normalised them [N Hk, 2 C, 1]."""
        C = batch.length
        qk = self._buffer(batch.count, self.Hk, 2 * C, self.K)
        q_inverse = self._normalise_into(qk[:, :, :C], batch, self.q)
        k_inverse = self._normalise_into(qk[:, :, C:], batch, self.k)
        qk = qk.view(-1, 2 * C, self.K)
        if q_inverse is None or k_inverse is None:
            return qk, None
        return qk, torch.cat((q_inverse, k_inverse), 2).view(-1, 2 * C, 1)

    def _normalise_into(self, out: Tensor, batch: ChunkBatch, x: Tensor) -> Tensor | None:
        rows = self.load(batch, x)
        if not self.use_qk_l2norm:
            out.copy_(rows)
            return None
        inverse = torch.rsqrt((rows * rows).sum(-1, keepdim=True).add_(L2NORM_EPS))
        torch.mul(rows, inverse, out=out)
        return inverse

    def parent_states(self, batch: ChunkBatch, slots: Tensor) -> Tensor:
        """The states that the chunks start from, [B, K, V]."""
        if batch.slots is not None:
            found = [slots[s] for s in batch.slots]
        else:
            found = [self.kept.states[p] for p in batch.parents or ()]
        S = found[0] if len(found) == 1 else torch.stack(found)
        return S.reshape(-1, self.K, self.V)

    def store(self, batch: ChunkBatch, out: Tensor, x: Tensor) -> None:
        """Writes [N, h, C, d] to the rows of `out` [T, h, d]."""
        rows = x.transpose(1, 2)
        if batch.first_row >= 0:
            out[batch.first_row : batch.first_row + batch.length].copy_(rows[0])
            return
        rows = rows.reshape(-1, *rows.shape[2:]).to(out.dtype)
        if batch.valid is None:
            out.index_copy_(0, batch.rows, rows)
        else:
            out.index_copy_(0, batch.rows[batch.valid], rows[batch.valid])

    def _gather(self, batch: ChunkBatch, x: Tensor) -> Tensor:
        """Rows of x [T, ...] as [N, C, ...]."""
        if batch.first_row >= 0:
            return x[None, batch.first_row : batch.first_row + batch.length]
        return x.index_select(0, batch.rows).view(batch.count, batch.length, *x.shape[1:])

    def numbered(self, *, entering: bool, exporting: bool | None = None) -> Iterator[tuple[int, ChunkBatch]]:
        """Batches of a kind with their numbers, parents first."""
        for number, batch in enumerate(self.batches):
            if batch.entering == entering and (exporting is None or batch.exporting == exporting):
                yield number, batch

    def _empty(self, *shape: int) -> Tensor:
        assert 0 in shape, "only for tensors without elements"
        return self._buffer(*shape)

    def _buffer(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.v.device)

    @contextmanager
    def precise(self) -> Iterator[None]:
        """States and transitions are never multiplied in TF32."""
        if self.v.device.type == "cpu":  # fp32 products are exact fp32 here
            yield
        else:
            with full_precision_matmul():
                yield


def exit_decay(x: Tensor, at: int, position: Tensor) -> Tensor:
    """Row `position[n]` of x [N, H, C, ...] for each chunk n: [N, H, ...]."""
    if at >= 0:
        return x[:, :, at]
    return x[torch.arange(len(position), device=x.device), :, position]
