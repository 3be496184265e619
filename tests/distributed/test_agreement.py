"""Disagreements end in the same clear error on every rank, before any collective that depends on them."""

import time

import pytest

from deltamesh.distributed.agreement import RankDisagreement, agree
from deltamesh.distributed.mesh import build_mesh
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology
from deltamesh.train.micro_batches import ForwardInput
from deltamesh.train.trainer_rank import TrainerRank

TOPOLOGY = Topology(cp=2, tp=2)


@pytest.fixture(scope="module", autouse=True)
def _warm(rank_pool: RankPool) -> None:
    """The ranks have started and imported everything, so that the 10 seconds are those of the error alone."""
    rank_pool.run(forward_with_other_tokens, 4, TOPOLOGY, -1)


def fail_on(bad_rank: int, topology: Topology) -> int:
    mesh = build_mesh(topology)

    def compute() -> int:
        if mesh.world.rank == bad_rank or bad_rank < 0:
            raise ValueError("no such file")
        return 7

    return agree(compute, str, mesh.world, what="reading the data")


def test_an_error_on_one_rank_is_raised_on_all_with_the_same_text(rank_pool: RankPool) -> None:
    outcomes = rank_pool.outcomes(fail_on, 4, 2, TOPOLOGY, timeout=10)
    assert [type(o) for o in outcomes] == [RankDisagreement] * 4
    assert {str(o) for o in outcomes} == {"reading the data failed on 1 of 4 ranks; rank 2: ValueError: no such file"}


def test_an_error_on_every_rank_keeps_its_type(rank_pool: RankPool) -> None:
    outcomes = rank_pool.outcomes(fail_on, 4, -1, TOPOLOGY, timeout=10)
    assert [(type(o), str(o)) for o in outcomes] == [(ValueError, "no such file")] * 4


def forward_with_other_tokens(topology: Topology, bad_rank: int) -> None:
    rank = TrainerRank.from_pretrained("tiny", topology=topology)
    last = 9 if rank.mesh.world.rank == bad_rank else 8
    list(rank.forward_micro_batches([ForwardInput(input_tokens=[1, 2, last], target_tokens=[2, 3, 4])]))


@pytest.mark.parametrize("topology", [TOPOLOGY, Topology(dp=2, cp=2)], ids=str)
def test_other_tokens_on_one_rank_are_an_error_on_all(rank_pool: RankPool, topology: Topology) -> None:
    start = time.monotonic()
    outcomes = rank_pool.outcomes(forward_with_other_tokens, 4, topology, 3, timeout=10)
    assert time.monotonic() - start < 10
    assert [type(o) for o in outcomes] == [RankDisagreement] * 4
    assert len({str(o) for o in outcomes}) == 1
    assert "the batch of inputs differs between ranks" in str(outcomes[0])
    assert "on ranks [3]" in str(outcomes[0])


def forward_with_failing_plan(topology: Topology, bad_rank: int) -> None:
    rank = TrainerRank.from_pretrained("tiny", topology=topology, cuts=None)
    if rank.mesh.world.rank == bad_rank:
        rank.settings = type(rank.settings)(name_or_path="tiny", cuts=_broken_cuts)
    list(rank.forward_micro_batches([ForwardInput(input_tokens=[1, 2, 3])]))


def _broken_cuts(tree: object, num_slices: int) -> None:
    raise MemoryError("cannot plan")


def test_a_planning_error_on_one_rank_is_raised_on_all(rank_pool: RankPool) -> None:
    outcomes = rank_pool.outcomes(forward_with_failing_plan, 4, TOPOLOGY, 1, timeout=10)
    assert [type(o) for o in outcomes] == [RankDisagreement] * 4
    assert {str(o) for o in outcomes} == {
        "the plan of micro-batch 0 failed on 1 of 4 ranks; rank 1: MemoryError: cannot plan"
    }
