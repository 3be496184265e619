"""The training loop: its records are those of the data, however ranks and batches hold it."""

import numpy as np
import pytest
import torch
from peft import LoraConfig

from deltamesh.data import Batch, Item
from deltamesh.data.examples import Example, example_from_mask
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology
from deltamesh.train.loop import StepRecord, forward_inputs, train_steps
from deltamesh.train.optim import AdamParams
from deltamesh.train.trainer_rank import TrainerRank


def _items() -> list[Item]:
    """Three groups of two sequences that share a start, with weights of both signs."""
    rng = np.random.default_rng(0)

    def example(start: np.ndarray, length: int, weight: float) -> Example:
        tokens = np.concatenate([start, rng.integers(0, 256, length)])
        return example_from_mask(tokens, np.arange(len(tokens)) >= len(start), weight=weight)

    starts = [rng.integers(0, 256, n) for n in (9, 4, 14)]
    return [(example(start, 6, 1.0), example(start, 11, -0.25)) for start in starts]


def _batch(items: list[Item]) -> Batch:
    return Batch(epoch=0, indices=tuple(range(len(items))), items=tuple(items))


def _rank(topology: Topology | None = None, max_rows: int = 16384) -> TrainerRank:
    lora = LoraConfig(r=1, target_modules="all-linear")
    return TrainerRank.from_pretrained(
        "tiny", topology=topology or Topology(), lora=lora, dtype=torch.float64, max_rows=max_rows
    )


def _train(
    topology: Topology | None = None, *, repeats: int = 1, steps: int = 2, max_rows: int = 16384
) -> list[StepRecord]:
    batches = [_batch(_items() * repeats)] * steps
    return list(train_steps(_rank(topology, max_rows), batches, AdamParams(learning_rate=1e-2, eps=1e-2)))


def test_the_loss_is_the_weighted_negative_log_likelihood_of_the_examples() -> None:
    (record,) = _train(steps=1)
    rank = _rank()
    expected = 0.0
    with torch.no_grad():
        for item in _items():
            for example in item:  # one sequence at a time
                (batch,) = rank.forward_micro_batches(forward_inputs([(example,)]))
                logprobs = batch.outputs[0].target_logprobs
                assert logprobs is not None
                expected -= float((torch.from_numpy(example.weights) * logprobs).sum())
    assert record.loss_sum == pytest.approx(expected, rel=1e-12)
    assert record.loss_tokens == 3 * (6 + 11)
    assert record.loss_per_token == pytest.approx(expected / record.loss_tokens, rel=1e-12)
    assert record.tokens == 2 * (9 + 4 + 14) + record.loss_tokens
    assert record.rows == record.tokens - (9 + 4 + 14)
    assert record.sharing == record.tokens / record.rows


def test_a_batch_given_twice_over_has_the_same_gradient_per_token() -> None:
    once, twice = _train(), _train(repeats=2)
    for a, b in zip(once, twice, strict=True):
        assert b.loss_sum == pytest.approx(2 * a.loss_sum, rel=1e-10)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-10)
        assert b.loss_per_token == pytest.approx(a.loss_per_token, rel=1e-10)


def test_the_split_into_micro_batches_changes_nothing() -> None:
    for whole, split in zip(_train(), _train(max_rows=1), strict=True):
        assert split.loss_sum == pytest.approx(whole.loss_sum, rel=1e-10)
        assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-10)


def test_every_rank_of_dp_and_cp_has_the_records_of_one_process(rank_pool: RankPool) -> None:
    alone = _train()
    for records in rank_pool.run(_train, 4, Topology(dp=2, cp=2)):
        for record, expected in zip(records, alone, strict=True):
            assert record.loss_sum == pytest.approx(expected.loss_sum, rel=1e-10)
            assert record.grad_norm == pytest.approx(expected.grad_norm, rel=1e-10)
            assert (record.rows, record.tokens) == (expected.rows, expected.tokens)


def test_steps_are_numbered_from_where_a_run_goes_on() -> None:
    records = list(train_steps(_rank(), [_batch(_items())] * 2, AdamParams(), first_step=7))
    assert [record.step for record in records] == [7, 8]
