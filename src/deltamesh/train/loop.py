"""The training loop: one optimizer step for each batch, with a record of what happened."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltamesh.data import Batch, Example
from deltamesh.train.losses import cross_entropy
from deltamesh.train.micro_batches import ForwardInput, MicroBatch
from deltamesh.train.optim import AdamParams
from deltamesh.train.trainer_rank import TrainerRank


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step; the same on every rank, except for the seconds.

    Attributes:
        step: number of the step, from 1.
        epoch: epoch of its batch, from 0.
        loss_sum: the loss, `-(weights * log p).sum()`, over the whole batch.
        loss_per_token: `loss_sum / loss_tokens`.
        tokens: tokens of all sequences, shared ones counted in each.
        loss_tokens: tokens with a target.
        sequences: sequences of the batch.
        rows: tokens that were computed, shared prefixes once.
        sharing: `tokens / rows`.
        grad_norm: global L2 norm of the gradient of `loss_per_token`, before clipping.
        skipped: the gradients were not finite, so nothing was updated.
        learning_rate: of this step.
        seconds: wall time.
        tokens_per_second: `tokens / seconds`.
    """

    step: int
    epoch: int
    loss_sum: float
    loss_per_token: float
    tokens: int
    loss_tokens: int
    sequences: int
    rows: int
    sharing: float
    grad_norm: float
    skipped: bool
    learning_rate: float
    seconds: float
    tokens_per_second: float


def forward_inputs(items: Sequence[Sequence[Example]]) -> list[list[ForwardInput]]:
    """The items as nested inputs of `TrainerRank.forward_micro_batches`; a group stays together.

    Example:
        >>> import numpy as np
        >>> from deltamesh.data.examples import example_from_targets
        >>> example = example_from_targets(np.array([1, 2]), np.array([2, -100]))
        >>> forward_inputs([(example,)])[0][0].target_tokens.tolist()
        [2, -100]
    """
    return [[ForwardInput(input_tokens=e.input_tokens, target_tokens=e.target_tokens) for e in item] for item in items]


def train_steps(
    rank: TrainerRank, batches: Iterable[Batch], optimizer: AdamParams, *, first_step: int = 1
) -> Iterator[StepRecord]:
    """Takes one step per batch with the weighted cross entropy of its examples and yields its record.

    The gradient is that of the loss per trained token, so the learning rate does not depend on how much a batch holds.

    Args:
        rank: this rank; all ranks iterate in step.
        batches: the same on every rank, for example a `BatchSampler`.
        optimizer: settings of every step.
        first_step: number of the first step.

    Raises:
        ValueError, RankDisagreement: see `TrainerRank.forward_micro_batches`.

    Example:
        >>> from deltamesh.data import BatchSampler
        >>> for record in train_steps(rank, BatchSampler(items, items_per_step=4), AdamParams()):  # doctest: +SKIP
        ...     print(record.loss_per_token)
    """
    for step, batch in enumerate(batches, start=first_step):
        start = time.perf_counter()
        examples = [example for item in batch.items for example in item]
        loss_sum: float | Tensor = 0.0  # a tensor after the first micro-batch: read once, at the step's end
        own_rows = 0.0
        for micro_batch in rank.forward_micro_batches(forward_inputs(batch.items)):
            loss = batch_loss(micro_batch, examples)
            loss.backward()
            loss_sum = loss_sum + loss.detach().double()
            own_rows += micro_batch.stats["rows"]
        totals = rank.reduce({"loss": loss_sum, "rows": own_rows})
        loss_tokens = sum(example.num_loss_tokens for example in examples)
        result = rank.optim_step(optimizer, scale_grads=1 / loss_tokens)
        seconds = time.perf_counter() - start
        tokens, rows = sum(example.num_tokens for example in examples), round(totals["rows"])
        yield StepRecord(
            step=step,
            epoch=batch.epoch,
            loss_sum=totals["loss"],
            loss_per_token=totals["loss"] / loss_tokens,
            tokens=tokens,
            loss_tokens=loss_tokens,
            sequences=len(examples),
            rows=rows,
            sharing=tokens / rows,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            learning_rate=optimizer.learning_rate,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
        )


def batch_loss(micro_batch: MicroBatch, examples: Sequence[Example]) -> Tensor:
    """The summed weighted cross entropy of a micro-batch; `examples` are all of the batch, in flat order."""
    losses = []
    for index, output in zip(micro_batch.indices, micro_batch.outputs, strict=True):
        logprobs = output.target_logprobs
        assert logprobs is not None
        weights = torch.from_numpy(examples[index].weights).to(logprobs)
        losses.append(cross_entropy(logprobs, weights=weights))
    return torch.stack(losses).sum()
