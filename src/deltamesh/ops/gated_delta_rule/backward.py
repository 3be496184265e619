"""The gradient of the gated delta rule on one slice, chunk by chunk, last to first.

Letters as in engine.py. With W what the rows of a chunk write, dO given and dS_e the gradients of its exits:

    dW  = P^T dO + sum_e D_e K dS_e                         P = Q K^T * D
    dV  = (T diag(beta))^T dW
    Y   = (dO W^T) * D                                      gradient of Q K^T
    Z   = (dV W^T) * D, below the diagonal                  minus the gradient of K K^T
    dQ  = (gamma dO) S^T + Y K
    dK  = -(gamma dV) S^T + Y^T Q - (Z + Z^T) K + sum_e D_e W dS_e^T
    dbeta_i = (dV W^T)_ii / beta_i^2
    dS  = sum_e gamma_e dS_e + Q^T (gamma dO) - K^T (gamma dV)

G enters through D and gamma; the gradient of every exponent is its factor times its factor's gradient. Pairs i = j,
whose exponent is zero, are left out rather than cancelled: under strong decay they outweigh all others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.engine import SliceEngine
from deltamesh.ops.gated_delta_rule.gates import Gates
from deltamesh.ops.gated_delta_rule.schedule import ChunkBatch, ExitGroup, Member, Run


@dataclass(kw_only=True, eq=False)
class Gradients:
    """Gradients of the inputs, [T, ...] like them; every row is written exactly once."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class StateGradients:
    """Sums of gradients of states, by number."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, number: int, gradient: Tensor) -> None:
        """Adds [H, K, V]; the first one is kept as it is and added to in place, so it must be the caller's to give."""
        if number in self._sums:
            self._sums[number].add_(gradient)
        else:
            self._sums[number] = gradient

    def get(self, number: int) -> Tensor | None:
        """The sum [H, K, V], or None."""
        return self._sums.get(number)

    def pop(self, number: int) -> Tensor | None:
        """Like `get`; the sum is given up."""
        return self._sums.pop(number, None)


