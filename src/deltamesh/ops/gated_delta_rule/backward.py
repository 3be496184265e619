"""The gradient of the gated delta rule on one slice, chunk by chunk, last to first.

Letters as in engine.py. With W what the rows of a chunk write, dO given and dS_e the gradients of its exits:

    dW  = P^T dO + sum_e D_e K dS_e                         P = scale (Q K^T * D)
    dV  = (T diag(beta))^T dW
    Y   = scale (dO W^T) * D                                gradient of Q K^T
    Z   = -(dV W^T) * D, below the diagonal                 gradient of K K^T
    dQ  = (scale gamma dO) S^T + Y K
    dK  = -(gamma dV) S^T + Y^T Q + (Z + Z^T) K + sum_e D_e W dS_e^T
    dbeta_i = (dV W^T)_ii / beta_i^2
    dS  = sum_e gamma_e dS_e + Q^T (scale gamma dO) - K^T (gamma dV)

G enters through D and gamma; the gradient of every exponent is its factor times its factor's gradient. Pairs i = j,
whose exponent is zero, are left out rather than cancelled: under strong decay they outweigh all others.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.chunk_math import path_sums_backward
from deltamesh.ops.gated_delta_rule.engine import SliceEngine, exit_decay
from deltamesh.ops.gated_delta_rule.schedule import ChunkBatch, ExitGroup


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
        engine: with the forward's inputs and what it kept.
        incoming: [num_slots, H, K, V], the states of all slots in the forward.
        d_out: [T, H, V].
        d_finals: [n_finals, H, K, V].
    """

    def __init__(self, engine: SliceEngine, *, incoming: Tensor, d_out: Tensor, d_finals: Tensor) -> None:
        self.engine = engine
        self.incoming = incoming
        self.d_out = d_out
        self.grads = Gradients(
            q=torch.empty_like(engine.q),
            k=torch.empty_like(engine.k),
            v=torch.empty_like(engine.v),
            g=torch.empty_like(engine.g),
            beta=torch.empty_like(engine.beta),
        )
        self.states = StateGradients()
        self.slots = StateGradients()
        for state, gradient in zip(engine.schedule.finals, d_finals, strict=True):
            self.states.add(state, gradient.clone())

    # Phases

    def before_exchange(self) -> Tensor:
        """Gradients of the carried slots with all exported gradients zero, [num_slots - num_given, H, K, V].

        Chunks that enter and have no export below are finished here; those with one only pass the state's gradient on.
        """
        partial = StateGradients()  # what comes back through chunks that are not finished yet
        with self.engine.precise():
            for number, batch in self._reversed(entering=True):
                if batch.exporting:
                    self._pass_on(number, batch, partial)
                else:
                    self._backward(number, batch)
        schedule = self.engine.schedule
        for slot in range(schedule.num_given, schedule.num_slots):
            from_partial = partial.pop(-1 - slot)
            if from_partial is not None:
                self.slots.add(slot, from_partial)
        return self._slot_gradients(schedule.num_given, schedule.num_slots)

    def after_exchange(self, d_exports: Tensor) -> Tensor:
        """The rest, with the gradients of the exports [n_exports, H, K, V].

        Returns:
            Gradients of the given states, [num_given, H, K, V].
        """
        for state, gradient in zip(self.engine.schedule.exports, d_exports, strict=True):
            self.states.add(state, gradient.clone())
        with self.engine.precise():
            for number, batch in self._reversed(entering=True, exporting=True):
                self._backward(number, batch)
            for number, batch in self._reversed(entering=False):
                self._backward(number, batch)
        return self._slot_gradients(0, self.engine.schedule.num_given)

    # One batch of chunks

    def _backward(self, number: int, batch: ChunkBatch) -> None:
        e, N, C = self.engine, batch.count, batch.length
        gates = e.gates(batch)
        qk, inverse = e.load_qk(batch)
        qk_H = e.per_value_head(qk, N)
        k = qk_H[:, C:]
        solve, W = e.kept.solve[number], e.kept.writes[number]
        d_out = e.load(batch, self.d_out).reshape(-1, C, e.V)
        gram = torch.bmm(qk, qk[:, C:].mT).view(N, e.Hk, 2 * C, C)
        P = e.attention(gates, gram[:, :, :C])
        gamma = gates.gamma.reshape(-1, C, 1)

        S = e.parent_states(batch, self.incoming) if batch.has_state else None
        dG = torch.zeros(N * e.H, C, dtype=e.dtype, device=qk.device)
        dW = torch.bmm(P.mT, d_out)
        dK_exits: Tensor | None = None
        dS: Tensor | None = None
        for group in batch.exits:
            d_state = self._exit_gradient(group, self.states, None)
            if d_state is None:
                continue
            left = exit_decay(gates.D, group.at, group.position).reshape(-1, C, 1)
            dW.addcmul_(left, torch.bmm(k, d_state))
            reached = torch.mul(W, left)
            dK = torch.bmm(reached, d_state.mT)
            _exit_gate_gradient(dG.view(N, e.H, C), group, (dK * k).sum(-1).view(N, e.H, C))
            dK_exits = dK if dK_exits is None else dK_exits.add_(dK)
            if S is not None:
                decay = exit_decay(gates.gamma[..., None], group.at, group.position).reshape(-1, 1, 1)
                d_state = d_state * decay
                _add_at_exit(dG.view(N, e.H, C), group, (d_state * S).sum((1, 2)).view(N, e.H))
                dS = d_state if dS is None else dS.add_(d_state)
        dV = torch.bmm(solve.mT, dW)
        e.store(batch, self.grads.v, dV.view(N, e.H, C, e.V))

        YZ = torch.bmm(torch.cat((d_out, dV), 1), W.mT)
        d_beta = YZ[:, C:].diagonal(dim1=1, dim2=2).view(N, e.H, C) / gates.beta.square()
        e.store(batch, self.grads.beta, d_beta)
        YZ[:, :C].mul_(gates.D.view(-1, C, C)).mul_(e.scale)
        Z = YZ[:, C:].mul_(gates.D.view(-1, C, C)).neg_()
        Z.diagonal(dim1=1, dim2=2).zero_()
        pair = YZ.view(N, e.Hk, e.J, 2 * C, C) * gram[:, :, None]
        pair = (pair[:, :, :, :C] + pair[:, :, :, C:]).view(-1, C, C)
        pair.diagonal(dim1=1, dim2=2).zero_()
        dG.add_(pair.sum(2)).sub_(pair.sum(1))
        Z.add_(Z.mT.clone())
        YZ = YZ.view(N, e.Hk, e.J, 2 * C, C).sum(2).view(-1, 2 * C, C) if e.J > 1 else YZ
        dqk = torch.empty_like(qk)
        dqk[:, :C] = torch.bmm(YZ[:, :C], qk[:, C:])
        dqk[:, C:] = torch.bmm(YZ.mT, qk)
        if dK_exits is not None:
            dqk[:, C:] += e.over_key_heads(dK_exits, N)
        if S is not None:
            flows = torch.cat((d_out * (gamma * e.scale), dV * -gamma), 1)
            dqk_state = torch.bmm(flows, S.mT)
            dG.add_((dqk_state * qk_H).sum(-1).view(-1, 2, C).sum(1))
            dqk += e.over_key_heads(dqk_state, N)
            dS = torch.bmm(qk_H.mT, flows) if dS is None else dS.baddbmm_(qk_H.mT, flows)
            self._give_to_parents(batch, dS)
        e.store(batch, self.grads.g, path_sums_backward(dG.view(N, e.H, C), batch.ancestors))
        self._store_qk(batch, qk, dqk, inverse)

    def _pass_on(self, number: int, batch: ChunkBatch, partial: StateGradients) -> None:
        """Only the gradient of the state that the chunks start from."""
        e, N, C = self.engine, batch.count, batch.length
        gates = e.gates(batch)
        qk, _ = e.load_qk(batch)
        gram = torch.bmm(qk[:, :C], qk[:, C:].mT).view(N, e.Hk, C, C)
        P = e.attention(gates, gram)
        qk = e.per_value_head(qk, N)
        d_out = e.load(batch, self.d_out).reshape(-1, C, e.V)
        gamma = gates.gamma.reshape(-1, C, 1)
        dW = torch.bmm(P.mT, d_out)
        dS = torch.zeros(N * e.H, e.K, e.V, dtype=e.dtype, device=qk.device)
        for group in batch.exits:
            d_state = self._exit_gradient(group, self.states, partial)
            if d_state is None:
                continue
            dW.addcmul_(exit_decay(gates.D, group.at, group.position).reshape(-1, C, 1), torch.bmm(qk[:, C:], d_state))
            decay = exit_decay(gates.gamma[..., None], group.at, group.position).reshape(-1, 1, 1)
            dS.addcmul_(d_state, decay)
        dV = torch.bmm(e.kept.solve[number].mT, dW)
        dS.baddbmm_(qk.mT, torch.cat((d_out * (gamma * e.scale), dV * -gamma), 1))
        for n, gradient in enumerate(dS.view(N, e.H, e.K, e.V)):
            # Slots and states share one table: slot s is number -1 - s.
            partial.add(batch.parents[n] if batch.parents is not None else -1 - (batch.slots or ())[n], gradient)

    def _exit_gradient(self, group: ExitGroup, whole: StateGradients, partial: StateGradients | None) -> Tensor | None:
        """Gradients of the exit states [B, K, V], or None if all are zero; given up unless `partial` is there."""
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
        zero = torch.zeros(e.H, e.K, e.V, dtype=e.dtype, device=e.v.device)
        return torch.stack([zero if x is None else x for x in found]).view(-1, e.K, e.V)

    def _give_to_parents(self, batch: ChunkBatch, dS: Tensor) -> None:
        e = self.engine
        table, numbers = (self.slots, batch.slots) if batch.slots is not None else (self.states, batch.parents)
        for number, gradient in zip(numbers or (), dS.view(batch.count, e.H, e.K, e.V), strict=True):
            table.add(number, gradient)

    def _store_qk(self, batch: ChunkBatch, qk: Tensor, dqk: Tensor, inverse: Tensor | None) -> None:
        """Takes the gradients [N Hk, 2 C, K] through the normalisation x r: dx = r (dy - y <y, dy>)."""
        e, C = self.engine, batch.length
        if inverse is not None:
            dqk.addcmul_(qk, (qk * dqk).sum(-1, keepdim=True), value=-1).mul_(inverse)
        dqk = dqk.view(batch.count, e.Hk, 2 * C, e.K)
        e.store(batch, self.grads.q, dqk[:, :, :C])
        e.store(batch, self.grads.k, dqk[:, :, C:])

    def _reversed(self, *, entering: bool, exporting: bool | None = None) -> Iterator[tuple[int, ChunkBatch]]:
        return reversed(list(self.engine.numbered(entering=entering, exporting=exporting)))

    def _slot_gradients(self, start: int, stop: int) -> Tensor:
        e = self.engine
        gradients = torch.zeros(stop - start, e.H, e.K, e.V, dtype=e.dtype, device=e.v.device)
        for slot in range(start, stop):
            found = self.slots.pop(slot)
            if found is not None:
                gradients[slot - start] = found
        return gradients


def _exit_gate_gradient(dG_NHC: Tensor, group: ExitGroup, weight_NHC: Tensor) -> None:
    """D_e = exp(G_e - G_i): row e gains what the rows i lose; i = e has exponent zero and is left out."""
    if group.at >= 0:
        weight_NHC[:, :, group.at] = 0
    else:
        weight_NHC[torch.arange(len(group.position), device=weight_NHC.device), :, group.position] = 0
    dG_NHC.sub_(weight_NHC)
    _add_at_exit(dG_NHC, group, weight_NHC.sum(-1))


def _add_at_exit(dG_NHC: Tensor, group: ExitGroup, x_NH: Tensor) -> None:
    if group.at >= 0:
        dG_NHC[:, :, group.at] += x_NH
    else:
        dG_NHC[torch.arange(len(group.position), device=x_NH.device), :, group.position] += x_NH
