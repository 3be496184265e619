"""The scan alone over a process group: values, final states and all gradients on every rank, given states included."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deltamesh import ops
from deltamesh.distributed.agreement import RankDisagreement
from deltamesh.testing.equivalence import relative_error
from deltamesh.testing.rank_pool import RankPool

H, HK, K, V = 6, 3, 5, 7


def inputs(rows: int, segments: int) -> tuple[dict[str, Tensor], Tensor]:
    """The retention regime: little decay, correlated keys, small beta, so that transitions matter."""
    rng = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    common = draw(1, 1, HK, K)
    tensors = {
        "q": draw(1, rows, HK, K),
        "k": torch.nn.functional.normalize(0.9 * common + 0.4 * draw(1, rows, HK, K), dim=-1),
        "v": draw(1, rows, H, V),
        "g": -torch.tensor([0.0, 1e-4, 1e-3, 0.05, 0.0, 1e-4], dtype=torch.float64).expand(1, rows, H).clone(),
        "beta": 0.05 * torch.ones(1, rows, H, dtype=torch.float64),
    }
    return tensors, draw(segments, H, K, V)


def run(
    cu_seqlens: list[int], parents: list[int], cuts: list[int] | None, given: bool, carrier: str
) -> dict[str, object]:
    """One rank: outputs and gradients of its part."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    tensors, states = inputs(cu_seqlens[-1], len(parents))
    context = ops.context_parallel(
        group, cu_seqlens=cu_seqlens, parents=parents, cuts=cuts, has_initial_state=given, carrier=carrier
    )
    local = {name: x[:, context.rows].clone().requires_grad_() for name, x in tensors.items()}
    initial = states[list(context.given_segments)].clone().requires_grad_() if given else None
    o, final = ops.gated_delta_rule(
        **local, initial_state=initial, output_final_state=True, use_qk_l2norm=True, context=context
    )
    assert final is not None
    rows = torch.arange(cu_seqlens[-1])[context.rows]
    weight = torch.cos(rows.double())[None, :, None, None]
    finals = torch.sin(1.0 + torch.tensor(context.final_segments).double())[:, None, None, None]
    ((o * weight).sum() + (final * finals).sum()).backward()
    return {
        "rows": context.rows,
        "o": o.detach(),
        "final": dict(zip(context.final_segments, final.detach(), strict=True)),
        "initial": {} if initial is None else dict(zip(context.given_segments, initial.grad, strict=True)),
        **{f"d{name}": x.grad for name, x in local.items()},
    }


