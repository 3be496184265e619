"""Chunks: what runs together, in which order, and what an input may look like."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from deltamesh.ops.gated_delta_rule import Schedule, gated_delta_rule
from deltamesh.plan.pieces import Pieces, chain_pieces
from tests.forests import Forest, forests
from tests.unit.gated_delta_rule_common import Inputs, make_inputs

CPU = torch.device("cpu")


def _pieces(parent: list[int], length: list[int]) -> Pieces:
    lengths = np.array(length, dtype=np.int64)
    return Pieces(
        start=np.cumsum(lengths) - lengths,
        length=lengths,
        parent=np.array(parent, dtype=np.int64),
        slot=np.full(len(length), -1, dtype=np.int64),
        num_slots=0,
        exports=np.zeros(0, dtype=np.int64),
    )


def test_a_chain_costs_one_level_per_64_rows_and_copies_no_rows() -> None:
    batches = Schedule(chain_pieces(1000), CPU).batches(1024)
    assert len(batches) == 16
    assert [b.first_row for b in batches] == list(range(0, 1000, 64))
    assert not batches[0].has_state
    assert all(b.has_state for b in batches[1:])


def test_equal_siblings_run_as_one_batch() -> None:
    batches = Schedule(_pieces([-1, *[0] * 16], [64, *[50] * 16]), CPU).batches(10_000)
    assert [(b.count, b.length) for b in batches] == [(1, 64), (16, 50)]
    assert batches[1].parents == (0,) * 16


def test_batches_are_cut_to_the_rows_asked_for() -> None:
    schedule = Schedule(_pieces([-1, *[0] * 16], [64, *[50] * 16]), CPU)
    assert [b.count for b in schedule.batches(250)] == [1, 5, 5, 5, 1]
    assert [b.count for b in schedule.batches(1)] == [1] * 17


def test_one_token_nodes_share_chunks_and_take_no_padding() -> None:
    rng = np.random.default_rng(0)
    parent = [-1, *(int(rng.integers(max(0, i - 5), i)) for i in range(1, 5000))]
    batches = Schedule(_pieces(parent, [1] * 5000), CPU).batches(10_000)
    padded = sum(b.count * b.length for b in batches)
    chunks = sum(b.count for b in batches)
    assert padded <= 1.1 * 5000
    assert chunks <= 600


def test_short_roots_share_chunks_without_any_state() -> None:
    schedule = Schedule(_pieces([-1] * 2000, [8] * 2000), CPU)
    assert schedule.num_states == 0
    assert sum(b.count for b in schedule.batches(10**6)) == 250


@settings(max_examples=100, deadline=None)
@given(forest=forests(max_nodes=20, max_length=100))
def test_every_row_is_in_one_chunk_and_sees_its_path(forest: Forest) -> None:
    pieces = _pieces(forest.parent.tolist(), forest.length.tolist())
    schedule = Schedule(pieces, CPU, finals=range(len(pieces.start)))
    state_row: dict[int, int] = {}
    seen: list[int] = []
    for batch in schedule.batches(256):
        rows = batch.rows.view(batch.count, batch.length)
        real = torch.ones_like(rows, dtype=torch.bool).flatten()
        if batch.valid is not None:
            real[:] = False
            real[batch.valid] = True
        real = real.view_as(rows)
        masks = batch.ancestors.expand(batch.count, -1, -1)
        for n in range(batch.count):
            chunk = rows[n][real[n]].tolist()
            seen += chunk
            above = [state_row[batch.parents[n]]] if batch.parents is not None else []
            for i, row in enumerate(chunk):
                inside = [chunk[j] for j in torch.nonzero(masks[n, i]).flatten().tolist()]
                path = forest.path(row)
                before = [a for a in above for a in (a, *forest.path(a))]
                assert sorted(inside + before) == sorted([row, *path])
            assert not masks[n][~real[n]].any()
            assert not masks[n][:, ~real[n]].any()
        for group in batch.exits:
            for n, state in enumerate(group.states):
                state_row[state] = int(rows[n, group.position[n]])
    assert sorted(seen) == list(range(forest.num_rows))
    ends = (pieces.start + pieces.length - 1).tolist()
    assert [state_row[s] for s in schedule.finals] == ends


def test_finals_and_given_states_must_exist() -> None:
    with pytest.raises(ValueError, match=r"finals \[1\] are no pieces; there are 1"):
        Schedule(chain_pieces(5), CPU, finals=[1])
    with pytest.raises(ValueError, match="num_given=1 given states do not fit the 0 slots"):
        Schedule(chain_pieces(5), CPU, num_given=1)


BAD_CALLS: list[tuple[str, Callable[[Inputs], dict[str, object]], str]] = [
    ("rank", lambda x: {"q": x.q[0]}, r"q has shape \(8, 2, 7\), which is not \[B, T, Hk, K\]"),
    ("dtype", lambda x: {"beta": x.beta.detach().int()}, r"beta has dtype torch.int32; give a floating"),
    ("q shape", lambda x: {"q": x.q[:, :4]}, r"q has shape .* but k has"),
    ("rows", lambda x: {"v": x.v[:, :4]}, r"q and k have \(1, 8\) rows but v has \(1, 4\)"),
    ("gates", lambda x: {"g": x.g[..., :4]}, r"g has shape \(1, 8, 4\); give one value per row and head"),
    (
        "heads",
        lambda x: {"v": x.v[:, :, :5], "g": x.g[..., :5], "beta": x.beta[..., :5]},
        r"5 value heads cannot share 2",
    ),
    ("mixed", lambda x: {"q": x.q.float()}, r"q and v mix fp64 with a lower precision"),
    ("backend", lambda x: {"backend": "fast"}, r"backend='fast' is not known; use one of torch, "),
    ("end", lambda x: {"cu_seqlens": [0, 3, 7]}, r"cu_seqlens=\[0, 3, 7\] does not cut 8 rows"),
    ("order", lambda x: {"cu_seqlens": [0, 5, 3, 8]}, r"ascend from 0 to 8"),
    ("floats", lambda x: {"cu_seqlens": [0.0, 8.0]}, r"give integers"),
    ("parent", lambda x: {"cu_seqlens": [0, 3, 8], "parents": [1, -1]}, r"parents=\[1, -1\] holds a segment"),
    ("count", lambda x: {"cu_seqlens": [0, 3, 8], "parents": [-1]}, r"1 parents are given for 2 segments"),
    ("lonely", lambda x: {"parents": [-1]}, r"parents are given without cu_seqlens"),
    ("state", lambda x: {"initial_state": torch.zeros(2, 6, 7, 5)}, r"give one state per segment, \(1, 6, 7, 5\)"),
    (
        "state of a child",
        lambda x: {"cu_seqlens": [0, 3, 8], "parents": [-1, 0], "initial_state": torch.zeros(2, 6, 7, 5)},
        r"a segment with a parent starts from the parent's state",
    ),
]


@pytest.mark.parametrize(("change", "message"), [c[1:] for c in BAD_CALLS], ids=[c[0] for c in BAD_CALLS])
def test_bad_calls_say_what_was_given_and_what_to_do(
    change: Callable[[Inputs], dict[str, object]], message: str
) -> None:
    x = make_inputs(8)
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**{**vars(x), **change(x)})


def test_batches_of_sequences_refuse_offsets() -> None:
    x = Inputs(**{n: t.view(2, 4, *t.shape[2:]) for n, t in vars(make_inputs(8)).items()})
    with pytest.raises(ValueError, match="cu_seqlens is given with batch size 2"):
        gated_delta_rule(*x.leaves(), cu_seqlens=[0, 8])
