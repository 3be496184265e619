"""The gated delta rule as one autograd function: forward and backward of a slice around a carrier's two exchanges."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltamesh.ops.gated_delta_rule.context import ScanContext
from deltamesh.ops.gated_delta_rule.phases import Phases


class GatedDeltaRuleFunction(torch.autograd.Function):
    """(q, k, v, g, beta, initial_state) -> (o [T, H, V] in q's dtype, final states [n_finals, H, K, V]).

    Shapes as in `SliceEngine`, initial_state [num_given, H, K, V] or None. Saved for the backward: the inputs, the
    incoming states, M, and what `Kept` names.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        context: ScanContext,
        scale: float,
        use_qk_l2norm: bool,
        keep: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        phases = Phases.of(backend, context)
        kept = phases.kept()
        engine = phases.engine(
            phases.schedule, q, k, v, g, beta, scale=scale, use_qk_l2norm=use_qk_l2norm, kept=kept, keep=keep
        )
        if initial_state is None:
            given = torch.empty(0, *engine.state_shape, dtype=engine.dtype, device=v.device)
        else:
            given = initial_state.detach().to(engine.dtype)
        out = engine.fresh(v.shape, q.dtype)
        engine.run_local(out, given)
        through_states, transitions = engine.transitions()
        carried = context.carrier.incoming(engine.exported(through_states), transitions)
        wanted = (context.schedule.num_slots - context.num_given, *engine.state_shape)
        if tuple(carried.shape) != wanted:
            raise ValueError(
                f"{type(context.carrier).__name__} brought states of shape {tuple(carried.shape)} but the slice "
                f"imports {wanted}; give a carrier that serves every import"
            )
        incoming = torch.cat((given, carried.to(engine.dtype)))
        engine.run_entering(out, incoming)
        finals = engine.finals()
        if keep:
            ctx.save_for_backward(q, k, v, g, beta, incoming, transitions)
            ctx.kept, ctx.context, ctx.scale, ctx.use_qk_l2norm = kept, context, scale, use_qk_l2norm
            ctx.phases = phases
            ctx.given_dtype = None if initial_state is None else initial_state.dtype
        return out, finals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_finals: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, incoming, transitions = ctx.saved_tensors
        context: ScanContext = ctx.context
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        phases: Phases = ctx.phases
        engine = phases.engine(
            phases.schedule,
            **inputs,
            scale=ctx.scale,
            use_qk_l2norm=ctx.use_qk_l2norm,
            kept=ctx.kept,
            backward=True,
        )
        backward = phases.backward(engine, inputs, incoming=incoming, d_out=d_out, d_finals=d_finals)
        d_carried = backward.before_exchange()
        d_exports = context.carrier.outgoing_gradient(d_carried, transitions)
        d_given = backward.after_exchange(d_exports)
        grads = backward.grads
        d_initial = None if ctx.given_dtype is None else d_given.to(ctx.given_dtype)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, d_initial, None, None, None, None, None
