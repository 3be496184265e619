"""The model on a prefix tree, with the real ops, gives what each sequence gives alone."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltamesh.distributed.collectives import Group
from deltamesh.models import HybridCausalLM, random_weights, tiny_config
from deltamesh.ops.context import SliceContext
from deltamesh.plan.cost import CostModel
from deltamesh.plan.plan import MicroBatchPlan, plan_micro_batch
from deltamesh.tree import all_sequence_rows
from tests.unit.models_common import hf_model, hf_on_cpu, tiny_state  # noqa: F401

PROMPT = list(b"a shared prompt, longer than the convolution is wide. ")
SEQUENCES = [
    [*PROMPT, *b"one"],
    [*PROMPT, *b"two and more"],
    [*PROMPT, *b"two"],  # a prefix of another sequence
    [*PROMPT, *b"one"],  # a duplicate
    list(b"ax"),  # leaves the prompt after one row, before the convolution's history is full
    list(b"z"),
]


def planned(sequences: list[list[int]], *, sp: bool = False) -> tuple[MicroBatchPlan, SliceContext, Tensor]:
    plan = plan_micro_batch(sequences, [None] * len(sequences), num_slices=1, conv_width=4, cost=CostModel(), cuts=None)
    one = Group.single()
    context = SliceContext.from_plan(plan.slices[0], cp=one, tp=one, sp=sp, device=torch.device("cpu"))
    return plan, context, torch.from_numpy(np.array(plan.slices[0].tokens))


def grads(model: HybridCausalLM) -> dict[str, Tensor]:
    out = {name: p.grad.clone() for name, p in model.model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return out


@pytest.mark.parametrize("options", [{}, {"sp": True}, {"recompute": "full"}, {"recompute": "selective"}])
def test_shared_rows_give_hugging_faces_hidden_states_of_each_sequence(
    options: dict[str, Any],
    hf_on_cpu: None,  # noqa: F811
) -> None:
    config = tiny_config()
    model = HybridCausalLM(config, recompute=options.get("recompute", "none"))
    random_weights(model, seed=0)
    plan, context, x = planned(SEQUENCES, sp=options.get("sp", False))
    assert len(x) < sum(map(len, SEQUENCES)) // 2
    hidden = model(x, context)
    rows = all_sequence_rows(plan.tree)
    weights = torch.linspace(-1, 1, 44)
    sum((hidden[torch.from_numpy(rows.of(s))] @ weights).sum() for s in range(len(SEQUENCES))).backward()
    reference = hf_model(tiny_state(0), deepcopy(config), torch.float32)
    for s, sequence in enumerate(SEQUENCES):
        theirs = reference.model(input_ids=torch.tensor([sequence]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(hidden[torch.from_numpy(rows.of(s))], theirs, rtol=5e-5, atol=5e-5)
        (theirs @ weights).sum().backward()
    for name, p in model.model.named_parameters():
        expected = dict(reference.model.named_parameters())[name].grad
        scale = expected.abs().max().item()
        torch.testing.assert_close(p.grad, expected, rtol=1e-3, atol=1e-4 * scale, msg=lambda m, n=name: f"{n}: {m}")


def test_fp64_tree_is_the_unshared_sequences_to_1e_10_on_both_backends() -> None:
    weights = torch.linspace(-1, 1, 44, dtype=torch.float64)
    results = []
    for backend in ("torch", "naive"):
        model = HybridCausalLM(tiny_config(), dtype=torch.float64, backend=backend)
        random_weights(model, seed=0)
        plan, context, x = planned(SEQUENCES)
        hidden = model(x, context)
        rows = [torch.from_numpy(all_sequence_rows(plan.tree).of(s)) for s in range(len(SEQUENCES))]
        sum((hidden[r] @ weights).sum() for r in rows).backward()
        results.append(([hidden[r].detach() for r in rows], grads(model)))
        alone = []
        for sequence in SEQUENCES:
            _, context, x = planned([sequence])
            alone.append(model(x, context))
            (alone[-1] @ weights).sum().backward()
        results.append(([h.detach() for h in alone], grads(model)))
    for hidden, grad in results[1:]:
        for ours, expected in zip(hidden, results[0][0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
        for name, g in grad.items():
            scale = results[0][1][name].abs().max().item()
            torch.testing.assert_close(g, results[0][1][name], rtol=1e-9, atol=1e-10 * max(scale, 1.0))


def test_a_bf16_model_runs_and_stays_near_the_fp32_one() -> None:
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        model = HybridCausalLM(tiny_config(), dtype=dtype)
        random_weights(model, seed=0)
        _, context, x = planned(SEQUENCES)
        hidden = model(x, context)
        assert hidden.dtype == dtype
        hidden.float().pow(2).sum().backward()
        assert model.model.layers[0].linear_attn.A_log.grad.dtype == torch.float32
        assert all(p.grad.isfinite().all() for p in model.model.parameters())
        out.append(hidden.detach().float())
    assert (out[1] - out[0]).norm() < 0.05 * out[0].norm()


def test_unknown_backends_and_recomputations_are_refused() -> None:
    with pytest.raises(ValueError, match="backend='cuda' is unknown; use one of torch, naive, fla"):
        HybridCausalLM(tiny_config(), backend="cuda")
    with pytest.raises(ValueError, match="recompute='some' is unknown; use one of none, selective, full"):
        HybridCausalLM(tiny_config(), recompute="some")
