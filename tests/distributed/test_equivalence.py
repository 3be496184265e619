"""One result on every topology: every tensor that a rank can see, on every rank, against one process."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from deltamesh.models import ParamSpec, match_lora_targets, param_specs, tiny_config
from deltamesh.models.lora_targets import lora_param_specs
from deltamesh.plan.carrier import CarrierName
from deltamesh.testing.equivalence import CUT_RULES, Scenario, both_factors_lora, compare, forked_inputs, observe
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology

DEGREES = [
    (1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 8, 1), (1, 1, 2), (1, 1, 4),
    (1, 2, 2), (1, 2, 4), (1, 4, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2),
]  # fmt: skip
TOPOLOGIES = [
    Topology(dp=dp, cp=cp, tp=tp, sp=sp) for dp, cp, tp in DEGREES for sp in ([True, False] if tp > 1 else [False])
]
TOLERANCE = {"float64": 1e-10, "float32": 2e-5}
TRAINED = {"all": None, "lora": both_factors_lora()}


def specs_of(scenario: Scenario) -> dict[str, ParamSpec]:
    config = tiny_config()
    if scenario.lora is None:
        return param_specs(config)
    return lora_param_specs(match_lora_targets(scenario.lora, config), config)


@pytest.fixture(scope="session")
def alone(rank_pool: RankPool):  # type: ignore[no-untyped-def]
    """What one process sees of a scenario, computed once."""

    @cache
    def run(dtype: str, trained: str) -> dict[str, Tensor]:
        return rank_pool.run(observe, 1, Scenario(dtype=dtype, lora=TRAINED[trained]), Topology(), timeout=90)[0]

    return run


def check(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor], topology: Topology, scenario: Scenario) -> None:
    deviations = list(compare(ranks, expected, topology, specs_of(scenario)))
    missed = [d for d in deviations if not d.error <= TOLERANCE[scenario.dtype]]
    worst = sorted(missed, key=lambda d: -d.error)[:5]
    assert not missed, f"{len(missed)} of {len(deviations)} tensors of {topology} differ from one process: {worst}"


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_topology_gives_the_one_process_result(
    rank_pool: RankPool, alone, topology: Topology, dtype: str, trained: str
) -> None:
    scenario = Scenario(dtype=dtype, lora=TRAINED[trained])
    ranks = rank_pool.run(observe, topology.world_size, scenario, topology, timeout=90)
    check(ranks, alone(dtype, trained), topology, scenario)


PIPELINED = [t for t in TOPOLOGIES if t.cp > 1]


@pytest.mark.parametrize("topology", PIPELINED, ids=str)
def test_every_pipelined_topology_gives_the_one_process_result(rank_pool: RankPool, alone, topology: Topology) -> None:
    scenario = Scenario(dtype="float64", lora=TRAINED["lora"], carrier="pipeline")
    ranks = rank_pool.run(observe, topology.world_size, scenario, topology, timeout=90)
    check(ranks, alone("float64", "lora"), topology, scenario)


@pytest.mark.parametrize("carrier", ["scan", "pipeline"])
@pytest.mark.parametrize("cuts", [rule for rule in CUT_RULES if rule != "balanced"])
@pytest.mark.parametrize("topology", [Topology(cp=4), Topology(cp=8), Topology(cp=3, tp=2)], ids=str)
def test_cuts_may_fall_anywhere(
    rank_pool: RankPool, alone, topology: Topology, cuts: str, carrier: CarrierName
) -> None:
    """Before, at and after forks, twice in one place, one row apart."""
    scenario = Scenario(dtype="float64", cuts=cuts, carrier=carrier)
    ranks = rank_pool.run(observe, topology.world_size, scenario, topology, timeout=90)
    check(ranks, alone("float64", "all"), topology, scenario)


@pytest.mark.parametrize("carrier", ["scan", "pipeline"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("topology", [Topology(), Topology(cp=4, tp=2), Topology(dp=2, cp=3)], ids=str)
def test_recomputation_changes_nothing(
    rank_pool: RankPool, alone, topology: Topology, trained: str, recompute: str, carrier: CarrierName
) -> None:
    scenario = Scenario(
        dtype="float64", lora=TRAINED[trained], recompute=recompute, cuts="after-forks", carrier=carrier
    )
    ranks = rank_pool.run(observe, topology.world_size, scenario, topology, timeout=90)
    check(ranks, alone("float64", trained), topology, scenario)


@pytest.mark.parametrize("max_rows", [1, 130])
def test_micro_batches_change_nothing(rank_pool: RankPool, alone, max_rows: int) -> None:
    """Whatever is packed together: gradients are sums, and every item is run once."""
    scenario, topology = Scenario(dtype="float64", max_rows=max_rows), Topology(dp=2, cp=2)
    ranks = rank_pool.run(observe, topology.world_size, scenario, topology, timeout=90)
    check(ranks, alone("float64", "all"), topology, scenario)


@pytest.mark.parametrize("trained", TRAINED)
def test_the_shared_one_process_result_is_the_naive_unshared_one(rank_pool: RankPool, alone, trained: str) -> None:
    single = [[x] for group in forked_inputs() for x in group]
    scenario = Scenario(dtype="float64", lora=TRAINED[trained], backend="naive", max_rows=1, inputs=single)
    naive = rank_pool.run(observe, 1, scenario, Topology(), timeout=90)
    check(naive, alone("float64", trained), Topology(), scenario)


@pytest.mark.parametrize("carrier", ["scan", "pipeline"])
def test_the_same_run_gives_the_same_bits(rank_pool: RankPool, carrier: CarrierName) -> None:
    scenario, topology = Scenario(dtype="float32", cuts="at-forks", carrier=carrier), Topology(cp=2, tp=2)
    first, second = (rank_pool.run(observe, 4, scenario, topology, timeout=90) for _ in range(2))
    for rank, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), f"{name} on rank {rank}"


def test_a_wrong_gradient_on_one_rank_is_seen(alone) -> None:
    """The comparison itself can fail: one element of one small tensor, off by 1%, on one rank."""
    expected = alone("float64", "all")
    ranks = [dict(expected), dict(expected)]
    name = "gradient/model.layers.1.linear_attn.dt_bias"
    ranks[1][name] = expected[name].clone()
    ranks[1][name][3] *= 1.01
    scenario = replace(Scenario(), dtype="float64")
    with pytest.raises(AssertionError, match=r"1 of .*rank=1, tensor='gradient/model.layers.1.linear_attn.dt_bias'"):
        check(ranks, expected, Topology(cp=2), scenario)
