"""The model on real ranks: hidden states and every gradient are those of one process, on every rank."""

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from deltamesh.distributed.collectives import all_reduce
from deltamesh.distributed.mesh import Mesh, build_mesh
from deltamesh.models import HybridCausalLM, add_lora, assemble, random_weights, scatter_to_full, tiny_config
from deltamesh.models.layers import enter_tp
from deltamesh.ops.context import SliceContext
from deltamesh.ops.target_logprobs import target_logprobs
from deltamesh.plan.cost import CostModel
from deltamesh.plan.plan import plan_micro_batch
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology

PROMPT = list(range(40, 75))
SEQUENCES = [[*PROMPT, *range(100, 120)], [*PROMPT, *range(110, 123), 1], [*PROMPT, 5], [*PROMPT[:2], 9, 8], [3]]
TARGETS = [[*sequence[1:], 258] for sequence in SEQUENCES]
LORA = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
Result = tuple[Tensor, Tensor, dict[str, Tensor]]


def full_gradients(model: HybridCausalLM, mesh: Mesh, *, sp: bool) -> dict[str, Tensor]:
    """Every gradient, whole and summed over the ranks, by what its spec says."""
    out = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        spec, grad = model.specs[name], p.grad
        whole = spec.copies(mesh.tp.size) == mesh.tp.size and not spec.needs_tp_sum(mesh.tp.size, sp=sp)
        if not whole:
            grad = all_reduce(scatter_to_full(grad, spec, mesh.tp.rank, mesh.tp.size), mesh.tp)
        out[name] = all_reduce(grad, mesh.cp)
    return out


def run(topology: Topology, sp: bool, recompute: str, cuts: list[int] | None) -> Result:
    mesh = build_mesh(topology)
    plan = plan_micro_batch(
        SEQUENCES,
        TARGETS,
        num_slices=mesh.cp.size,
        conv_width=4,
        cost=CostModel(),
        cuts=None if cuts is None else lambda tree, num_slices: np.array(cuts, dtype=np.int64),
    )
    here = plan.slices[mesh.cp.rank]
    context = SliceContext.from_plan(here, cp=mesh.cp, tp=mesh.tp, sp=sp, device=torch.device("cpu"))
    model = HybridCausalLM(
        tiny_config(), tp_rank=mesh.tp.rank, tp_size=mesh.tp.size, dtype=torch.float64, recompute=recompute
    )
    random_weights(model, seed=0)
    add_lora(model, LORA, seed=1)
    model.requires_grad_(True)
    rows_TD = enter_tp(model(torch.tensor(here.tokens), context), context)
    logprobs_E = target_logprobs(
        rows_TD,
        model.head_weight,
        torch.tensor(here.edge_targets),
        rows_E=torch.tensor(here.edge_rows),
        vocab_start=model.vocab_start,
        vocab_size=model.config.vocab_size,
        group=mesh.tp,
    )
    first = sum(plan.edge_counts[: mesh.cp.rank])
    weights_E = torch.cos(torch.arange(first, first + len(logprobs_E), dtype=torch.float64))
    (logprobs_E * weights_E).sum().backward()
    return rows_TD.detach(), logprobs_E.detach(), full_gradients(model, mesh, sp=sp)


CASES = [
    (Topology(cp=2, tp=2), True, "none", None),
    (Topology(cp=2, tp=2), False, "full", None),
    (Topology(cp=1, tp=4), True, "none", None),  # more tp ranks than KV heads
    (Topology(cp=1, tp=4), False, "selective", None),
    (Topology(cp=4, tp=2), True, "full", [0, 13, 36, 36, 73]),  # cuts inside the prompt, and an empty slice
    (Topology(cp=4, tp=1), True, "selective", [0, 1, 3, 20, 73]),  # shorter than the convolution's history
]


@pytest.mark.parametrize(("topology", "sp", "recompute", "cuts"), CASES)
def test_every_rank_has_the_one_process_result(
    rank_pool: RankPool, topology: Topology, sp: bool, recompute: str, cuts: list[int] | None
) -> None:
    hidden, logprobs, grads = run(Topology(), True, "none", None)
    answers = rank_pool.run(run, topology.world_size, topology, sp, recompute, cuts)
    slices = []
    for rank, (hidden_TD, logprobs_E, rank_grads) in enumerate(answers):
        if topology.coordinate(rank).tp == 0:
            slices.append((hidden_TD, logprobs_E))
        torch.testing.assert_close(hidden_TD, slices[-1][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(logprobs_E, slices[-1][1], rtol=1e-12, atol=1e-12)
        assert rank_grads.keys() == grads.keys()
        for name, grad in grads.items():
            scale = grad.abs().max().item()
            assert scale > 0, name
            error = (rank_grads[name] - grad).abs().max().item()
            assert error < 1e-10 * max(scale, 1.0), f"rank {rank}, {name}: {error} of {scale}"
    torch.testing.assert_close(torch.cat([h for h, _ in slices]), hidden, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([e for _, e in slices]), logprobs, rtol=1e-10, atol=1e-10)


def run_build(topology: Topology) -> dict[str, Tensor]:
    mesh = build_mesh(topology)
    model = HybridCausalLM(tiny_config(), tp_rank=mesh.tp.rank, tp_size=mesh.tp.size)
    random_weights(model, seed=0)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_ranks_start_from_parts_of_the_same_tensors(rank_pool: RankPool) -> None:
    answers = rank_pool.run(run_build, 4, Topology(tp=4))
    specs = HybridCausalLM(tiny_config()).base_specs
    for name, full in run_build(Topology()).items():
        assert torch.equal(assemble([a[name] for a in answers], specs[name]), full), name
