"""The phases of the gated delta rule on one slice with CUDA kernels; the same phases as the CPU engine's.

Chunk factors, outputs and their backward are flash-linear-attention's kernels over all chunks at once; the pass over
the states is one kernel launch for all own pieces and for E and M of through paths (state_pass.py).

Letters: T rows of the slice, N chunks, H value heads, Hk key heads, K key dim, V value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.backward import Gradients
from deltamesh.ops.gated_delta_rule.cuda import fla_chunks
from deltamesh.ops.gated_delta_rule.cuda.fla_chunks import Factors
from deltamesh.ops.gated_delta_rule.cuda.schedule import FlaSchedule
from deltamesh.ops.gated_delta_rule.cuda.state_pass import state_pass, state_pass_backward
from deltamesh.ops.gated_delta_rule.cuda.tables import BackwardTables, ForwardTables
from deltamesh.ops.gated_delta_rule.cuda.versions import check_device, check_float32_products


@dataclass(kw_only=True, eq=False)
class FlaKept:
    """What the forward keeps for the backward.

    Attributes:
        factors: see `Factors`; None for a slice without rows.
    """

    factors: Factors | None = None

    def flatten(self) -> tuple[Any, list[Tensor]]:
        """What `restore` needs beside the tensors, and the tensors, which activation checkpointing may drop."""
        if self.factors is None:
            return None, []
        found = {f.name: getattr(self.factors, f.name) for f in fields(self.factors)}
        present = {name: x for name, x in found.items() if x is not None}
        return tuple(present), list(present.values())

    @staticmethod
    def restore(form: Any, tensors: Sequence[Tensor]) -> "FlaKept":
        """The inverse of `flatten`."""
        if form is None:
            return FlaKept()
        found: dict[str, Any] = {"q_rstd": None, "k_rstd": None} | dict(zip(form, tensors, strict=True))
        return FlaKept(factors=Factors(**found))


class FlaSliceEngine:
    """One slice, or a block of its heads; its methods are the phases between which a carrier exchanges states.

    Args:
        schedule: of the slice.
        q, k: [T, Hk, K], any strides, fp32, bf16 or fp16. Products of rows are taken in v's type, with fp32 sums.
        v: [T, H, V].
        g, beta: [T, H].
        scale: factor on q.
        use_qk_l2norm: normalise q and k.
        kept: filled by the forward, read by the backward.
        keep: whether a backward will come.
        backward: whether this is the engine of a backward; nothing depends on it here.

    Raises:
        ValueError: fp64 rows, or a device on which the kernels cannot run.
    """

    def __init__(
        self,
        schedule: FlaSchedule,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        scale: float,
        use_qk_l2norm: bool,
        kept: FlaKept,
        keep: bool = True,
        backward: bool = False,
    ) -> None:
        check_device(v.device)
        if v.dtype == torch.float64:
            raise ValueError(
                "backend 'fla' got float64 rows, but its kernels sum in fp32; use backend 'torch' for fp64"
            )
        if v.dtype == torch.float32 and v.device.type == "cuda":
            check_float32_products()
        self.schedule, self.kept, self.keep = schedule, kept, keep
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.scale, self.use_qk_l2norm = scale, use_qk_l2norm
        self.H, self.V = v.shape[1:]
        self.Hk, self.K = k.shape[1:]
        self.dtype = torch.float32
        self.tables = schedule.tables(self.H, self.K, self.V)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """H, K and V."""
        return self.H, self.K, self.V

    # Phases

    def before_exchange(self, out: Tensor, given: Tensor) -> None:
        """Everything that needs no carried state, one launch for all chunks; `given` is [num_given, H, K, V].

        Outputs need all chunk states, so `out` is filled by `after_exchange`.
        """
        s, tables = self.schedule, self.tables
        self._own_states = self.memory(tables.own.num_states, given)
        self._wide_states = self._new(tables.through.num_states, self.H, self.K, self.V + self.K)
        if s.num_rows == 0:
            return
        self._factors, w, u = fla_chunks.factors(
            self.q, self.k, self.v, self.g, self.beta, use_qk_l2norm=self.use_qk_l2norm, chunks=s.chunks
        )
        if self.keep:
            self.kept.factors = self._factors
        self._w, self._u = w, u
        self._h, self._v_new = self.new_chunk_states(self.v.dtype), torch.empty_like(u)
        state_pass(
            tables.own,
            k=self._factors.k[0],
            w=w[0],
            u=u[0],
            g=self._factors.g[0],
            h=self._h[0],
            v_new=self._v_new[0],
            states=self._own_states,
            through=tables.through,
            wide_states=self._wide_states,
        )

    def transitions(self) -> tuple[Tensor, Tensor]:
        """E [n_through, H, K, V] and M [n_through, H, K, K] of the exports whose path enters at a carried slot."""
        wide = self._wide_states.index_select(0, self.tables.through_exports.states)
        return wide[..., : self.V].contiguous(), wide[..., self.V :].contiguous()

    def exported(self, through_states: Tensor) -> Tensor:
        """[n_exports, H, K, V]: true states of own exports, E of the through ones."""
        tables = self.tables
        states = self._new(len(tables.export_pieces), *self.state_shape)
        tables.own_exports.put(states, self._own_states)
        return states.index_copy_(0, tables.through_exports.places, through_states)

    def during_exchange(self, out: Tensor, given: Tensor) -> None:
        """Nothing is left to do without carried states."""

    def after_exchange(self, out: Tensor, incoming: Tensor) -> None:
        """The rest, with the states of all slots [num_slots, H, K, V]. Fills `out` [T, H, V]."""
        s, tables = self.schedule, self.tables
        self._entering_states = self.memory(tables.entering.num_states, incoming)
        if s.num_rows == 0:
            return
        state_pass(
            tables.entering,
            k=self._factors.k[0],
            w=self._w[0],
            u=self._u[0],
            g=self._factors.g[0],
            h=self._h[0],
            v_new=self._v_new[0],
            states=self._entering_states,
        )
        out.copy_(fla_chunks.outputs(self._factors, self._h, self._v_new, scale=self.scale, chunks=s.chunks))
        del self._factors, self._w, self._u, self._h, self._v_new

    def finals(self) -> Tensor:
        """[n_finals, H, K, V]."""
        tables = self.tables
        states = self._new(len(tables.final_pieces), *self.state_shape)
        tables.own_finals.put(states, self._own_states)
        tables.entering_finals.put(states, self._entering_states)
        return states

    # Shared with the backward

    def memory(self, count: int, sources: Tensor) -> Tensor:
        """fp32 [count, H, K, V] that begins with `sources`; the rest is for the kernel to fill."""
        memory = self._new(count, *self.state_shape)
        memory[: len(sources)] = sources
        return memory

    def new_chunk_states(self, dtype: torch.dtype) -> Tensor:
        """[1, N, H, K, V], not filled."""
        return self.v.new_empty((1, self.schedule.chunks.count, *self.state_shape), dtype=dtype)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.v.device)


class FlaSliceBackward:
    """The phases of the backward, around a `FlaSliceEngine` with the forward's inputs and what it kept.

    Args:
        engine: see above.
        grads: places for the gradients of q, k, v, g and beta; all of them are filled.
        incoming: [num_slots, H, K, V], the states of all slots in the forward.
        d_out: [T, H, V].
        d_finals: [n_finals, H, K, V].
    """

    def __init__(
        self, engine: FlaSliceEngine, grads: Gradients, *, incoming: Tensor, d_out: Tensor, d_finals: Tensor
    ) -> None:
        self.engine, self.grads, self.incoming = engine, grads, incoming
        s, tables = engine.schedule, engine.tables
        self._gradients = torch.empty(
            tables.num_gradients, *engine.state_shape, dtype=torch.float32, device=d_out.device
        )
        num_exports = len(tables.export_pieces)
        self._gradients[:num_exports] = 0
        self._gradients[num_exports : num_exports + len(tables.final_pieces)] = d_finals
        if s.num_rows == 0:
            return
        assert engine.kept.factors is not None, "the forward has run with keep=True"
        self._factors = engine.kept.factors
        self._do = d_out.to(engine.v.dtype).contiguous()[None]
        self._w, self._u = fla_chunks.recompute_writes(self._factors, s.chunks)
        self._dv = fla_chunks.local_write_gradient(self._factors, self._do, scale=engine.scale, chunks=s.chunks)
        # The gate's gradient sums h * dh over K x V in the wider of their types: with both in bf16 it would lose 1%.
        self._dh, self._dv_new = engine.new_chunk_states(torch.float32), torch.empty_like(self._dv)

    def before_exchange(self) -> Tensor:
        """Gradients of the carried slots with all exported gradients zero, [num_slots - num_given, H, K, V]."""
        s = self.engine.schedule
        if s.num_rows:
            self._pass(self.engine.tables.entering, self.engine.tables.entering_backward)
        return self._slot_gradients()[s.num_given :]

    def during_exchange(self) -> None:
        """Nothing is left to do without the gradients of exports."""

    def after_exchange(self, d_exports: Tensor) -> Tensor:
        """The rest, with the gradients of the exports [n_exports, H, K, V].

        Returns:
            Gradients of the given states, [num_given, H, K, V].
        """
        e, s, tables = self.engine, self.engine.schedule, self.engine.tables
        self._gradients[: len(tables.export_pieces)] = d_exports
        if s.num_rows == 0:
            return self._slot_gradients()[: s.num_given]
        self._pass(tables.rest, tables.rest_backward)
        f = self._factors
        h, v_new = e.new_chunk_states(e.v.dtype), torch.empty_like(self._u)
        state_pass(
            tables.whole,
            k=f.k[0],
            w=self._w[0],
            u=self._u[0],
            g=f.g[0],
            h=h[0],
            v_new=v_new[0],
            states=e.memory(tables.whole.num_states, self.incoming),
        )
        found = fla_chunks.input_gradients(
            f,
            w=self._w,
            h=h,
            v_new=v_new,
            do=self._do,
            dh=self._dh,
            dv_new=self._dv_new,
            scale=e.scale,
            chunks=s.chunks,
        )
        for into, gradient in zip((self.grads.q, self.grads.k, self.grads.v, self.grads.g, self.grads.beta), found):
            into.copy_(gradient)
        return self._slot_gradients()[: s.num_given]

    def _pass(self, tables: ForwardTables, backward: BackwardTables) -> None:
        state_pass_backward(
            tables,
            backward,
            q=self._factors.q[0],
            k=self._factors.k[0],
            w=self._w[0],
            g=self._factors.g[0],
            do=self._do[0],
            dv=self._dv[0],
            dh=self._dh[0],
            dv_new=self._dv_new[0],
            gradients=self._gradients,
            scale=self.engine.scale,
        )

    def _slot_gradients(self) -> Tensor:
        """[num_slots, H, K, V], the sums over the pieces that start from each slot, in one fixed order."""
        tables = self.engine.tables
        sums = self._gradients.new_zeros(self.engine.schedule.num_slots, *self.engine.state_shape)
        # by sorted indices, unlike index_add_, whose float atomics add in any order on a GPU
        return sums.index_put_((tables.slot_of_root,), self._gradients[tables.gradient_of_root], accumulate=True)
