"""Target log-probabilities: values and both gradients against full logits, whole and with the vocabulary dealt out."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltamesh.distributed import collectives
from deltamesh.distributed.collectives import Group
from deltamesh.ops.target_logprobs import blockwise, target_logprobs, target_logprobs_naive

WIDTH = 11


def relative_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert not torch.isnan(got).any()
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30)) if want.numel() else 0.0


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def example(seed: int, rows: int, vocab: int, edges: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab, WIDTH, dtype=torch.float64, generator=generator)
    edge_rows = torch.randint(0, rows, (edges,), generator=generator) if rows else torch.zeros(0, dtype=torch.long)
    targets = torch.randint(0, vocab, (edges,), generator=generator)
    dlogprobs = torch.randn(edges, dtype=torch.float64, generator=generator)
    return hidden, weight, edge_rows, targets, dlogprobs


def shards_of(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, cuts: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Every rank's log-probs. Ranks run one after the other; a message is answered from all ranks' parts, which a
    first pass without answers records."""
    vocab = weight.shape[0]
    sent: list[list[Tensor]] = []
    answers: list[Tensor] = []

    def record(x: Tensor, group: Group, op: str = "sum") -> Tensor:
        sent[group.rank].append(x.clone())
        step = len(sent[group.rank]) - 1
        return answers[step].clone() if step < len(answers) else x.clone()

    monkeypatch.setattr(collectives, "all_reduce", record)

    def run(rank: int, size: int) -> Tensor:
        return target_logprobs(
            hidden,
            weight[cuts[rank] : cuts[rank + 1]],
            targets,
            rows_E=rows,
            vocab_start=cuts[rank],
            vocab_size=vocab,
            group=Group(rank=rank, size=size, handle=None),
            chunk_rows=3,
        )

    size = len(cuts) - 1
    for op in (torch.amax, torch.sum):  # one more answer is known after each pass
        sent[:] = [[] for _ in range(size)]
        for rank in range(size):
            run(rank, size)
        answers.append(op(torch.stack([messages[len(answers)] for messages in sent]), 0))
    sent[:] = [[] for _ in range(size)]
    out = [run(rank, size) for rank in range(size)]
    assert [len(messages) for messages in sent] == [2] * size
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    vocab=st.sampled_from([1, 5, 37, 64]),
    edges=st.integers(0, 20),
    chunk_rows=st.sampled_from([1, 2, 512]),
)
def test_edges_in_any_order_match_full_logits(seed: int, rows: int, vocab: int, edges: int, chunk_rows: int) -> None:
    hidden, weight, edge_rows, targets, dlogprobs = example(seed, rows, vocab, edges)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_VOCAB_BLOCK", 8)
        patch.setattr(blockwise, "_EDGE_BLOCK", 3)
        for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
            want_leaves = leaves(hidden, weight)
            want = target_logprobs_naive(*want_leaves, targets, rows_E=edge_rows)
            want.backward(dlogprobs)
            got_leaves = leaves(hidden.to(dtype), weight.to(dtype))
            got = target_logprobs(
                *got_leaves,
                targets,
                rows_E=edge_rows,
                vocab_start=0,
                vocab_size=vocab,
                group=Group.single(),
                chunk_rows=chunk_rows,
            )
            got.backward(dlogprobs.to(dtype))
            assert got.dtype == dtype
            # relative to the parts of a log-prob and of its gradient, which may cancel
            assert (got - want).abs().max().item() < bound * 30 if edges else got.shape == (0,)
            for mine, reference in zip(got_leaves, want_leaves):
                scale = dlogprobs.abs().sum().item() * max(hidden.abs().max().item(), weight.abs().max().item()) + 1e-30
                assert not torch.isnan(mine.grad).any()
                assert (mine.grad - reference.grad).abs().max().item() / scale < bound


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), edges=st.integers(0, 12), cuts=st.lists(st.integers(0, 37), max_size=3))
def test_uneven_and_empty_vocabulary_shards_give_the_whole_result(seed: int, edges: int, cuts: list[int]) -> None:
    hidden, weight, rows, targets, dlogprobs = example(seed, 6, 37, edges)
    want_leaves, got_leaves = leaves(hidden, weight), leaves(hidden, weight)
    want = target_logprobs_naive(*want_leaves, targets, rows_E=rows)
    want.backward(dlogprobs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_VOCAB_BLOCK", 8)
        per_rank = shards_of(*got_leaves, targets, rows, [0, *sorted(cuts), 37], patch)
        for got in per_rank:
            assert torch.equal(got, per_rank[0])
            assert relative_error(got, want) < 1e-10
            got.backward(dlogprobs)  # parts of hidden's gradient add up over the ranks
    for got, reference in zip(got_leaves, want_leaves):
        assert (got.grad - reference.grad).abs().max() < 1e-10


def test_large_logits_do_not_overflow_and_sure_targets_have_logprob_zero() -> None:
    weight = torch.eye(5) * 1e4
    hidden = torch.eye(5).requires_grad_()
    got = target_logprobs(hidden, weight, torch.arange(5), vocab_start=0, vocab_size=5, group=Group.single())
    got.sum().backward()
    assert torch.equal(got, torch.zeros(5))
    assert torch.equal(hidden.grad, torch.zeros(5, 5))


def test_edges_of_one_row_add_their_gradients() -> None:
    hidden, weight, *_ = example(0, 2, 37, 0)
    targets, rows = torch.tensor([3, 9, 9, 30]), torch.tensor([1, 1, 1, 1])
    want_leaves, got_leaves = leaves(hidden, weight), leaves(hidden, weight)
    target_logprobs_naive(*want_leaves, targets, rows_E=rows).sum().backward()
    target_logprobs(
        *got_leaves, targets, rows_E=rows, vocab_start=0, vocab_size=37, group=Group.single()
    ).sum().backward()
    for got, want in zip(got_leaves, want_leaves):
        assert relative_error(got.grad, want.grad) < 1e-10
    assert torch.count_nonzero(got_leaves[0].grad[0]) == 0


def test_no_edges_keep_the_autograd_edges_and_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(collectives, "all_reduce", lambda x, group, op="sum": calls.append(op) or x.clone())
    hidden, weight = leaves(torch.zeros(0, WIDTH), torch.ones(7, WIDTH))
    none = torch.zeros(0, dtype=torch.long)
    got = target_logprobs(hidden, weight, none, rows_E=none, vocab_start=0, vocab_size=7, group=Group.single())
    got.sum().backward()
    assert calls == ["max", "sum"]
    assert hidden.grad.shape == (0, WIDTH)
    assert torch.equal(weight.grad, torch.zeros(7, WIDTH))


def test_bf16_is_computed_in_fp32() -> None:
    hidden, weight, rows, targets, dlogprobs = example(1, 6, 37, 15)
    low, high = (
        leaves(hidden.bfloat16(), weight.bfloat16()),
        leaves(hidden.bfloat16().float(), weight.bfloat16().float()),
    )
    options = {"rows_E": rows, "vocab_start": 0, "vocab_size": 37, "group": Group.single()}
    got, want = target_logprobs(*low, targets, **options), target_logprobs(*high, targets, **options)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    got.backward(dlogprobs.float())
    want.backward(dlogprobs.float())
    for a, b in zip(low, high):
        assert a.grad.dtype == torch.bfloat16
        assert torch.equal(a.grad, b.grad.bfloat16())


def test_two_runs_give_the_same_bits_and_fresh_buffers_leak_nothing() -> None:
    hidden, weight, rows, targets, dlogprobs = example(2, 40, 3000, 90)
    before = torch.utils.deterministic.fill_uninitialized_memory
    runs = []
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for _ in range(2):
            mine = leaves(hidden.float(), weight.float())
            got = target_logprobs(
                *mine, targets, rows_E=rows, vocab_start=0, vocab_size=3000, group=Group.single(), chunk_rows=16
            )
            got.backward(dlogprobs.float())
            runs.append([got, *(leaf.grad for leaf in mine)])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    for a, b in zip(*runs):
        assert torch.equal(a, b)
        assert not torch.isnan(a).any()


def test_a_frozen_head_gets_no_gradient_and_no_grad_mode_keeps_no_mean() -> None:
    hidden, weight, rows, targets, _ = example(3, 6, 37, 9)
    options = {"rows_E": rows, "vocab_start": 0, "vocab_size": 37, "group": Group.single()}
    (mine,) = leaves(hidden)
    got = target_logprobs(mine, weight, targets, **options)
    got.sum().backward()
    (reference,) = leaves(hidden)
    target_logprobs_naive(reference, weight, targets, rows_E=rows).sum().backward()
    assert relative_error(mine.grad, reference.grad) < 1e-10
    with torch.no_grad():
        assert torch.equal(target_logprobs(mine, weight, targets, **options), got)


def test_wrong_inputs_are_refused() -> None:
    hidden, weight, rows, targets, _ = example(4, 6, 37, 9)
    options = {"vocab_start": 0, "vocab_size": 37, "group": Group.single()}
    with pytest.raises(ValueError, match="do not fit"):
        target_logprobs(hidden, weight[:, :5], targets, rows_E=rows, **options)
    with pytest.raises(ValueError, match="one target per edge"):
        target_logprobs(hidden, weight, targets, **options)
    with pytest.raises(ValueError, match="drop edges without a target"):
        target_logprobs(hidden, weight, targets - 100, rows_E=rows, **options)
    with pytest.raises(ValueError, match="this rank's own rows"):
        target_logprobs(hidden, weight, targets, rows_E=rows, **{**options, "vocab_start": 1})
    with pytest.raises(ValueError, match="at least 1"):
        target_logprobs(hidden, weight, targets, rows_E=rows, **options, chunk_rows=0)