class SliceBackward:
    """The phases of the backward, around a `SliceEngine` whose forward has run.

    Args:
        engine: made for a backward, with the forward's inputs and what it kept.
        grads: places for the gradients of q, k, v, g and beta, any strides; all of them are filled.
        incoming: [num_slots, H, K, V], the states of all slots in the forward.
        d_out: [T, H, V].
        d_finals: [n_finals, H, K, V].
    """

    def __init__(
        self, engine: SliceEngine, grads: Gradients, *, incoming: Tensor, d_out: Tensor, d_finals: Tensor
    ) -> None:
        self.engine = engine
        self.grads = grads
        self.incoming = incoming
        self.d_out = d_out
        self.states = StateGradients()
        self.slots = StateGradients()
        for state, gradient in zip(engine.schedule.finals, d_finals, strict=True):
            self.states.add(state, gradient.clone())

    # Phases

    def before_exchange(self) -> Tensor:
        """Gradients of the carried slots with all exported gradients zero, [num_slots - num_given, H, K, V].

        The chunks that enter only pass the gradients of states on, so that what others wait for leaves early.
        """
        partial = StateGradients()
        with self.engine.precise():
            for index, run in self._reversed(entering=True):
                self._pass_on(index, run, partial)
        schedule = self.engine.schedule
        for slot in range(schedule.num_given, schedule.num_slots):
            gradient = partial.pop(-1 - slot)
            if gradient is not None:
                self.slots.add(slot, gradient)
        return self.slot_gradients(range(schedule.num_given, schedule.num_slots))

    def during_exchange(self) -> None:
        """All chunks with no export below them."""
        self.run(entering=True, exporting=False)
        self.run(entering=False, exporting=False)

    def after_exchange(self, d_exports: Tensor) -> Tensor:
        """The rest, with the gradients of the exports [n_exports, H, K, V].

        Returns:
            Gradients of the given states, [num_given, H, K, V].
        """
        self.add_export_gradients(d_exports, range(len(self.engine.schedule.exports)))
        self.run(entering=True, exporting=True)
        self.run(entering=False, exporting=True)
        return self.finish()

    def run(self, *, entering: bool, exporting: bool) -> None:
        """The whole backward of the chunks of a kind; what stands below them must have run."""
        with self.engine.precise():
            for index, run in self._reversed(entering=entering, exporting=exporting):
                self._backward(index, run)

    def add_export_gradients(self, d_exports: Tensor, exports: Sequence[int]) -> None:
        """Adds [n, H, K, V] to the gradients of exports, by position; before anything that stands above them runs."""
        for n, gradient in zip(exports, d_exports, strict=True):
            self.states.add(self.engine.schedule.exports[n], gradient.clone())

    def finish(self) -> Tensor:
        """Last of all; gives the gradients of the given states, [num_given, H, K, V]."""
        self.engine.gates.store_gradients(self.grads.g, self.grads.beta)
        return self.slot_gradients(range(self.engine.schedule.num_given))

    def slot_gradients(self, slots: Sequence[int]) -> Tensor:
        """Gives up the gradients [n, H, K, V] of some slots, once everything that starts from them has run."""
        e = self.engine
        gradients = torch.zeros(len(slots), e.H, e.K, e.V, dtype=e.dtype, device=e.device)
        for place, slot in enumerate(slots):
            found = self.slots.pop(slot)
            if found is not None:
                gradients[place] = found
        return gradients

    # One run of chunks

    def _backward(self, index: int, run: Run) -> None:
        e, whole, N, C = self.engine, run.whole, run.whole.count, run.whole.length
        gates, B, new = e.gates[index], N * e.H, e.buffer
        qk, inverse = e.rows.load_qk(whole)
        gram = e.rows.gram(qk, whole)
        D = gates.decays(new("D", N, e.H, C, C))
        P = e.rows.over_value_heads(D, gram[:, :, :C], new("P", B, C, C))
        qk_H = e.rows.per_value_head(qk, whole)
        W, d_out = e.kept.writes[index], self._load_d_out(whole)
        dW = torch.bmm(P.mT, d_out, out=new("dW", B, C, e.V))
        Y = torch.bmm(d_out, W.mT, out=new("Y", B, C, C))
        dV = new("dV", B, C, e.V)
        dK_exits = new("dK_exits", B, C, e.K)
        flows = dqk = None
        if run.has_state:
            flows, dqk = new("read", B, 2 * C, e.V), new("dqk", B, 2 * C, e.K)
            torch.mul(d_out, gates.gamma.view(-1, C, 1), out=flows[:, :C])
        for member in reversed(run.members):
            self._backward_through_states(index, member, gates, D, qk_H, W, dW, dV, dK_exits, flows, dqk)
        e.rows.store(whole, self.grads.v, dV)

        # Pairs of rows.
        Z = torch.bmm(dV, W.mT, out=new("Z", B, C, C))
        gates.dbeta.copy_(Z.diagonal(dim1=1, dim2=2).view(N, e.H, C)).div_(gates.beta.square())
        D = D.view(B, C, C)
        Y.mul_(D)
        D.diagonal(dim1=1, dim2=2).zero_()
        Z.mul_(D)
        pair = e.rows.over_value_heads(Y.view(N, e.H, C, C), gram[:, :, :C], new("P", B, C, C))
        pair.sub_(e.rows.over_value_heads(Z.view(N, e.H, C, C), gram[:, :, C:], new("A", B, C, C)))
        pair.diagonal(dim1=1, dim2=2).zero_()
        gates.dG.add_(pair.sum(2).sub_(pair.sum(1)).view(N, e.H, C))
        Z = torch.add(Z, Z.mT, out=new("A", B, C, C))
        Y, Z = e.rows.over_key_heads(Y, whole), e.rows.over_key_heads(Z, whole)
        q, k = qk[:, :C], qk[:, C:]
        dq = torch.bmm(Y, k, out=new("rows1", len(qk), C, e.K))
        dk = torch.bmm(Y.mT, q, out=new("rows2", len(qk), C, e.K)).baddbmm_(Z, k, alpha=-1)
        dk.add_(e.rows.over_key_heads(dK_exits, whole))

        # What was read from states.
        if dqk is not None:
            weight = torch.mul(dqk, qk_H, out=new("weights", B, 2 * C, e.K)).sum(-1)
            gates.dG.add_(weight.view(N, e.H, 2, C).sum(2))
            dqk = e.rows.over_key_heads(dqk, whole)
            dq.add_(dqk[:, :C])
            dk.add_(dqk[:, C:])
        self._store_qk(whole, self.grads.q, q, dq, None if inverse is None else inverse[:, :C], e.rows.scale)
        self._store_qk(whole, self.grads.k, k, dk, None if inverse is None else inverse[:, C:], 1.0)

    def _backward_through_states(
        self,
        index: int,
        member: Member,
        gates: Gates,
        D: Tensor,
        qk: Tensor,
        W: Tensor,
        dW: Tensor,
        dV: Tensor,
        dK_exits: Tensor,
        flows: Tensor | None,
        dqk: Tensor | None,
    ) -> None:
        """The part of one batch of a run that needs its states or their gradients.

        Finishes its part of dW, fills those of dV, dK_exits [B, C, K], flows [B, 2 C, V] (its lower half) and
        dqk [B, 2 C, K], and hands the gradients of states on.
        """
        e, batch, part, C = self.engine, member.batch, member.heads(self.engine.H), D.shape[-1]
        gates, D, qk, W, dW, dK_exits = (
            gates.part(member.chunks),
            D[member.chunks],
            qk[part],
            W[part],
            dW[part],
            dK_exits[part],
        )
        S = e.parent_states(batch, self.incoming) if batch.has_state else None
        dS: Tensor | None = None
        first = True
        for group in batch.exits:
            d_state = self._exit_gradient(group, self.states, None)
            if d_state is None:
                continue
            left, own, count = group.decay(D), group.heads(e.H), len(group.states)
            rows = count * e.H
            dW[own].addcmul_(left, torch.bmm(qk[own, C:], d_state, out=e.buffer("rows1", rows, C, e.V)))
            reached = torch.mul(W[own], left, out=e.buffer("rows1", rows, C, e.V))
            dK = torch.bmm(reached, d_state.mT, out=dK_exits[own] if first else e.buffer("rows2", rows, C, e.K))
            # D_e = exp(G_e - G_i): row e gains what the rows i lose; i = e has exponent zero.
            weight = torch.mul(dK, qk[own, C:], out=e.buffer("rows1", rows, C, e.K)).sum(-1).view(count, e.H, C)
            group.clear(weight)
            gates.dG[:count].sub_(weight)
            group.add(weight.sum(-1), gates.dG)
            if first:
                dK_exits[rows:].zero_()
            else:
                dK_exits[own].add_(dK)
            first = False
            if S is not None:
                d_state.mul_(group.decay(gates.gamma[..., None]))
                both = torch.mul(d_state, S[own], out=e.buffer("states", *d_state.shape))
                group.add(both.sum((1, 2)).view(count, e.H), gates.dG)
                if dS is None and count == batch.count:
                    dS = d_state
                else:
                    dS = torch.zeros_like(S) if dS is None else dS
                    dS[own].add_(d_state)
        if first:
            dK_exits.zero_()
        dV_part = torch.bmm(e.kept.solve[index][part].mT, dW, out=dV[part])
        if flows is None or dqk is None:
            return
        if S is None:
            dqk[part] = 0
            return
        torch.mul(dV_part, -gates.gamma.reshape(-1, C, 1), out=flows[part, C:])
        torch.bmm(flows[part], S.mT, out=dqk[part])
        dS = torch.bmm(qk.mT, flows[part]) if dS is None else dS.baddbmm_(qk.mT, flows[part])
        self._give_to_parents(batch, dS)
        e.forget_again(batch)

    def _pass_on(self, index: int, run: Run, partial: StateGradients) -> None:
        """Only the gradients of the states that the chunks start from."""
        e, whole, N, C = self.engine, run.whole, run.whole.count, run.whole.length
        gates, B, new = e.gates[index], N * e.H, e.buffer
        qk, _ = e.rows.load_qk(whole)
        D = gates.decays(new("D", N, e.H, C, C))
        P = e.rows.over_value_heads(D, e.rows.gram(qk, whole)[:, :, :C], new("P", B, C, C))
        qk = e.rows.per_value_head(qk, whole)
        d_out = self._load_d_out(whole)
        dW = torch.bmm(P.mT, d_out, out=new("dW", B, C, e.V))
        flows = new("read", B, 2 * C, e.V)
        gamma = gates.gamma.view(-1, C, 1)
        torch.mul(d_out, gamma, out=flows[:, :C])
        for member in reversed(run.members):
            batch, part = member.batch, member.heads(e.H)
            k, rows = qk[part, C:], batch.count * e.H
            dS = torch.zeros(rows, e.K, e.V, dtype=e.dtype, device=e.device)
            for group in batch.exits:
                d_state = self._exit_gradient(group, self.states, partial)
                if d_state is not None:
                    left, own = group.decay(D[member.chunks]), group.heads(e.H)
                    read = torch.bmm(k[own], d_state, out=new("rows1", len(d_state), C, e.V))
                    dW[part][own].addcmul_(left, read)
                    dS[own].addcmul_(d_state, group.decay(gates.gamma[member.chunks, :, :, None]))
            dV = torch.bmm(e.kept.solve[index][part].mT, dW[part], out=new("dV", rows, C, e.V))
            torch.mul(dV, -gamma[part], out=flows[part, C:])
            dS.baddbmm_(qk[part].mT, flows[part])
            for n, gradient in enumerate(dS.view(-1, *e.state_shape)):
                # Slots and states share one table: slot s is number -1 - s.
                partial.add(batch.parents[n] if batch.parents is not None else -1 - (batch.slots or ())[n], gradient)

    def _load_d_out(self, batch: ChunkBatch) -> Tensor:
        """Rows of the gradient of o, [B, C, V]."""
        e, rows = self.engine, self.engine.rows.load(batch, self.d_out)
        if batch.count == 1:
            return rows.reshape(-1, batch.length, e.V)
        return e.buffer("d_out", *rows.shape).copy_(rows).view(-1, batch.length, e.V)

    def _exit_gradient(self, group: ExitGroup, whole: StateGradients, partial: StateGradients | None) -> Tensor | None:
        """Gradients of the exit states [M H, K, V], or None if all are zero; given up unless `partial` is there."""
        e = self.engine
        found: list[Tensor | None] = []
        for state in group.states:
            if partial is None:
                found.append(whole.pop(state))
                continue
            a, b = whole.get(state), partial.pop(state)
            found.append(b if a is None else a if b is None else a + b)
        if all(x is None for x in found):
            return None
        if len(found) == 1:
            assert found[0] is not None
            return found[0].view(-1, e.K, e.V)
        zero = torch.zeros(e.H, e.K, e.V, dtype=e.dtype, device=e.device)
        return torch.stack([zero if x is None else x for x in found]).view(-1, e.K, e.V)

    def _give_to_parents(self, batch: ChunkBatch, dS: Tensor) -> None:
        e = self.engine
        table, numbers = (self.slots, batch.slots) if batch.slots is not None else (self.states, batch.parents)
        pairs = list(zip(numbers or (), dS.view(batch.count, e.H, e.K, e.V), strict=True))
        # Last child first: children on later slices, whose sum an export begins with, then stand where they would
        # stand in one slice.
        for n in reversed(batch.by_row):
            table.add(*pairs[n])

    def _store_qk(
        self, batch: ChunkBatch, out: Tensor, y: Tensor, dy: Tensor, inverse: Tensor | None, scale: float
    ) -> None:
        """Takes the gradient of y = scale x r, r the inverse norm of x, to x: r (scale dy - y <y, dy> / scale)."""
        factor: Tensor | float = scale
        if inverse is not None and scale != 0:
            along = torch.mul(y, dy, out=self.engine.buffer("dqk", *dy.shape)).sum(-1, keepdim=True)
            dy.addcmul_(y, along.mul_(1 / scale), value=-1 / scale)  # the square of a tiny scale would underflow
            factor = inverse * scale
        with self.engine.rows.rows_of(batch, out) as dx:
            torch.mul(dy.view(dx.shape), factor if isinstance(factor, float) else factor.view(*dx.shape[:3], 1), out=dx)

    def _reversed(self, *, entering: bool, exporting: bool | None = None) -> Iterator[tuple[int, Run]]:
        return reversed(list(self.engine.numbered(entering=entering, exporting=exporting)))
