"""The gated delta rule on one slice, chunk by chunk, forward.

Letters: T rows of the slice, N chunks of a batch, C rows of a chunk, H value heads, Hk key heads, J value heads per key
head, K key dim, V value dim; B = N H. Below, q and k are normalised if asked for, and q is scaled.

Inside a chunk that starts from state S, with G_i the sum of g over what row i sees (its ancestors and itself),
gamma_i = exp(G_i), and the decays D_ij = exp(G_i - G_j) where row i sees row j, else 0:

    T  = (I + diag(beta) (K K^T * D below the diagonal))^-1
    W  = T diag(beta) (V - gamma K S)                       what each row writes, [C, V]
    O  = gamma (Q S) + (Q K^T * D) W
    S' = gamma_e S + (D_e K)^T W                            after row e

The map from S to S' is affine. Its linear part M follows from the same formulas with S = I and V = 0.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.chunk_math import unit_lower_inverse
from deltamesh.ops.gated_delta_rule.gates import Gates, GateTable
from deltamesh.ops.gated_delta_rule.memory import Arena, StatePool, Workspace, fresh
from deltamesh.ops.gated_delta_rule.naive import L2NORM_EPS
from deltamesh.ops.gated_delta_rule.schedule import ChunkBatch, ExitGroup, Run, Schedule
from deltamesh.ops.precision import full_precision_matmul

# Rows x value heads of a batch. On a CPU the operands of one batch should stay in the cache.
_CPU_BATCH = 64 * 16
_GPU_BATCH = 64 * 4096
# As many batches of a chain have their state-independent work done together: fewer, larger operations.
_BATCHES_PER_RUN = 2


@dataclass(kw_only=True, eq=False)
class Kept:
    """What the forward keeps for the backward, per run or per exit state.

    Attributes:
        solve: T diag(beta) [B, C, C].
        writes: W [B, C, V].
        states: [H, K, V].
    """

    solve: dict[int, Tensor] = field(default_factory=dict)
    writes: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)

    def flatten(self) -> tuple[Any, list[Tensor]]:
        """What `restore` needs beside the tensors, and the tensors, which activation checkpointing may drop."""
        parts = (self.solve, self.writes, self.states)
        return tuple(tuple(part) for part in parts), [x for part in parts for x in part.values()]

    @staticmethod
    def restore(form: Any, tensors: Sequence[Tensor]) -> "Kept":
        """The inverse of `flatten`."""
        found = iter(tensors)
        solve, writes, states = ({key: next(found) for key in keys} for keys in form)
        return Kept(solve=solve, writes=writes, states=states)


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
        backward: whether this is the engine of a backward.
        workspace: of another engine of this slice, to share; two of them never work at the same time.
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
        backward: bool = False,
        workspace: Workspace | None = None,
    ) -> None:
        self.schedule = schedule
        self.q, self.k, self.v = q, k, v
        self.scale, self.use_qk_l2norm, self.kept, self.keep = scale, use_qk_l2norm, kept, keep
        self.H, self.V = v.shape[1:]
        self.Hk, self.K = k.shape[1:]
        self.J = self.H // self.Hk
        self.state_shape = (self.H, self.K, self.V)
        self.device = v.device
        self.dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        per_batch = _CPU_BATCH if v.device.type == "cpu" else _GPU_BATCH
        max_rows = max(1, per_batch // self.H)
        self.runs = schedule.runs(max_rows, _BATCHES_PER_RUN * max_rows)
        self.gates = GateTable([run.whole for run in self.runs], g, beta, self.dtype, backward=backward)
        self.buffer = self.workspace = Workspace(self.dtype, self.device) if workspace is None else workspace
        # States that are not kept, and what makes them.
        self._producer = {
            group.states[0]: (index, member, group)
            for index, run in enumerate(self.runs)
            for member in run.members
            for group in member.batch.exits
            if member.batch.count == 1 and group.states[0] in schedule.passing
        }
        if keep and not backward:
            padded = sum(run.whole.count * run.whole.length for run in self.runs) * self.H
            squares = sum(run.whole.count * run.whole.length**2 for run in self.runs) * self.H
            states = (schedule.num_states - len(self._producer)) * math.prod(self.state_shape)
            self._arena = Arena(padded * self.V + squares + states, self.dtype, self.device)
        self.pool = StatePool(self.state_shape, self.dtype, self.device)
        self._uses = list(schedule.uses)
        self._asked = {*schedule.exports, *schedule.finals}

    # Phases

    def run_local(self, out: Tensor, given: Tensor, *, exporting: bool | None = None) -> None:
        """Everything that needs no carried state; fills its rows of `out` [T, H, V].

        `given` is [num_given, H, K, V]. With `exporting`, only what stands above an export, or only the rest, after it.
        """
        with self.precise():
            for index, run in self.numbered(entering=False, exporting=exporting):
                self._forward(index, run, out, given)

    def prepare_entering(self) -> None:
        """The part of `run_entering` that needs no state: the systems of its chunks are solved."""
        with self.precise():
            for index, run in self.numbered(entering=True):
                self._solve_from(index, self.load_k(run.whole), self._decays(index))

    def transitions(self) -> tuple[Tensor, Tensor]:
        """E [n_through, H, K, V] and M [n_through, H, K, K] of the exports whose path enters at a carried slot."""
        wanted = {self.schedule.exports[t] for t in self.schedule.through}
        uses: dict[int, int] = {}
        for _, run in self.numbered(entering=True, exporting=True):
            for p in run.parents:
                uses[p] = uses.get(p, 0) + 1
        wide: dict[int, Tensor] = {}  # [H, K, V + K]: E beside M
        with self.precise():
            for index, run in self.numbered(entering=True, exporting=True):
                self._through(index, run, wide)
                for p in run.parents:
                    uses[p] -= 1
                    if not uses[p] and p not in wanted:
                        del wide[p]
        found = [wide[self.schedule.exports[t]] for t in self.schedule.through]
        both = self._stack(found, self.H, self.K, self.V + self.K)
        return both[..., : self.V].contiguous(), both[..., self.V :].contiguous()

    def exported(self, through_states: Tensor) -> Tensor:
        """[n_exports, H, K, V]: true states of own exports, E of the through ones."""
        through = dict(zip(self.schedule.through, through_states, strict=True))
        states = [through[n] if n in through else self.kept.states[s] for n, s in enumerate(self.schedule.exports)]
        return self._stack(states, *self.state_shape)

    def export_states(self, exports: Sequence[int]) -> Tensor:
        """[n, H, K, V]: true states of some exports, by position, once what stands above them has run."""
        return self._stack([self.kept.states[self.schedule.exports[n]] for n in exports], *self.state_shape)

    def run_entering(self, out: Tensor, incoming: Tensor, *, exporting: bool | None = None) -> None:
        """The rest, with the states of all slots [num_slots, H, K, V]; `exporting` as in `run_local`."""
        with self.precise():
            for index, run in self.numbered(entering=True, exporting=exporting):
                self._forward(index, run, out, incoming)

    def finals(self) -> Tensor:
        """[n_finals, H, K, V]."""
        return self._stack([self.kept.states[s] for s in self.schedule.finals], *self.state_shape)

    # One run of chunks

    def _forward(self, index: int, run: Run, out: Tensor, slots: Tensor) -> None:
        whole, C, H = run.whole, run.whole.length, self.H
        gates, B = self.gates[index], run.whole.count * self.H
        qk, _ = self.load_qk(whole)
        gram = self.gram(qk, whole)
        D = self._decays(index)
        solve = self.kept.solve.get(index)
        if solve is None:
            solve = self._solve(index, gates, D, gram[:, :, C:])
        P = self.over_value_heads(D, gram[:, :, :C], self.buffer("P", B, C, C))
        v = self.load(whole, self.v)
        qk = self.per_value_head(qk, whole)
        gamma = gates.gamma.reshape(-1, C, 1)
        W = self._arena.take(B, C, self.V) if self.keep else self.buffer("W", B, C, self.V)
        read = self.buffer("read", B, 2 * C, self.V) if run.has_state else None
        for member in run.members:
            batch, part = member.batch, member.heads(H)
            v_part = v[member.chunks].reshape(-1, C, self.V)
            S = None
            if batch.has_state:
                assert read is not None
                S = self.parent_states(batch, slots)
                torch.bmm(qk[part], S, out=read[part])
                changed = self.buffer("changed", *v_part.shape)
                torch.addcmul(v_part, gamma[part], read[part, C:], value=-1, out=changed)
                torch.bmm(solve[part], changed, out=W[part])
            else:
                torch.bmm(solve[part], v_part, out=W[part])
                if read is not None:
                    read[part] = 0
            for group in batch.exits:
                new = self._place(batch, group)
                left = group.decay(D[member.chunks])
                to = gates.part(member.chunks)
                self.exit_state(group, left, to, qk[part, C:], W[part], S, new.view(-1, self.K, self.V))
                self.kept.states.update(zip(group.states, new, strict=True))
            self._forget_parents(batch)
        inside = torch.bmm(P, W, out=self.buffer("inside", B, C, self.V)).view(-1, H, C, self.V)
        if read is None:
            self.store(whole, out, inside)
        else:
            outside = read.view(-1, H, 2 * C, self.V)[:, :, :C]
            with self.rows_of(whole, out) as o:
                torch.addcmul(inside, gates.gamma[..., None], outside, out=o)
        if self.keep:
            self.kept.writes[index] = W

    def _forget_parents(self, batch: ChunkBatch) -> None:
        """Reuses the memory of states that no chunk of the forward needs any more and the backward can do without."""
        for p in batch.parents or ():
            self._uses[p] -= 1
            if not self._uses[p] and p not in self._asked and (not self.keep or p in self._producer):
                self.pool.give(self.kept.states.pop(p))

    def _place(self, batch: ChunkBatch, group: ExitGroup) -> Tensor:
        """Memory for the states of an exit group, [N, H, K, V]."""
        passing = group.states[0] in self._producer
        if batch.count == 1 and (not self.keep or passing):
            return self.pool.take()[None]
        if self.keep and not passing:
            return self._arena.take(batch.count, *self.state_shape)
        return torch.empty(batch.count, *self.state_shape, dtype=self.dtype, device=self.device)

    def _through(self, index: int, run: Run, wide: dict[int, Tensor]) -> None:
        whole, C, H = run.whole, run.whole.length, self.H
        gates, B, both = self.gates[index], run.whole.count * self.H, self.V + self.K
        k, D = self.load_k(whole), self._decays(index)
        solve = self._solve_from(index, k, D)
        k = self.per_value_head(k, whole)
        changed = self.buffer("inside", B, C, both)
        changed.view(-1, H, C, both)[..., : self.V] = self.load(whole, self.v)
        changed[..., self.V :] = 0
        gamma = gates.gamma.reshape(-1, C, 1)
        for member in run.members:
            batch, part = member.batch, member.heads(H)
            if batch.parents is None:  # at its slot: E = 0, M = I
                S = self.buffer("unit", batch.count * H, self.K, both).zero_()
                S[..., self.V :].diagonal(dim1=-2, dim2=-1).fill_(1)
            else:
                S = _join([wide[p] for p in batch.parents])
            read = torch.bmm(k[part], S, out=self.buffer("read", batch.count * H, C, both))
            W = torch.bmm(solve[part], changed[part].addcmul_(gamma[part], read, value=-1), out=read)
            for group in batch.exits:
                if group.exporting:
                    new = torch.empty(S.shape, dtype=self.dtype, device=self.device)
                    left = group.decay(D[member.chunks])
                    self.exit_state(group, left, gates.part(member.chunks), k[part], W, S, new)
                    wide.update(zip(group.states, new.view(-1, H, self.K, both), strict=True))

    def exit_state(
        self,
        group: ExitGroup,
        left: Tensor,
        gates: Gates,
        k: Tensor,
        W: Tensor,
        S: Tensor | None,
        out: Tensor,
    ) -> None:
        """States after the exit rows, [B, K, V]; `left` [B, C, 1] is what remains there of each row's write."""
        reached = torch.mul(W, left, out=self.buffer("reached", *W.shape))
        if S is None:
            torch.bmm(k.mT, reached, out=out)
        else:
            torch.mul(S, group.decay(gates.gamma[..., None]), out=out).baddbmm_(k.mT, reached)

    def state_again(self, state: int, slots: Tensor) -> Tensor:
        """A state of the forward [H, K, V], computed again from the one before it if it was not kept."""
        if state not in self.kept.states:
            index, member, group = self._producer[state]
            batch, gates = member.batch, self.gates[index].part(member.chunks)
            S = self.parent_states(batch, slots) if batch.has_state else None
            k = self.per_value_head(self.load_k(batch, "k again"), batch, "many again")
            W = self.kept.writes[index][member.heads(self.H)]
            out = self.pool.take()
            self.exit_state(group, gates.decay_to(group), gates, k, W, S, out)
            self.kept.states[state] = out
        return self.kept.states[state]

    def forget_again(self, batch: ChunkBatch) -> None:
        """Gives up what `state_again` computed for the parents of a batch."""
        for p in batch.parents or ():
            if p in self._producer:
                self.pool.give(self.kept.states.pop(p))

    def _decays(self, index: int) -> Tensor:
        """D [N, H, C, C] of a run."""
        N, H, C = self.gates[index].G.shape
        return self.gates[index].decays(self.buffer("D", N, H, C, C))

    def _solve_from(self, index: int, k: Tensor, D: Tensor) -> Tensor:
        """`_solve` from k [N Hk, C, K], unless it is done."""
        if index not in self.kept.solve:
            C = k.shape[1]
            gram = torch.bmm(k, k.mT, out=self.buffer("gram", len(k), C, C))
            return self._solve(index, self.gates[index], D, gram.view(-1, self.Hk, C, C))
        return self.kept.solve[index]

    def _solve(self, index: int, gates: Gates, D: Tensor, kk: Tensor) -> Tensor:
        """T diag(beta) [B, C, C] from K K^T [N, Hk, C, C]."""
        N, H, C = gates.beta.shape
        A = self.over_value_heads(D, kk, self.buffer("A", N * H, C, C))
        A.mul_(gates.beta.view(-1, C, 1))
        solve = unit_lower_inverse(A, self._arena.take(N * H, C, C) if self.keep else None)
        solve.mul_(gates.beta.view(-1, 1, C))
        if self.keep or self.runs[index].whole.entering:
            self.kept.solve[index] = solve
        return solve

    # Shared with the backward

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

    def parent_states(self, batch: ChunkBatch, slots: Tensor) -> Tensor:
        """The states that the chunks start from, [B, K, V]."""
        if batch.slots is not None:
            found = [slots[s] for s in batch.slots]
        else:
            found = [self.state_again(p, slots) for p in batch.parents or ()]
        return _join(found)

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

    def numbered(self, *, entering: bool, exporting: bool | None = None) -> Iterator[tuple[int, Run]]:
        """Runs of a kind with their numbers, parents first."""
        for index, run in enumerate(self.runs):
            if run.whole.entering == entering and (exporting is None or run.whole.exporting == exporting):
                yield index, run

    def fresh(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for a result."""
        return fresh(shape, dtype, self.device)

    def _stack(self, states: list[Tensor], *shape: int) -> Tensor:
        return torch.stack(states) if states else torch.empty(0, *shape, dtype=self.dtype, device=self.device)

    @contextmanager
    def precise(self) -> Iterator[None]:
        """States and transitions are never multiplied in TF32."""
        if self.device.type == "cpu":  # fp32 products are fp32 here
            yield
        else:
            with full_precision_matmul():
                yield


def _join(states: list[Tensor]) -> Tensor:
    """[H, K, V] each -> [N H, K, V]."""
    return states[0] if len(states) == 1 else torch.cat(states)