def _one_row_nodes(count: int) -> tuple[list[int], list[int], list[int]]:
    """A chain of one-row nodes, each with a one-row leaf, in depth-first order; cuts anywhere, one slice empty."""
    parents = [-1]
    for n in range(1, count):
        parents.append(n - 1 if n % 2 else max(0, n - 2))
    return list(range(count + 1)), parents, [0, count // 3, count // 3, count // 2 + 1, count]


CASES = {
    "chain": ([0, 230], [-1], None),
    "packed": ([0, 70, 71, 200, 230], [-1, -1, -1, -1], None),
    "tree": ([0, 66, 67, 140, 200, 230], [-1, 0, 1, 1, 0], [0, 30, 150, 150, 230]),
    "one-row nodes": _one_row_nodes(301),
    "a rank without imports or exports": ([0, 60, 90, 130, 190], [-1, -1, -1, -1], [0, 60, 90, 130, 190]),
    "children anywhere": ([0, 40, 80, 120, 160, 200], [-1, -1, 0, 1, 2], [0, 41, 81, 121, 200]),
}


@pytest.mark.parametrize("carrier", ["scan", "pipeline"])
@pytest.mark.parametrize("given", [False, True], ids=["zero states", "given states"])
@pytest.mark.parametrize("case", CASES)
def test_slices_of_a_process_group_give_the_one_process_scan(
    rank_pool: RankPool, case: str, given: bool, carrier: str
) -> None:
    cu_seqlens, parents, cuts = CASES[case]
    alone = rank_pool.run(run, 1, cu_seqlens, parents, None, given, "scan")[0]
    ranks = rank_pool.run(run, 4, cu_seqlens, parents, cuts, given, carrier)
    roots = {i for i, p in enumerate(parents) if p < 0}
    assert sorted(s for seen in ranks for s in seen["final"]) == list(range(len(parents)))
    assert sorted(s for seen in ranks for s in seen["initial"]) == (sorted(roots) if given else [])
    for rank, seen in enumerate(ranks):
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert relative_error(seen[name], alone[name][:, seen["rows"]]) < 1e-10, (name, rank)
        for name in ("final", "initial"):
            for segment, state in seen[name].items():
                assert relative_error(state, alone[name][segment]) < 1e-10, (name, segment, rank)


def plan_with(bad_rank: int, bad: list[int], good: list[int]) -> None:
    ops.context_parallel(dist.group.WORLD, cu_seqlens=bad if dist.get_rank() == bad_rank else good)


def carrier_with(bad_rank: int) -> None:
    carrier = "pipeline" if dist.get_rank() == bad_rank else "scan"
    ops.context_parallel(dist.group.WORLD, cu_seqlens=[0, 9], carrier=carrier)


def test_ranks_with_another_carrier_are_told_on_all_ranks(rank_pool: RankPool) -> None:
    outcomes = rank_pool.outcomes(carrier_with, 3, 1, timeout=10)
    assert [type(o) for o in outcomes] == [RankDisagreement] * 3


def test_ranks_with_other_segments_are_told_on_all_ranks(rank_pool: RankPool) -> None:
    outcomes = rank_pool.outcomes(plan_with, 3, 1, [0, 4, 9], [0, 5, 9], timeout=10)
    assert [type(o) for o in outcomes] == [RankDisagreement] * 3
    outcomes = rank_pool.outcomes(plan_with, 3, 1, [0, 4, 3, 9], [0, 5, 9], timeout=10)
    assert [type(o) for o in outcomes] == [RankDisagreement] * 3
    assert all("rank 1: ValueError: cu_seqlens" in str(o) for o in outcomes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens": [0, 5, 5, 9]}, "segment 1 has no rows"),
        ({"cu_seqlens": [0, 5, 9], "parents": [-1, 1]}, "does not stand before its child"),
        ({"cu_seqlens": [0, 5, 9], "cuts": [0, 4, 9]}, "3 cuts are given for 1 ranks"),
        ({"cu_seqlens": [0, 5, 9], "carrier": "ring"}, "carrier='ring' is not known; use one of auto, scan, pipeline"),
        ({"cu_seqlens": [0, 5, 9], "cuts": [0, 8]}, "from 0 to the number of rows, 9"),
        ({"cu_seqlens": [0, 5, 9], "cuts": [0, 8.5]}, "give integers in one dimension"),
        ({"cu_seqlens": [0]}, "holds no segment"),
    ],
)
def test_segments_that_cannot_be_planned_are_refused(arguments: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.context_parallel(None, **arguments)


def test_the_default_cuts_are_equal_slices() -> None:
    assert np.array_equal(ops.context_parallel(None, cu_seqlens=[0, 9]).schedule.pieces.length, [9])


def call_with(bad_rank: int, fault: str) -> None:
    """One rank gives other arguments to the plan or to the op."""
    mine = dist.get_rank() == bad_rank
    given = fault == "initial" and mine
    context = ops.context_parallel(dist.group.WORLD, cu_seqlens=[0, 9], carrier="scan", has_initial_state=given)
    tensors = {name: x[:, context.rows] for name, x in inputs(9, 1)[0].items()}
    if mine and fault == "shape":
        tensors["q"] = tensors["q"][..., :-1]
    if mine and fault == "dtype":
        tensors = {name: x.float() for name, x in tensors.items()}
    ops.gated_delta_rule(**tensors, context=context, use_qk_l2norm=mine and fault == "norm")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("initial", "has_initial_state: False on ranks [0, 2]; True on ranks [1]"),
        ("shape", "the call of gated_delta_rule failed on 1 of 3 ranks; rank 1: ValueError"),
        ("dtype", "dtypes: [torch.float64"),
        ("norm", "use_qk_l2norm: False on ranks [0, 2]; True on ranks [1]"),
    ],
)
def test_other_arguments_on_one_rank_are_told_on_all(rank_pool: RankPool, fault: str, message: str) -> None:
    outcomes = rank_pool.outcomes(call_with, 3, 1, fault, timeout=20)
    assert [type(o) for o in outcomes] == [RankDisagreement] * 3
    assert len({str(o) for o in outcomes}) == 1
    assert message in str(outcomes[0])
