"""The path-wise causal convolution: values and every gradient against a walk along each row's path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltamesh.distributed.collectives import Group, RowTransfer
from deltamesh.ops.causal_conv1d import (
    ConvContext,
    ConvLayout,
    causal_conv1d,
    causal_conv1d_naive,
    causal_conv1d_rows,
    conv,
)
from deltamesh.ops.causal_conv1d.naive import causal_conv1d_by_path
from deltamesh.plan import CostModel, RowExchange, SlicePlan, plan_micro_batch

CHANNELS = 7


def relative_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert not torch.isnan(got).any()
    got, want = got.detach().double(), want.detach().double()
    if want.numel() == 0:
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def random_paths(rng: np.random.Generator, pieces: int, longest: int, received: int) -> tuple[np.ndarray, int]:
    """`before` of a random forest: pieces hang on earlier pieces, on received rows, or on nothing."""
    lengths = rng.integers(1, longest + 1, size=pieces)
    rows = int(lengths.sum())
    ends = np.cumsum(lengths)
    before = np.arange(-1, rows + received - 1)
    for i, end in enumerate(ends):
        choices = [-1, *(ends[:i] - 1).tolist(), *range(rows, rows + received)]
        before[end - lengths[i]] = rng.choice(choices)
    if received:
        before[rows] = -1  # received rows are one path among themselves
    return before, rows


def run(op: object, x: Tensor, halo: Tensor, weight: Tensor, *args: object) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, halo, weight)]
    y = op(*leaves, *args)  # type: ignore[operator]
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape, dtype=torch.float64).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def check_forest(seed: int, pieces: int, longest: int, received: int, width: int, activation: str | None) -> None:
    rng = np.random.default_rng(seed)
    before, rows = random_paths(rng, pieces, longest, received)
    layout = ConvLayout.from_predecessors(before, num_rows=rows, num_received=received, width=width)
    torch.manual_seed(seed)
    tensors = [torch.randn(n, CHANNELS, dtype=torch.float64) for n in (rows, received)]
    tensors.append(torch.randn(CHANNELS, width, dtype=torch.float64))
    want = run(causal_conv1d_by_path, *tensors, before.tolist(), activation)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        cast = [t.to(dtype) for t in tensors]
        for op in (causal_conv1d_rows, causal_conv1d_naive):
            for name, got, expected in zip(("y", "dx", "dhalo", "dweight"), run(op, *cast, layout, activation), want):
                assert relative_error(got, expected) < bound, (name, dtype)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pieces=st.integers(1, 12),
    longest=st.sampled_from([1, 2, 5, 40]),
    received=st.sampled_from([0, 1, 3, 6]),
    width=st.sampled_from([1, 2, 4, 7]),
    activation=st.sampled_from(["silu", None]),
)
def test_random_forests_match_the_walk_along_each_path(
    seed: int, pieces: int, longest: int, received: int, width: int, activation: str | None
) -> None:
    check_forest(seed, pieces, longest, received, width, activation)


def test_rows_over_many_blocks_match_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "_CPU_BLOCK_ELEMENTS", 16 * CHANNELS)
    check_forest(3, pieces=9, longest=60, received=5, width=4, activation="silu")
    check_forest(4, pieces=150, longest=1, received=5, width=4, activation="silu")


def chain_before(rows: int) -> np.ndarray:
    return np.arange(-1, rows - 1)


def test_a_chain_is_torch_conv1d_with_silu() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, CHANNELS, dtype=torch.float64), torch.randn(CHANNELS, 4, dtype=torch.float64)
    layout = ConvLayout.from_predecessors(chain_before(50), num_rows=50, num_received=0, width=4)
    padded = torch.nn.functional.pad(x.T, (3, 0))[None]
    want = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], groups=CHANNELS))[0].T
    assert relative_error(causal_conv1d_rows(x, x[:0], weight, layout), want) < 1e-12


def test_packed_trees_exchange_neither_values_nor_gradients() -> None:
    before = chain_before(20)
    before[[5, 6, 12]] = -1
    layout = ConvLayout.from_predecessors(before, num_rows=20, num_received=0, width=4)
    torch.manual_seed(0)
    x = torch.randn(20, CHANNELS).requires_grad_()
    weight = torch.randn(CHANNELS, 4)
    y = causal_conv1d_rows(x, x.new_zeros((0, CHANNELS)), weight, layout)
    (dx,) = torch.autograd.grad(y[6:12].square().sum(), x)
    assert torch.count_nonzero(dx[:6]) == 0
    assert torch.count_nonzero(dx[12:]) == 0
    assert torch.count_nonzero(dx[6:12]) == dx[6:12].numel()
    alone = ConvLayout.from_predecessors(chain_before(6), num_rows=6, num_received=0, width=4)
    assert relative_error(causal_conv1d_rows(x[6:12], x.new_zeros((0, CHANNELS)), weight, alone), y[6:12]) < 1e-6


def test_five_thousand_one_row_children_match_the_gathered_rows() -> None:
    before = np.zeros(5000, dtype=np.int64)
    before[0] = -1
    layout = ConvLayout.from_predecessors(before, num_rows=5000, num_received=0, width=4)
    torch.manual_seed(0)
    tensors = [torch.randn(n, CHANNELS, dtype=torch.float64) for n in (5000, 0)]
    tensors.append(torch.randn(CHANNELS, 4, dtype=torch.float64))
    for got, want in zip(run(causal_conv1d_rows, *tensors, layout), run(causal_conv1d_naive, *tensors, layout)):
        assert relative_error(got, want) < 1e-10


def test_an_empty_slice_keeps_its_autograd_edges() -> None:
    layout = ConvLayout.from_predecessors(np.zeros(0, dtype=np.int64), num_rows=0, num_received=0, width=4)
    y, *grads = run(causal_conv1d_rows, torch.zeros(0, 3), torch.zeros(0, 3), torch.ones(3, 4), layout)
    assert y.shape == (0, 3)
    assert [tuple(g.shape) for g in grads] == [(0, 3), (0, 3), (3, 4)]
    assert torch.equal(grads[2], torch.zeros(3, 4))


def test_bf16_rows_are_summed_in_fp32() -> None:
    torch.manual_seed(0)
    before = chain_before(40)
    before[[10, 11]] = [4, 9]
    layout = ConvLayout.from_predecessors(before, num_rows=40, num_received=0, width=4)
    x, weight = torch.randn(40, CHANNELS).bfloat16(), torch.randn(CHANNELS, 4).bfloat16()
    got = run(causal_conv1d_rows, x, x[:0], weight, layout)
    want = run(causal_conv1d_rows, x.float(), x[:0].float(), weight.float(), layout)
    assert torch.equal(got[0], want[0].bfloat16())
    assert all(g.dtype == torch.bfloat16 for g in got)


def test_only_wanted_gradients_are_made_and_fresh_buffers_leak_nothing() -> None:
    before = chain_before(30)
    layout = ConvLayout.from_predecessors(before, num_rows=30, num_received=0, width=4)
    torch.manual_seed(0)
    x, weight = torch.randn(30, CHANNELS).requires_grad_(), torch.randn(CHANNELS, 4)
    before_setting = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        y = causal_conv1d_rows(x, x.new_zeros((0, CHANNELS)), weight, layout)
        y.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before_setting
    assert not torch.isnan(y).any()
    assert x.grad is not None
    assert not torch.isnan(x.grad).any()
    assert weight.grad is None


def test_two_runs_give_the_same_bits() -> None:
    rng = np.random.default_rng(5)
    before, rows = random_paths(rng, 40, 9, 4)
    layout = ConvLayout.from_predecessors(before, num_rows=rows, num_received=4, width=4)
    torch.manual_seed(0)
    tensors = [torch.randn(rows, CHANNELS), torch.randn(4, CHANNELS), torch.randn(CHANNELS, 4)]
    assert all(
        torch.equal(a, b)
        for a, b in zip(run(causal_conv1d_rows, *tensors, layout), run(causal_conv1d_rows, *tensors, layout))
    )


def received_rows(x: Tensor, exchanges: list[RowExchange], cuts: list[int], rank: int) -> Tensor:
    """What the exchange brings to `rank`, taken from the whole stream."""
    parts = []
    for owner, exchange in enumerate(exchanges):
        first = sum(exchange.send_splits[:rank])
        rows = exchange.send_rows[first : first + exchange.send_splits[rank]]
        parts.append(x[cuts[owner] + torch.from_numpy(rows)])
    return torch.cat(parts)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 100), max_size=5), longest=st.sampled_from([2, 25]))
def test_any_cuts_give_the_uncut_values_and_gradients(seed: int, cuts: list[int], longest: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, size=rng.integers(1, longest + 1)).tolist() for _ in range(8)]
    whole = plan_micro_batch(sequences, [None] * 8, num_slices=1, conv_width=4, cost=CostModel())
    rows = whole.tree.num_rows
    bounds = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    cut = plan_micro_batch(
        sequences,
        [None] * 8,
        num_slices=len(bounds) - 1,
        conv_width=4,
        cost=CostModel(),
        cuts=lambda *_: np.array(bounds),
    )
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, CHANNELS, dtype=torch.float64), torch.randn(CHANNELS, 4, dtype=torch.float64)

    def in_slices(x: Tensor, halo: Tensor, weight: Tensor, plans: tuple[SlicePlan, ...]) -> Tensor:
        edges = [plan.start for plan in plans]
        exchanges = [plan.halo.exchange for plan in plans]
        parts = []
        for rank, plan in enumerate(plans):
            layout = ConvLayout.from_plan(plan.halo, num_rows=plan.stop - plan.start)
            halo_RD = received_rows(x, exchanges, edges, rank)
            parts.append(causal_conv1d_rows(x[plan.start : plan.stop], halo_RD, weight, layout))
        return torch.cat(parts) + halo.sum()

    none = x[:0]
    for got, want in zip(run(in_slices, x, none, weight, cut.slices), run(in_slices, x, none, weight, whole.slices)):
        assert relative_error(got, want) < 1e-10


def context_of(layout: ConvLayout) -> ConvContext:
    nothing = RowExchange(send_rows=np.zeros(0, dtype=np.int64), send_splits=(0,), recv_splits=(0,))
    transfer = RowTransfer.from_plan(nothing, torch.device("cpu"))
    return ConvContext(halo_exchange=transfer, layout=layout, group=Group.single())


def test_the_public_op_exchanges_and_backends_agree() -> None:
    layout = ConvLayout.from_predecessors(chain_before(9), num_rows=9, num_received=0, width=4)
    torch.manual_seed(0)
    x, weight = torch.randn(9, CHANNELS, dtype=torch.float64), torch.randn(CHANNELS, 4, dtype=torch.float64)
    fast, naive = (causal_conv1d(x, weight, context=context_of(layout), backend=b) for b in ("torch", "naive"))
    assert relative_error(fast, naive) < 1e-12
    with pytest.raises(ValueError, match="use 'torch', 'fla' or 'naive'"):
        causal_conv1d(x, weight, context=context_of(layout), backend="cudnn")


def test_wrong_layouts_and_rows_are_refused() -> None:
    layout = ConvLayout.from_predecessors(chain_before(9), num_rows=9, num_received=0, width=4)
    x, weight = torch.zeros(9, CHANNELS), torch.zeros(CHANNELS, 4)
    with pytest.raises(ValueError, match="use the layout of this slice"):
        causal_conv1d_rows(x[:8], x[:0], weight, layout)
    with pytest.raises(ValueError, match="do not fit together"):
        causal_conv1d_rows(x, x[:0], weight[:, :3], layout)
    with pytest.raises(ValueError, match="use 'silu' or None"):
        causal_conv1d_rows(x, x[:0], weight, layout, "gelu")
    with pytest.raises(ValueError, match="give indices from 0 to 3"):
        ConvLayout.build(head_rows=np.array([0]), head_taps=np.array([[4, 0]]), num_rows=3, num_received=0)
    with pytest.raises(ValueError, match="list them"):
        ConvLayout.build(head_rows=np.array([1]), head_taps=np.array([[0, 1]]), num_rows=3, num_received=0)
    with pytest.raises(ValueError, match="the row itself"):
        ConvLayout.build(head_rows=np.array([0]), head_taps=np.array([[0, 1]]), num_rows=3, num_received=0)
