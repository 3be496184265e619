"""Disagreements end in the same clear error on every rank, before any collective that depends on them."""

import time

import pytest
from peft import LoraConfig

from deltamesh.distributed.agreement import RankDisagreement, agree
from deltamesh.distributed.mesh import build_mesh
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology
from deltamesh.train.micro_batches import ForwardInput
from deltamesh.train.optim import AdamParams
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


# ---------------------------------------------------------------- settings, steps and reductions


def build_with(bad: dict[str, object], topology: Topology) -> None:
    import torch.distributed as dist

    arguments: dict[str, object] = {"topology": topology} | (bad if dist.get_rank() == 1 else {})
    TrainerRank.from_pretrained("tiny", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"seed": 3}, "the settings of the run differs between ranks (seed: 0 on ranks [0]; 3 on ranks [1])"),
        ({"recompute": "full"}, "recompute: 'none' on ranks [0]; 'full' on ranks [1]"),
        ({"backend": "naive"}, "backend: 'torch' on ranks [0]; 'naive' on ranks [1]"),
        ({"topology": Topology(tp=2, sp=False)}, "sp: True on ranks [0]; False on ranks [1]"),
        ({"topology": Topology(cp=2)}, "topology: 'dp=1 cp=1 tp=2' on ranks [0]; 'dp=1 cp=2 tp=1' on ranks [1]"),
        ({"topology": Topology(cp=3)}, "failed on 1 of 2 ranks; rank 1: ValueError: dp=1 cp=3 tp=1 needs 3 ranks"),
        ({"lora": LoraConfig(r=2, target_modules="all-linear")}, "lora: None on ranks [0]"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_other_settings_on_one_rank_are_named_on_all(rank_pool: RankPool, bad: dict[str, object], message: str) -> None:
    outcomes = rank_pool.outcomes(build_with, 2, bad, Topology(tp=2), timeout=20)
    assert [type(o) for o in outcomes] == [RankDisagreement] * 2
    assert len({str(o) for o in outcomes}) == 1
    assert message in str(outcomes[0])


def differ_in(call: str) -> None:
    rank = TrainerRank.from_pretrained("tiny", topology=Topology(dp=2))
    me = rank.mesh.world.rank
    match call:
        case "rate":
            rank.optim_step(AdamParams(learning_rate=1e-3 if me else 1e-1))
        case "scale":
            rank.optim_step(AdamParams(), scale_grads=float("nan") if me else 1.0)
        case "names":
            rank.reduce({"a": 1.0} if me else {"a": 1.0, "b": 2.0})
        case "place" if me:
            rank.optim_step(AdamParams())
        case "place":
            list(rank.forward_micro_batches([ForwardInput(input_tokens=[1, 2])]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("rate", "the optimizer step differs between ranks (learning_rate: 0.1 on ranks [0]; 0.001 on ranks [1])"),
        ("scale", "scale_grads: 1.0 on ranks [0]; nan on ranks [1]"),
        ("names", "the names to reduce differs between ranks"),
        (
            "place",
            "ranks are at different points of the program (the batch of inputs on ranks [0]; the optimizer",
        ),
    ],
)
def test_calls_that_differ_between_ranks_are_told_on_all(rank_pool: RankPool, call: str, message: str) -> None:
    outcomes = rank_pool.outcomes(differ_in, 2, call, timeout=20)
    assert [type(o) for o in outcomes] == [RankDisagreement] * 2
    assert len({str(o) for o in outcomes}) == 1
    assert message in str(outcomes[0])
