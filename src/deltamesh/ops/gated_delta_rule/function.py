"""The gated delta rule as one autograd function: forward and backward of a slice, its phases driven by a carrier."""

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltamesh.ops.gated_delta_rule.backward import Gradients
from deltamesh.ops.gated_delta_rule.blocks import BackwardBlock, ForwardBlock, Heads
from deltamesh.ops.gated_delta_rule.context import ScanContext
from deltamesh.ops.gated_delta_rule.phases import Phases
from deltamesh.ops.memory import fresh


class GatedDeltaRuleFunction(torch.autograd.Function):
    """(q, k, v, g, beta, initial_state) -> (o [T, H, V] in q's dtype, final states [n_finals, H, K, V]).

    Shapes as in `SliceEngine`, initial_state [num_given, H, K, V] or None. Saved for the backward: the inputs, and for
    each block of heads the incoming states, M where the carrier needs it, and what `Kept` names.
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
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        settings = {"scale": scale, "use_qk_l2norm": use_qk_l2norm}
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        given = v.new_empty(0, v.shape[1], k.shape[2], v.shape[2], dtype=dtype)
        if initial_state is not None:
            given = initial_state.detach().to(dtype)
        out = fresh(v.shape, q.dtype, v.device)
        heads = tuple(Heads.split(k.shape[1], v.shape[1], context.carrier.num_blocks))
        engines = phases.engines([h.of(**inputs) for h in heads], [phases.kept() for _ in heads], keep=keep, **settings)
        blocks = [
            ForwardBlock(
                engine=engine,
                out=out[:, h.value],
                given=given[:, h.value],
                num_carried=context.schedule.num_slots - context.num_given,
            )
            for h, engine in zip(heads, engines, strict=True)
        ]
        context.carrier.run_forward(blocks)
        finals = torch.cat([block.engine.finals() for block in blocks], 1)
        if keep:
            # through saved tensors all of it: what else `ctx` holds, activation checkpointing cannot drop
            forms, kept = zip(*(engine.kept.flatten() for engine in engines), strict=True)
            states = [x for block in blocks for x in (block.incoming, block.transitions)]
            ctx.save_for_backward(q, k, v, g, beta, *states, *(x for tensors in kept for x in tensors))
            ctx.kept_forms, ctx.kept_counts = forms, [len(tensors) for tensors in kept]
            ctx.phases, ctx.context, ctx.settings, ctx.heads = phases, context, settings, heads
            ctx.given_dtype = None if initial_state is None else initial_state.dtype
        return out, finals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_finals: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, *saved = ctx.saved_tensors
        states, tensors = saved[: 2 * len(ctx.heads)], iter(saved[2 * len(ctx.heads) :])
        kept = [
            ctx.phases.kept.restore(form, list(islice(tensors, count)))
            for form, count in zip(ctx.kept_forms, ctx.kept_counts, strict=True)
        ]
        context: ScanContext = ctx.context
        phases: Phases = ctx.phases
        heads: tuple[Heads, ...] = ctx.heads
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        grads = {name: fresh(x.shape, x.dtype, x.device) for name, x in inputs.items()}
        engines = phases.engines([h.of(**inputs) for h in heads], kept, backward=True, **ctx.settings)
        blocks = [
            BackwardBlock(
                phases=phases.backward(
                    engine,
                    Gradients(**h.of(**grads)),
                    incoming=incoming,
                    d_out=d_out[:, h.value],
                    d_finals=d_finals[:, h.value],
                ),
                transitions=transitions,
            )
            for h, engine, incoming, transitions in zip(heads, engines, states[::2], states[1::2], strict=True)
        ]
        context.carrier.run_backward(blocks)
        d_given = torch.cat([block.d_given for block in blocks], 1)
        d_initial = None if ctx.given_dtype is None else d_given.to(ctx.given_dtype)
        return *(grads[name] for name in inputs), d_initial, None, None, None, None, None
