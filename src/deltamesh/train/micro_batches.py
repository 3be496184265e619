"""Inputs, outputs, and how items are dealt to dp ranks and packed into micro-batches. Pure: the same on every rank."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deltamesh.plan.cost import CostModel
from deltamesh.tree import build_edges, build_prefix_tree, build_stream
from deltamesh.tree.prefix_tree import Ints, check_integers, check_tokens

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardInput:
    """One sequence to run.

    Attributes:
        input_tokens: int [n], n >= 1, token ids.
        target_tokens: int [n], the token whose log-probability is wanted after each input token (-100: none), or None.
        hidden_states: whether the final (normed) hidden states of the sequence are wanted.

    Example:
        >>> ForwardInput(input_tokens=[5, 6, 7], target_tokens=[6, 7, -100]).hidden_states
        False
    """

    input_tokens: npt.ArrayLike
    target_tokens: npt.ArrayLike | None = None
    hidden_states: bool = False


Item = ForwardInput | Sequence[ForwardInput]
"""A top-level input: one sequence, or a group of sequences that stay in one micro-batch (they share prefixes)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardOutput:
    """What one `ForwardInput` gave, whole and in source order, on every cp and tp rank.

    Attributes:
        target_logprobs: [n] fp32 (fp64 in fp64 models), 0 where the target is ignored; None without targets.
        hidden_states: [n, D] in the model's dtype, or None if not wanted.
    """

    target_logprobs: "Tensor | None"
    hidden_states: "Tensor | None"


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass of a dp rank.

    Attributes:
        inputs: its inputs, groups laid flat.
        outputs: one for each input.
        indices: for each input, its place in the flat list of everything passed to `forward_micro_batches`.
        stats: `rows` (tokens computed), `tokens` (tokens given), `sequences`, `edges`, and `busiest_over_mean`, the
            planned work of the busiest cp slice over the mean.
    """

    inputs: list[ForwardInput]
    outputs: list[ForwardOutput]
    indices: list[int]
    stats: dict[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckedInput:
    """A validated `ForwardInput` and its place in the flat list."""

    index: int
    source: ForwardInput
    tokens: Ints
    targets: Ints | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Deal:
    """Micro-batches of every dp rank: `by_dp[d][m]` is a list of inputs; `digest` identifies all of it."""

    by_dp: list[list[list[CheckedInput]]]
    digest: str = field(default="")


def check_inputs(items: Iterable[Item], vocab_size: int) -> list[list[CheckedInput]]:
    """Validates every input before anything runs; one list per top-level item.

    Raises:
        ValueError, TypeError: no items, an empty group, an empty sequence, ids outside the vocabulary, targets of
            another length; the message names the input by its place in the flat list.
    """
    if isinstance(items, ForwardInput):
        raise TypeError("a single ForwardInput was given; pass a sequence of them, or of groups of them")
    items = list(items)
    if not items:
        raise ValueError("no inputs were given; pass at least one ForwardInput")
    checked: list[list[CheckedInput]] = []
    index = 0
    for place, item in enumerate(items):
        if not isinstance(item, ForwardInput | Iterable):
            raise TypeError(f"item {place} is a {type(item).__name__}; pass ForwardInput objects or groups of them")
        group = [item] if isinstance(item, ForwardInput) else list(item)
        if not group:
            raise ValueError(f"item {place} is an empty group; pass at least one ForwardInput in it")
        checked.append([])
        for source in group:
            if not isinstance(source, ForwardInput):
                raise TypeError(f"item {place} holds a {type(source).__name__}; pass ForwardInput objects")
            checked[-1].append(_check_input(source, index, vocab_size))
            index += 1
    return checked


def _check_input(source: ForwardInput, index: int, vocab_size: int) -> CheckedInput:
    if not isinstance(source.hidden_states, bool | np.bool_):
        raise TypeError(f"input {index}: hidden_states={source.hidden_states!r} is not True or False")
    tokens = check_tokens(source.input_tokens, what=f"input {index}: input_tokens")
    _check_vocabulary(tokens, vocab_size, f"input {index}: input_tokens")
    targets = None
    if source.target_tokens is not None:
        targets = check_integers(source.target_tokens, what=f"input {index}: target_tokens")
        if len(targets) != len(tokens):
            raise ValueError(
                f"input {index}: target_tokens has length {len(targets)}, input_tokens has length {len(tokens)}; "
                f"give one target per token ({IGNORE_INDEX} where there is none)"
            )
        _check_vocabulary(targets[targets != IGNORE_INDEX], vocab_size, f"input {index}: target_tokens")
    return CheckedInput(index=index, source=source, tokens=tokens, targets=targets)


def _check_vocabulary(ids: Ints, vocab_size: int, what: str) -> None:
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        raise ValueError(f"{what} holds {int(bad[0])}; token ids of this model are 0 to {vocab_size - 1}")


def deal(items: list[list[CheckedInput]], *, dp: int, max_rows: int, cost: CostModel) -> Deal:
    """Deals whole items to dp ranks by cost and packs each rank's items, in source order, into micro-batches.

    The costliest item goes first, always to the rank with the least work so far. A micro-batch is closed when the next
    item would take its rows (shared prefixes counted once) above `max_rows`; an item above it alone gets its own.

    Example:
        >>> source = [ForwardInput(input_tokens=[1, 2, 3]), ForwardInput(input_tokens=[1, 2, 4])]
        >>> [len(m) for m in deal(check_inputs(source, 9), dp=2, max_rows=8, cost=CostModel()).by_dp]
        [1, 1]
    """
    costs = [_item_cost(item, cost) for item in items]
    load = [0.0] * dp
    dealt: list[list[int]] = [[] for _ in range(dp)]
    for i in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        lightest = min(range(dp), key=lambda d: (load[d], d))
        load[lightest] += costs[i]
        dealt[lightest].append(i)
    by_dp = [_pack([items[i] for i in sorted(mine)], max_rows) for mine in dealt]
    return Deal(by_dp=by_dp, digest=_digest(items, by_dp))


def _item_cost(item: list[CheckedInput], cost: CostModel) -> float:
    tree = build_prefix_tree([x.tokens for x in item])
    edges = build_edges(tree, [x.targets for x in item])
    return float(cost.rows(build_stream(tree).position_T, edges.row_E).sum())


def _pack(items: list[list[CheckedInput]], max_rows: int) -> list[list[CheckedInput]]:
    """Greedy in source order; counts the rows that an item adds to the tree of its micro-batch."""
    if not items:
        return []
    flat = [x for item in items for x in item]
    tree = build_prefix_tree([x.tokens for x in flat])
    parent, length = tree.node_parent.tolist(), tree.node_length.tolist()
    end_nodes = iter(tree.sequence_node.tolist())
    batches: list[list[CheckedInput]] = []
    held: set[int] = set()
    rows = 0
    for item in items:
        path: set[int] = set()
        for _ in item:
            node = next(end_nodes)
            while node >= 0 and node not in path:
                path.add(node)
                node = parent[node]
        added = sum(length[node] for node in path - held)
        if not batches or rows + added > max_rows:
            batches.append([])
            held, rows = set(), 0
            added = sum(length[node] for node in path)
        batches[-1].extend(item)
        held |= path
        rows += added
    return batches


def _digest(items: list[list[CheckedInput]], by_dp: list[list[list[CheckedInput]]]) -> str:
    digest = hashlib.sha256()
    for x in (x for item in items for x in item):
        digest.update(np.int64(len(x.tokens)).tobytes() + x.tokens.tobytes())
        digest.update(b"-" if x.targets is None else x.targets.tobytes())
        digest.update(bytes([bool(x.source.hidden_states)]))
    digest.update(repr([[[x.index for x in m] for m in mine] for mine in by_dp]).encode())
    return digest.hexdigest()
