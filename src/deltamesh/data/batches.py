"""Batches: seeded shuffles per epoch, the same on every rank, resumable at the exact item."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltamesh.data.examples import Ints, Item


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The items of one step.

    Attributes:
        epoch: epoch the items belong to, from 0; a batch never spans two.
        indices: index of each item in the data set.
        items: the items, whole.
    """

    epoch: int
    indices: tuple[int, ...]
    items: tuple[Item, ...]


class BatchSampler:
    """Iterates over batches of items, epoch after epoch.

    The order of an epoch depends on seed and epoch alone, so every rank that constructs the sampler alike sees the same
    batches without talking to the others. The last batch of an epoch may be smaller: losses are sums, so no item is
    dropped or repeated to fill it.

    Args:
        items: the data set, such as `load_jsonl` returns.
        items_per_step: items of a batch.
        seed: seed of the shuffles, >= 0.
        shuffle: whether to shuffle; otherwise every epoch is in data set order.
        epochs: number of epochs; None never ends.

    Raises:
        ValueError: no items, or a size that cannot be.

    Example:
        >>> from deltamesh.data.examples import example_from_targets
        >>> items = [(example_from_targets(np.array([i]), np.array([i])),) for i in range(5)]
        >>> [batch.indices for batch in BatchSampler(items, items_per_step=2, shuffle=False, epochs=1)]
        [(0, 1), (2, 3), (4,)]
    """

    def __init__(
        self,
        items: Sequence[Item],
        *,
        items_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        if len(items) == 0:
            raise ValueError("there are no items to make batches of")
        if items_per_step < 1:
            raise ValueError(f"items_per_step={items_per_step}; a step needs at least one item")
        if seed < 0:
            raise ValueError(f"seed={seed}; use a seed >= 0")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs={epochs}; use at least one, or None for no end")
        self._items = tuple(items)
        self._items_per_step = items_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._digest = data_digest(items)
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def digest(self) -> str:
        """Digest of the data set."""
        return self._digest

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch."""
        return -(-len(self._items) // self._items_per_step)

    @property
    def step(self) -> int:
        """Batches handed out so far, over all epochs."""
        return self._epoch * self.steps_per_epoch + self._position // self._items_per_step

    def __iter__(self) -> Iterator[Batch]:
        """Goes on where the sampler stands; it does not start again."""
        return self

    def __next__(self) -> Batch:
        """The next batch."""
        if self._epochs is not None and self._epoch >= self._epochs:
            raise StopIteration
        indices = self._order[self._position : self._position + self._items_per_step].tolist()
        batch = Batch(epoch=self._epoch, indices=tuple(indices), items=tuple(self._items[i] for i in indices))
        self._position += len(indices)
        if self._position == len(self._items):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands and what it samples; plain JSON values."""
        return {**self._identity(), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` described; the next batch is the one that would have followed.

        Raises:
            ValueError: the state is not one of this data set and these settings. The sampler is unchanged then.
        """
        identity = self._identity()
        expected = {*identity, "epoch", "position"}
        if set(state) != expected:
            raise ValueError(
                f"the sampler state has the entries {sorted(state)}, expected {sorted(expected)}; "
                f"it was not written by BatchSampler.state_dict"
            )
        if state["digest"] != self._digest:
            raise ValueError(
                f"the sampler state belongs to another data set: it was saved with {state['num_items']} items (digest "
                f"{str(state['digest'])[:12]}), this one has {len(self._items)} items (digest {self._digest[:12]}); "
                f"resume with the data, tokenizer and loading options of the saved run, or start a new run"
            )
        for name, here in identity.items():
            if state[name] != here:
                raise ValueError(
                    f"the sampler state was saved with {name}={state[name]!r}, this sampler has {name}={here!r}; "
                    f"the batches would differ, so resume with {name}={state[name]!r}"
                )
        epoch, position = state["epoch"], state["position"]
        in_range = type(epoch) is int and type(position) is int and epoch >= 0 and 0 <= position < len(self._items)
        if not in_range or position % self._items_per_step:
            raise ValueError(
                f"the sampler state stands at epoch {epoch!r}, position {position!r}, where no batch begins; "
                f"it is damaged"
            )
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _identity(self) -> dict[str, Any]:
        return {
            "digest": self._digest,
            "num_items": len(self._items),
            "items_per_step": self._items_per_step,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _order_of(self, epoch: int) -> Ints:
        if not self._shuffle:
            return np.arange(len(self._items), dtype=np.int64)
        # numpy keeps the raw bits of a bit generator stable between releases, but not what Generator.permutation makes
        # of them; a resumed run must not depend on the release.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(len(self._items))
        return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


def data_digest(items: Sequence[Item]) -> str:
    """SHA-256 of all tokens, targets and weights and of how they are grouped, as hexadecimal digits."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"item {len(item)};".encode())
        for example in item:
            digest.update(f"example {example.num_tokens};".encode())
            digest.update(np.ascontiguousarray(example.input_tokens, dtype="<i8").tobytes())
            digest.update(np.ascontiguousarray(example.target_tokens, dtype="<i8").tobytes())
            digest.update(np.ascontiguousarray(example.weights, dtype="<f8").tobytes())
    return digest.hexdigest()
