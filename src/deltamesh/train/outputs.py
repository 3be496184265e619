"""Outputs: from the hidden rows of one slice to whole, source-order outputs on every cp and tp rank.

Each rank computes its own rows only; the backward gives each rank the gradient of its own rows only, so every row
counts once however many ranks hold the outputs.

Letters: S residual-stream rows here (T, or a tp shard of T), T rows of the slice, E edges, D model width.
"""

import torch
from torch import Tensor

from deltamesh import ops
from deltamesh.distributed.collectives import collect_rows, collect_slices
from deltamesh.models import HybridCausalLM
from deltamesh.models.layers import enter_tp
from deltamesh.ops.context import SliceContext
from deltamesh.plan.plan import MicroBatchPlan
from deltamesh.train.micro_batches import CheckedInput, ForwardOutput


def source_order_outputs(
    model: HybridCausalLM,
    hidden_SD: Tensor,
    plan: MicroBatchPlan,
    context: SliceContext,
    inputs: list[CheckedInput],
) -> list[ForwardOutput]:
    """Log-probabilities and hidden states of every input of a micro-batch.

    Args:
        model: gives the output head.
        hidden_SD: the model's output for this slice.
        plan: of the micro-batch.
        context: of this slice.
        inputs: in the plan's order.
    """
    logprobs = _logprobs(model, hidden_SD, plan, context)
    hidden = _hidden_states(hidden_SD, plan, context)
    return [
        ForwardOutput(
            target_logprobs=None if x.targets is None else lp,
            hidden_states=None if hidden is None or not x.source.hidden_states else h,
        )
        for x, lp, h in zip(inputs, logprobs, hidden or [hidden_SD] * len(inputs), strict=True)
    ]


def _logprobs(
    model: HybridCausalLM, hidden_SD: Tensor, plan: MicroBatchPlan, context: SliceContext
) -> tuple[Tensor, ...]:
    own = plan.slices[context.cp.rank]
    device = hidden_SD.device
    logprobs_E = ops.target_logprobs(
        enter_tp(hidden_SD, context),
        model.head_weight,
        torch.from_numpy(own.edge_targets).to(device),
        rows_E=torch.from_numpy(own.edge_rows).to(device),
        vocab_start=model.vocab_start,
        vocab_size=model.config.vocab_size,
        group=context.tp,
    )
    everywhere_E = collect_slices(logprobs_E, plan.edge_counts, context.cp)
    # an ignored target has edge -1: the zero at the end
    padded = torch.cat([everywhere_E, everywhere_E.new_zeros(1)])
    flat = padded[torch.from_numpy(plan.edges.edge_of).to(device)]
    parts: tuple[Tensor, ...] = flat.split(plan.tree.sequence_length.tolist())
    return parts


def _hidden_states(hidden_SD: Tensor, plan: MicroBatchPlan, context: SliceContext) -> list[Tensor] | None:
    if not any(rows is not None for rows in plan.hidden_of):
        return None
    device = hidden_SD.device
    hidden_TD = collect_rows(hidden_SD, context.num_rows, context.tp) if context.sp else hidden_SD
    wanted = torch.from_numpy(plan.slices[context.cp.rank].hidden_rows).to(device)
    everywhere = collect_slices(hidden_TD[wanted], plan.hidden_counts, context.cp)
    return [
        everywhere[torch.from_numpy(rows).to(device)] if rows is not None else everywhere[:0] for rows in plan.hidden_of
    ]
