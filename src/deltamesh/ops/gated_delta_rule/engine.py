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
from deltamesh.ops.gated_delta_rule.memory import Arena, StatePool, Workspace
from deltamesh.ops.gated_delta_rule.rows import SliceRows
from deltamesh.ops.gated_delta_rule.schedule import ChunkBatch, ExitGroup, Member, Run, Schedule
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
        self.kept, self.keep = kept, keep
        self.H, self.V = v.shape[1:]
        self.K = k.shape[2]
        self.state_shape = (self.H, self.K, self.V)
        self.device = v.device
        self.dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        per_batch = _CPU_BATCH if v.device.type == "cpu" else _GPU_BATCH
        max_rows = max(1, per_batch // self.H)
        self.runs = schedule.runs(max_rows, _BATCHES_PER_RUN * max_rows)
        self.gates = GateTable([run.whole for run in self.runs], g, beta, self.dtype, backward=backward)
        self.buffer = self.workspace = Workspace(self.dtype, self.device) if workspace is None else workspace
        self.rows = SliceRows(q, k, v, scale=scale, use_qk_l2norm=use_qk_l2norm, buffer=self.buffer)
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

    def before_exchange(self, out: Tensor, given: Tensor) -> None:
        """What exports wait for; `given` is [num_given, H, K, V].

        The outputs of these chunks come later if their writes are kept, else they are filled in now.
        """
        if not self.keep:
            self.run_local(out, given, exporting=True)
            return
        with self.precise():
            for index, run in self.numbered(entering=False, exporting=True):
                self._write_alone(index, run, given)

    def during_exchange(self, out: Tensor, given: Tensor) -> None:
        """All that is left to do without carried states."""
        if self.keep:
            with self.precise():
                for index, run in self.numbered(entering=False, exporting=True):
                    self._read_alone(index, run, out, given)
        self.run_local(out, given, exporting=False)
        self.prepare_entering()

    def after_exchange(self, out: Tensor, incoming: Tensor) -> None:
        """The rest, with the states of all slots [num_slots, H, K, V]."""
        self.run_entering(out, incoming)

    def run_local(self, out: Tensor, given: Tensor, *, exporting: bool) -> None:
        """What needs no carried state: what stands above an export, or the rest, after it.

        Fills its rows of `out` [T, H, V]; `given` is [num_given, H, K, V].
        """
        with self.precise():
            for index, run in self.numbered(entering=False, exporting=exporting):
                self._forward(index, run, out, given)

    def prepare_entering(self) -> None:
        """The part of `run_entering` that needs no state: the systems of its chunks are solved."""
        with self.precise():
            for index, run in self.numbered(entering=True):
                self._solve_from(index, self.rows.load_k(run.whole), self._decays(index))

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
        """The rest, with the states of all slots [num_slots, H, K, V]; with `exporting` a part, as in `run_local`."""
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
        qk, _ = self.rows.load_qk(whole)
        gram = self.rows.gram(qk, whole)
        D = self._decays(index)
        solve = self.kept.solve.get(index)
        if solve is None:
            solve = self._solve(index, gates, D, gram[:, :, C:])
        P = self.rows.over_value_heads(D, gram[:, :, :C], self.buffer("P", B, C, C))
        v = self.rows.load_v(whole)
        qk = self.rows.per_value_head(qk, whole)
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
            self._leave(member, gates, D, qk[part, C:], W[part], S)
        self._store_outputs(whole, gates, P, W, None if read is None else read[:, :C], out)
        if self.keep:
            self.kept.writes[index] = W

    def _write_alone(self, index: int, run: Run, slots: Tensor) -> None:
        """The part of `_forward` that makes states."""
        whole, C, H = run.whole, run.whole.length, self.H
        gates, D = self.gates[index], self._decays(index)
        k = self.rows.load_k(whole)
        solve = self._solve_from(index, k, D)
        k, v = self.rows.per_value_head(k, whole), self.rows.load_v(whole)
        gamma = gates.gamma.reshape(-1, C, 1)
        W = self.kept.writes[index] = self._arena.take(whole.count * H, C, self.V)
        for member in run.members:
            batch, part = member.batch, member.heads(H)
            changed, S = v[member.chunks].reshape(-1, C, self.V), None
            if batch.has_state:
                S = self.parent_states(batch, slots)
                read = torch.bmm(k[part], S, out=self.buffer("read", *changed.shape))
                changed = torch.addcmul(changed, gamma[part], read, value=-1, out=read)
            torch.bmm(solve[part], changed, out=W[part])
            self._leave(member, gates, D, k[part], W[part], S)

    def _read_alone(self, index: int, run: Run, out: Tensor, slots: Tensor) -> None:
        """The rest of `_forward`: outputs from states and writes."""
        whole, C, H = run.whole, run.whole.length, self.H
        qk, _ = self.rows.load_qk(whole)
        P = self.rows.over_value_heads(
            self._decays(index), self.rows.gram(qk, whole)[:, :, :C], self.buffer("P", whole.count * H, C, C)
        )
        read = self.buffer("read", whole.count * H, C, self.V) if run.has_state else None
        if read is not None:
            q = self.rows.per_value_head(qk, whole)[:, :C]
            for member in run.members:
                part = member.heads(H)
                if member.batch.has_state:
                    torch.bmm(q[part], self.parent_states(member.batch, slots), out=read[part])
                    self.forget_again(member.batch)
                else:
                    read[part] = 0
        self._store_outputs(whole, self.gates[index], P, self.kept.writes[index], read, out)

    def _store_outputs(
        self, whole: ChunkBatch, gates: Gates, P: Tensor, W: Tensor, read: Tensor | None, out: Tensor
    ) -> None:
        """O = gamma (Q S) + P W, `read` [B, C, V] being Q S."""
        C = whole.length
        inside = torch.bmm(P, W, out=self.buffer("inside", *W.shape)).view(-1, self.H, C, self.V)
        if read is None:
            self.rows.store(whole, out, inside)
            return
        with self.rows.rows_of(whole, out) as o:
            torch.addcmul(inside, gates.gamma[..., None], read.view(-1, self.H, *read.shape[1:]), out=o)

    def _leave(self, member: Member, gates: Gates, D: Tensor, k: Tensor, W: Tensor, S: Tensor | None) -> None:
        """The exit states of a batch."""
        batch = member.batch
        for group in batch.exits:
            new, part = self._place(batch, group), group.heads(self.H)
            left = group.decay(D[member.chunks])
            start = None if S is None else S[part]
            self.exit_state(
                group, left, gates.part(member.chunks), k[part], W[part], start, new.view(-1, self.K, self.V)
            )
            self.kept.states.update(zip(group.states, new, strict=True))
        self._forget_parents(batch)

    def _forget_parents(self, batch: ChunkBatch) -> None:
        """Reuses the memory of states that no chunk of the forward needs any more and the backward can do without."""
        for p in batch.parents or ():
            self._uses[p] -= 1
            if not self._uses[p] and p not in self._asked and (not self.keep or p in self._producer):
                self.pool.give(self.kept.states.pop(p))

    def _place(self, batch: ChunkBatch, group: ExitGroup) -> Tensor:
        """Memory for the states of an exit group, [M, H, K, V]."""
        count = len(group.states)
        passing = group.states[0] in self._producer
        if batch.count == 1 and (not self.keep or passing):
            return self.pool.take()[None]
        if self.keep and not passing:
            return self._arena.take(count, *self.state_shape)
        return torch.empty(count, *self.state_shape, dtype=self.dtype, device=self.device)

    def _through(self, index: int, run: Run, wide: dict[int, Tensor]) -> None:
        whole, C, H = run.whole, run.whole.length, self.H
        gates, B, both = self.gates[index], run.whole.count * self.H, self.V + self.K
        k, D = self.rows.load_k(whole), self._decays(index)
        solve = self._solve_from(index, k, D)
        k = self.rows.per_value_head(k, whole)
        changed = self.buffer("inside", B, C, both)
        changed.view(-1, H, C, both)[..., : self.V] = self.rows.load_v(whole)
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
                    own = group.heads(H)
                    new = torch.empty_like(S[own])
                    left = group.decay(D[member.chunks])
                    self.exit_state(group, left, gates.part(member.chunks), k[part][own], W[own], S[own], new)
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
            k = self.rows.per_value_head(self.rows.load_k(batch, "k again"), batch, "many again")
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
            return self._solve(index, self.gates[index], D, gram.view(-1, self.rows.Hk, C, C))
        return self.kept.solve[index]

    def _solve(self, index: int, gates: Gates, D: Tensor, kk: Tensor) -> Tensor:
        """T diag(beta) [B, C, C] from K K^T [N, Hk, C, C]."""
        N, H, C = gates.beta.shape
        A = self.rows.over_value_heads(D, kk, self.buffer("A", N * H, C, C))
        A.mul_(gates.beta.view(-1, C, 1))
        solve = unit_lower_inverse(A, self._arena.take(N * H, C, C) if self.keep else None)
        solve.mul_(gates.beta.view(-1, 1, C))
        if self.keep or self.runs[index].whole.entering:
            self.kept.solve[index] = solve
        return solve

    # Shared with the backward

    def parent_states(self, batch: ChunkBatch, slots: Tensor) -> Tensor:
        """The states that the chunks start from, [B, K, V]."""
        if batch.slots is not None:
            found = [slots[s] for s in batch.slots]
        else:
            found = [self.state_again(p, slots) for p in batch.parents or ()]
        return _join(found)

    def numbered(self, *, entering: bool, exporting: bool | None = None) -> Iterator[tuple[int, Run]]:
        """Runs of a kind with their numbers, parents first."""
        for index, run in enumerate(self.runs):
            if run.whole.entering == entering and (exporting is None or run.whole.exporting == exporting):
                yield index, run

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
