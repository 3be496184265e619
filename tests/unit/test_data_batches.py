"""Batches: seeded, the same wherever they are made, and resumable at the exact item."""

import json

import numpy as np
import pytest

from deltamesh.data import BatchSampler, Example, data_digest

# argsort of the raw bits of PCG64(SeedSequence([7, epoch]))
PINNED = [(0, (6, 3, 4, 0, 2, 7, 5, 1)), (1, (1, 3, 2, 7, 4, 5, 0, 6))]


def make_items(num, *, first=0, weight=1.0):
    def example(i):
        return Example(input_tokens=np.array([i]), target_tokens=np.array([i]), weights=np.array([weight]))

    return [tuple(example(first + 10 * i + j) for j in range(1 + i % 3)) for i in range(num)]


def zeros(num):
    ids = np.zeros(num, dtype=np.int64)
    return Example(input_tokens=ids, target_tokens=ids, weights=np.zeros(num))


def take(sampler, num):
    return [(batch.epoch, batch.indices) for batch, _ in zip(sampler, range(num), strict=False)]


def test_an_epoch_holds_every_item_once_and_its_last_batch_is_smaller():
    items = make_items(11)
    batches = list(BatchSampler(items, items_per_step=4, seed=3, epochs=2))
    assert [len(batch.items) for batch in batches] == [4, 4, 3] * 2
    for epoch in range(2):
        indices = [i for batch in batches if batch.epoch == epoch for i in batch.indices]
        assert sorted(indices) == list(range(11))
    assert all(item is items[i] for batch in batches for i, item in zip(batch.indices, batch.items, strict=True))


def test_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        batches = BatchSampler(make_items(50), items_per_step=50, seed=seed, epochs=2)
        return [batch.indices for batch in batches][epoch]

    assert order(0, 0) == order(0, 0)
    assert len({order(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1)}) == 6


def test_the_shuffle_is_pinned_so_that_old_runs_resume_alike():
    assert take(BatchSampler(make_items(8), items_per_step=8, seed=7), 2) == PINNED


@pytest.mark.parametrize("done", range(9))
def test_resuming_equals_never_stopping(done):
    uninterrupted = take(BatchSampler(make_items(11), items_per_step=4, seed=5, epochs=3), 20)
    assert len(uninterrupted) == 9
    first = BatchSampler(make_items(11), items_per_step=4, seed=5, epochs=3)
    for _ in range(done):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = BatchSampler(make_items(11), items_per_step=4, seed=5, epochs=3)
    second.load_state_dict(state)
    assert second.step == first.step == done
    assert take(second, 20) == uninterrupted[done:]


def test_resuming_may_extend_the_number_of_epochs():
    short = BatchSampler(make_items(5), items_per_step=2, epochs=1)
    assert len(list(short)) == 3
    longer = BatchSampler(make_items(5), items_per_step=2, epochs=2)
    longer.load_state_dict(short.state_dict())
    assert [batch.epoch for batch in longer] == [1, 1, 1]


def test_a_state_of_another_data_set_is_refused_and_changes_nothing():
    state = BatchSampler(make_items(6), items_per_step=2).state_dict()
    sampler = BatchSampler(make_items(6, first=1), items_per_step=2)
    next(sampler)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="belongs to another data set"):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


@pytest.mark.parametrize("change", [{"seed": 1}, {"items_per_step": 3}, {"shuffle": False}])
def test_a_state_of_other_settings_is_refused_by_name(change):
    settings = {"items_per_step": 2, "seed": 0, "shuffle": True}
    state = BatchSampler(make_items(6), **settings).state_dict()
    (name,) = change
    with pytest.raises(ValueError, match=f"saved with {name}={settings[name]!r}, .* resume with {name}="):
        BatchSampler(make_items(6), **{**settings, **change}).load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"position": 1}, {"position": 6}, {"position": -2}, {"epoch": -1}, {"epoch": 0.5}, {"position": True}]
)
def test_a_damaged_position_is_refused(change):
    sampler = BatchSampler(make_items(6), items_per_step=2)
    with pytest.raises(ValueError, match="it is damaged"):
        sampler.load_state_dict({**sampler.state_dict(), **change})


def test_a_state_with_other_entries_is_refused():
    sampler = BatchSampler(make_items(6), items_per_step=2)
    with pytest.raises(ValueError, match="not written by BatchSampler"):
        sampler.load_state_dict({"step": 3})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"items_per_step": 0}, "items_per_step=0"),
        ({"items_per_step": 1, "seed": -1}, "seed=-1"),
        ({"items_per_step": 1, "epochs": 0}, "epochs=0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        BatchSampler(make_items(2), **settings)
    with pytest.raises(ValueError, match="no items"):
        BatchSampler([], items_per_step=1)


def test_the_digest_sees_tokens_targets_weights_order_and_grouping():
    items = make_items(4)
    a, b = items[0][0], items[1][0]
    variants = [
        items,
        items[::-1],
        make_items(4, weight=2.0),
        make_items(4, first=1),
        [*items[1:], (Example(input_tokens=a.input_tokens, target_tokens=b.target_tokens, weights=a.weights),)],
        [(a, b)],
        [(zeros(1), zeros(2))],  # the same bytes as the next one, cut elsewhere
        [(zeros(2), zeros(1))],
        [(a,), (b,)],
    ]
    assert len({data_digest(variant) for variant in variants}) == len(variants)
    assert data_digest(make_items(4)) == data_digest(items)
