"""Token rows of the benchmarks: groups of completions, agent traces, and the same lengths with nothing shared.

A sequence is (tokens, first target): the tokens from `first target` on are to be predicted, each from those before it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltamesh.train.micro_batches import IGNORE_INDEX, ForwardInput

Ints = npt.NDArray[np.int64]
Sequences = list[tuple[Ints, int]]


def group(rng: np.random.Generator, vocab: int, *, prompt: int, completions: int, length: int) -> Sequences:
    """Completions of one prompt; the completions are trained."""
    shared = rng.integers(0, vocab, prompt)
    return [(np.concatenate([shared, rng.integers(0, vocab, length)]), prompt) for _ in range(completions)]


def agent_trace(
    rng: np.random.Generator, vocab: int, *, prompt: int, turns: int, branches: int, answer: int, observation: int
) -> Sequences:
    """At each turn some branches of one answer each; the first goes on with an observation and the next turn.

    Each branch is a sequence of its own, with the whole trace up to it, and its own answer is trained.
    """
    path = rng.integers(0, vocab, prompt)
    rows: Sequences = []
    for _ in range(turns):
        answers = [rng.integers(0, vocab, answer) for _ in range(branches)]
        rows += [(np.concatenate([path, a]), len(path)) for a in answers]
        path = np.concatenate([path, answers[0], rng.integers(0, vocab, observation)])
    return rows


def unshared(sequences: Sequences) -> Sequences:
    """The same lengths and targets, but every sequence begins with another token, so that nothing is shared."""
    out = []
    for first, (tokens, trained) in enumerate(sequences):
        tokens = tokens.copy()
        tokens[0] = first
        out.append((tokens, trained))
    return out


def targets_of(tokens: Ints, first: int) -> Ints:
    """int64 [n]: after each token the next one where that is trained, else -100."""
    targets = np.append(tokens[1:], IGNORE_INDEX)
    targets[: first - 1] = IGNORE_INDEX
    return targets


def forward_inputs(sequences: Sequences) -> list[ForwardInput]:
    """As inputs of `TrainerRank.forward_micro_batches`."""
    return [ForwardInput(input_tokens=t, target_tokens=targets_of(t, first)) for t, first in sequences]


def num_tokens(sequences: Sequence[tuple[Ints, int]]) -> int:
    """Tokens of all sequences, shared ones counted in each."""
    return sum(len(tokens) for tokens, _ in sequences)
