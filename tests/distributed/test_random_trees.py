"""Random trees and random cuts through the whole model on several ranks; and nothing leaks between trees."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltamesh.models import param_specs, tiny_config
from deltamesh.plan.carrier import CarrierName
from deltamesh.testing.equivalence import Scenario, compare, observe
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology
from deltamesh.train.micro_batches import ForwardInput
from deltamesh.train.trainer_rank import TrainerRank


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], tuple[float, ...]]:
    """Sequences that fork often (each extends a random cut of an earlier one), and cuts (repeats: empty slices)."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 7))):
        base = rng.choice(sequences) if sequences and rng.random() < 0.8 else []
        kept = base[: rng.randint(0, len(base))]
        sequences.append(kept + [rng.randrange(259) for _ in range(rng.choice([1, 2, 3, 5, 40]))])
    points = draw(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.33, 0.5, 0.51, 0.7, 0.9, 1.0]), min_size=3, max_size=3))
    return sequences, tuple(sorted(points))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), carrier=st.sampled_from(["scan", "pipeline"]))
def test_random_trees_and_cuts_give_the_one_process_result(
    rank_pool: RankPool, case: tuple[list[list[int]], tuple[float, ...]], carrier: CarrierName
) -> None:
    sequences, cuts = case
    group = [
        ForwardInput(input_tokens=s, target_tokens=[*s[1:], 7], hidden_states=i % 2 == 0)
        for i, s in enumerate(sequences)
    ]
    alone = rank_pool.run(observe, 1, Scenario(steps=1, inputs=[group]), Topology())[0]
    topology = Topology(cp=4)
    ranks = rank_pool.run(observe, 4, Scenario(steps=1, inputs=[group], cuts=cuts, carrier=carrier), topology)
    missed = [d for d in compare(ranks, alone, topology, param_specs(tiny_config())) if not d.error <= 1e-10]
    assert not missed, missed[:5]


def embedding_gradient(trees: Sequence[Sequence[list[int]]], topology: Topology, cuts: list[int]) -> Tensor:
    """Gradient of the embedding where only the first tree has a loss; the whole tensor, on every rank."""
    import numpy as np

    rank = TrainerRank.from_pretrained(
        "tiny", topology=topology, dtype=torch.float64, cuts=lambda tree, n: np.array([0, *cuts, tree.num_rows])
    )
    inputs = [ForwardInput(input_tokens=s, target_tokens=[*s[1:], s[0]], hidden_states=True) for t in trees for s in t]
    first = len(trees[0])
    for batch in rank.forward_micro_batches([inputs]):
        chosen = [o for i, o in zip(batch.indices, batch.outputs, strict=True) if i < first]
        torch.stack([o.target_logprobs.sum() + o.hidden_states.sum() for o in chosen]).sum().backward()
    name = "model.embed_tokens.weight"
    return dict(rank.full_tensors({name: rank.reduced_gradients()[name]}))[name]


@pytest.mark.parametrize("cuts", [[3, 6, 9], [8, 8, 9], [1, 12, 14]], ids=str)
@pytest.mark.parametrize("topology", [Topology(cp=4), Topology(cp=4, tp=2)], ids=str)
def test_no_gradient_leaks_from_one_tree_to_another(rank_pool: RankPool, topology: Topology, cuts: list[int]) -> None:
    """Trees of disjoint tokens, no head gradient through the embedding: other trees' rows are exactly zero."""
    trees = [[[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]], [[11, 12, 13, 14], [11, 12, 15]], [[21, 22, 23]]]
    gradients = rank_pool.run(embedding_gradient, topology.world_size, trees, topology, cuts)
    for gradient in gradients:
        assert not gradient[11:24].any()
        assert gradient[1:8].abs().sum(1).gt(0).all()


def test_no_gradient_leaks_to_a_tree_that_stands_before(rank_pool: RankPool) -> None:
    trees = [[[21, 22, 23, 24, 25, 26]], [[1, 2, 3], [1, 2, 4]]]
    for gradient in rank_pool.run(embedding_gradient, 2, trees, Topology(cp=2), [4]):
        assert not gradient[:21].any() and gradient[21:27].abs().sum(1).gt(0).all()
