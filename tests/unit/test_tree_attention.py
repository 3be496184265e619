"""Tree attention: values and every gradient against a dense mask made from each row's list of ancestors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltamesh.distributed.collectives import Group, RowTransfer
from deltamesh.ops.tree_attention import (
    AttentionContext,
    AttentionLayout,
    blockwise,
    tree_attention,
    tree_attention_naive,
    tree_attention_rows,
)
from deltamesh.ops.tree_attention import layout as layout_module
from deltamesh.plan import CostModel, RowExchange, SlicePlan, plan_micro_batch

Segments = tuple[list[int], list[int]]  # lengths, parents


def relative_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert not torch.isnan(got).any()
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30)) if want.numel() else 0.0


def layout_of(segments: Segments, received: int = 0, **sizes: int) -> AttentionLayout:
    lengths, parents = np.array(segments[0], dtype=np.int64), np.array(segments[1], dtype=np.int64)
    return AttentionLayout.build(
        segment_start=np.cumsum(lengths) - lengths,
        segment_length=lengths,
        segment_parent=parents,
        num_received=received,
        **sizes,
    )


def ancestors_mask(segments: Segments) -> Tensor:
    """bool [X, X] by walking from each row to its root."""
    before: list[int] = []
    ends = np.cumsum(segments[0])
    for length, parent in zip(*segments):
        before += [int(ends[parent]) - 1 if parent >= 0 else -1]
        before += list(range(len(before) - 1, len(before) + length - 2))
    mask = torch.zeros(len(before), len(before), dtype=torch.bool)
    for row in range(len(before)):
        key = row
        while key >= 0:
            mask[row, key] = True
            key = before[key]
    return mask


def random_forest(rng: np.random.Generator, segments: int, longest: int, path: int) -> tuple[Segments, int]:
    """A pre-order forest that starts with `path` segments in one line (the received rows)."""
    lengths = rng.integers(1, longest + 1, size=path + segments).tolist()
    parents, open_path = [], [-1]
    for i in range(path + segments):
        depth = len(open_path) - 1 if i < path else int(rng.integers(0, len(open_path)))
        if i == path:
            depth = len(open_path) - 1  # the first local row continues the received path
        del open_path[depth + 1 :]
        parents.append(open_path[-1])
        open_path.append(i)
    return (lengths, parents), int(sum(lengths[:path]))


def example(seed: int, keys: int, received: int, heads: tuple[int, int], widths: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(keys - received, heads[0], widths[0]), (keys, heads[1], widths[0]), (keys, heads[1], widths[1])]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def run(op: object, tensors: list[Tensor], **options: object) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    o = op(*leaves, scale=0.7, **options)  # type: ignore[operator]
    do = torch.randn(o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    o.backward(do.to(o.dtype))
    return [o.detach(), *(leaf.grad for leaf in leaves)]


def by_walk(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,xhd->htx", q, k) * scale
    return torch.einsum("htx,xhd->thd", scores.masked_fill(~mask[-q.shape[0] :], -torch.inf).softmax(-1), v)


def check(
    segments: Segments, received: int, seed: int = 0, heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (5, 3),
    **sizes: int,
) -> AttentionLayout:  # fmt: skip
    layout = layout_of(segments, received, **sizes)
    tensors = example(seed, sum(segments[0]), received, heads, widths)
    want = run(by_walk, tensors, mask=ancestors_mask(segments))
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        for op in (tree_attention_rows, tree_attention_naive):
            got = run(op, [t.to(dtype) for t in tensors], layout=layout)
            for name, a, b in zip(("o", "dq", "dk", "dv"), got, want):
                assert relative_error(a, b) < bound, (op, name, dtype)
    return layout


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    segments=st.integers(1, 14),
    longest=st.sampled_from([1, 3, 30]),
    path=st.integers(0, 4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    block_rows=st.sampled_from([3, 8, 128]),
    tile_keys=st.sampled_from([4, 512]),
)
def test_random_forests_match_the_walk_to_the_root(
    seed: int, segments: int, longest: int, path: int, heads: tuple[int, int], block_rows: int, tile_keys: int
) -> None:
    forest, received = random_forest(np.random.default_rng(seed), segments, longest, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "_SHORT_RANGE", 3)
        patch.setattr(layout_module, "_PAIRS_PER_BLOCK", 20)
        patch.setattr(blockwise, "_TILE_ELEMENTS", 64)
        check(forest, received, seed, heads, block_rows=block_rows, tile_keys=tile_keys)


def test_a_chain_is_torch_causal_attention() -> None:
    layout = layout_of(([300], [-1]))
    q, k, v = example(0, 300, 0, (4, 2), (8, 8))
    causal = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.7, enable_gqa=True
    )[0].transpose(0, 1)
    assert relative_error(tree_attention_rows(q, k, v, scale=0.7, layout=layout), causal) < 1e-12


def test_a_slice_without_its_ancestors_rows_reads_the_received_ones() -> None:
    check(([150, 20, 200, 90], [-1, 0, 1, 0]), received=170)


def test_sixteen_completions_of_one_prompt_read_it_and_themselves() -> None:
    layout = check(([256] + [32] * 16, [-1] + [0] * 16), received=0, heads=(2, 1))
    pairs = sum((b.stop - b.start) * _keys_read(layout, b) for b in layout.blocks)
    needed = 256 * 257 // 2 + 16 * (32 * 256 + 32 * 33 // 2)
    assert pairs < 1.45 * needed


def _keys_read(layout: AttentionLayout, block: object) -> int:
    return sum(len(layout.row_X[tile.keys]) for tile in block.tiles)  # type: ignore[attr-defined]


def test_one_token_segments_share_blocks() -> None:
    star = ([40] + [1] * 700, [-1] + [0] * 700)
    assert len(check(star, received=0, heads=(2, 1)).blocks) < 10
    spine = ([1] * 300 + [1] * 299, [*range(-1, 299), *range(298, -1, -1)])  # a spine, then a leaf at each unwinding
    layout = check(spine, received=0, heads=(2, 1))
    assert len(layout.blocks) < 10
    spine_reads = sum((b.stop - b.start) * _keys_read(layout, b) for b in layout.blocks)
    assert spine_reads < 2 * int(ancestors_mask(spine).sum())


def test_a_deep_tree_of_five_thousand_one_token_segments_is_planned_in_time() -> None:
    layout = layout_of(([1] * 5000, [*range(-1, 4999)]))
    assert len(layout.blocks) == -(-5000 // 96)
    assert all(isinstance(tile.keys, slice) for block in layout.blocks for tile in block.tiles)


def test_unrelated_trees_are_not_read() -> None:
    layout = layout_of(([700, 700, 700], [-1, -1, -1]))
    first_of_tree = np.repeat([0, 700, 1400], 700)
    for block in layout.blocks:
        for tile in block.tiles[1:]:
            assert int(layout.row_X[tile.keys].min()) >= first_of_tree[block.start]


def test_gradients_between_trees_are_exactly_zero() -> None:
    layout = layout_of(([60, 7, 50], [-1, -1, -1]))
    q, k, v = (t.float().requires_grad_() for t in example(0, 117, 0, (4, 2), (5, 5)))
    o = tree_attention_rows(q, k, v, scale=0.7, layout=layout)
    for grad in torch.autograd.grad(o[60:67].square().sum(), (q, k, v)):
        assert torch.count_nonzero(grad[:60]) == 0
        assert torch.count_nonzero(grad[67:]) == 0
        assert torch.count_nonzero(grad[60:67]) > 0


def test_an_empty_slice_keeps_its_autograd_edges() -> None:
    layout = layout_of(([], []))
    o, *grads = run(tree_attention_rows, example(0, 0, 0, (4, 2), (5, 3)), layout=layout)
    assert o.shape == (0, 4, 3)
    assert [tuple(g.shape) for g in grads] == [(0, 4, 5), (0, 2, 5), (0, 2, 3)]


def test_bf16_is_computed_in_fp32() -> None:
    layout = layout_of(([100, 60, 70], [-1, 0, 0]))
    low = [t.bfloat16() for t in example(0, 230, 0, (4, 2), (8, 8))]
    got, want = (
        run(tree_attention_rows, low, layout=layout),
        run(tree_attention_rows, [t.float() for t in low], layout=layout),
    )
    assert torch.equal(got[0], want[0].bfloat16())
    assert all(g.dtype == torch.bfloat16 for g in got)
    # the saved output is rounded, and with it the row sums of the softmax gradient
    for a, b in zip(got[1:], want[1:]):
        assert relative_error(a, b) < 0.02


def test_two_runs_give_the_same_bits_and_fresh_buffers_leak_nothing() -> None:
    forest, received = random_forest(np.random.default_rng(3), 40, 30, 3)
    layout = layout_of(forest, received)
    tensors = [t.float() for t in example(0, sum(forest[0]), received, (4, 2), (8, 8))]
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        runs = [run(tree_attention_rows, tensors, layout=layout) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    for a, b in zip(*runs):
        assert torch.equal(a, b)
        assert not torch.isnan(a).any()


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

    def in_slices(q: Tensor, k: Tensor, v: Tensor, *, scale: float, plans: tuple[SlicePlan, ...]) -> Tensor:
        edges = [plan.start for plan in plans]
        exchanges = [plan.ancestors.exchange for plan in plans]
        parts = []
        for rank, plan in enumerate(plans):
            own = slice(plan.start, plan.stop)
            keys, values = (torch.cat([received_rows(x, exchanges, edges, rank), x[own]]) for x in (k, v))
            layout = AttentionLayout.from_plan(plan.ancestors)
            parts.append(tree_attention_rows(q[own], keys, values, scale=scale, layout=layout))
        return torch.cat(parts)

    tensors = example(seed, rows, 0, (4, 2), (5, 3))
    for got, want in zip(run(in_slices, tensors, plans=cut.slices), run(in_slices, tensors, plans=whole.slices)):
        assert relative_error(got, want) < 1e-10


def context_of(layout: AttentionLayout) -> AttentionContext:
    nothing = RowExchange(send_rows=np.zeros(0, dtype=np.int64), send_splits=(0,), recv_splits=(0,))
    return AttentionContext(
        kv_exchange=RowTransfer.from_plan(nothing, torch.device("cpu")), layout=layout, group=Group.single()
    )


def test_the_public_op_exchanges_and_backends_agree() -> None:
    context = context_of(layout_of(([40, 9, 1, 8], [-1, 0, 0, -1])))
    tensors = example(0, 58, 0, (4, 2), (5, 3))
    fast, naive = (run(tree_attention, tensors, context=context, backend=backend) for backend in ("torch", "naive"))
    for a, b in zip(fast, naive):
        assert relative_error(a, b) < 1e-10
    with pytest.raises(ValueError, match="use 'torch', 'flex' or 'naive'"):
        tree_attention(*tensors, scale=1.0, context=context, backend="sdpa")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), longest=st.sampled_from([5, 300]), path=st.integers(0, 2))
def test_flex_attention_with_the_block_mask_matches_the_dense_mask(seed: int, longest: int, path: int) -> None:
    from deltamesh.ops.tree_attention.flex import tree_attention_flex, tree_block_mask

    forest, received = random_forest(np.random.default_rng(seed), 6, longest, path)
    layout = layout_of(forest, received)
    q, k, v = (t.float() for t in example(seed, sum(forest[0]), received, (4, 2), (16, 16)))
    mask = tree_block_mask(layout)
    got = tree_attention_flex(q, k, v, scale=0.7, mask=mask)
    assert relative_error(got, tree_attention_naive(q, k, v, scale=0.7, layout=layout)) < 2e-5
    # the eager call reads the mask function only: the blocks are compared with the mask itself
    sees = torch.nn.functional.pad(
        ancestors_mask(forest)[received:], (0, -sum(forest[0]) % 128, 0, -layout.num_rows % 128)
    )
    sees = sees.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    assert torch.equal(mask.to_dense()[0, 0].bool(), sees.any(-1))
    full = torch.zeros_like(sees[:, :, 0])
    for row, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        full[row, mask.full_kv_indices[0, 0, row, :count].long()] = True
    assert torch.equal(full, sees.all(-1))


def test_wrong_segments_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="order segments depth-first"):
        layout_of(([2, 2, 2, 2], [-1, 0, 0, 1]))
    with pytest.raises(ValueError, match="at least one row"):
        layout_of(([2, 0], [-1, 0]))
    with pytest.raises(ValueError, match="leave gaps"):
        AttentionLayout.build(segment_start=[1], segment_length=[2], segment_parent=[-1], num_received=0)
    with pytest.raises(ValueError, match="give 0 to 2"):
        layout_of(([2], [-1]), received=3)
    context = context_of(layout_of(([9], [-1])))
    q, k, v = example(0, 9, 0, (4, 2), (5, 3))
    with pytest.raises(ValueError, match="divides that of the query heads"):
        tree_attention(q[:, :3], k, v, scale=1.0, context=context)
    with pytest.raises(ValueError, match="do not fit together"):
        tree_attention(q, k, v[:, :1], scale=1.0, context=context)
    with pytest.raises(ValueError, match="use the layout of this slice"):
        tree_attention(q[:8], k[:8], v[:8], scale=1.0, context=context)
