"""Agreement: ranks compare what they are about to do before the first collective that depends on it.

An error on one rank is raised on all of them with the same text, and a difference between ranks is an error on all:
nobody waits for a peer that will not come.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deltamesh.distributed.collectives import Group, all_gather_object

T = TypeVar("T")

_SHOWN = 60


class RankDisagreement(RuntimeError):
    """Ranks that must do the same were given different work, or only some of them failed; same text on every rank."""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What one rank says: where it is, and what it has, or its error."""

    what: str
    digest: str | dict[str, str]
    error: str | None


def agree(compute: Callable[[], T], digest: Callable[[T], str | Mapping[str, object]], group: Group, *, what: str) -> T:
    """Runs `compute` and returns its value once all ranks of `group` have computed the same.

    Args:
        compute: local work without collectives.
        digest: of the value; equal values have equal digests. A mapping is compared item by item, and the error names
            the items that differ.
        group: the ranks that must agree. All of them call this.
        what: names the value in errors, for example "the plan of micro-batch 3".

    Raises:
        Exception: whatever `compute` raised, if it raised the same on every rank.
        RankDisagreement: if it raised on some ranks only, if digests differ, or if ranks are at different points.

    Example:
        >>> agree(lambda: 7, str, Group.single(), what="the answer")
        7
    """
    error: Exception | None = None
    try:
        value = compute()
        found = digest(value)
        told = found if isinstance(found, str) else {name: repr(item) for name, item in found.items()}
        mine = _Answer(what=what, digest=told, error=None)
    except Exception as caught:  # not swallowed: raised below, on every rank
        error = caught
        mine = _Answer(what=what, digest="", error=f"{type(caught).__name__}: {caught}")
    answers: list[_Answer] = all_gather_object(mine, group)
    if all(answer == mine for answer in answers):
        if error is not None:
            raise error
        return value
    raise RankDisagreement(_explain(answers)) from error


def _explain(answers: Sequence[_Answer]) -> str:
    """The same text on every rank: it is made of all answers and nothing else."""
    failures = [f"rank {r}: {a.error}" for r, a in enumerate(answers) if a.error is not None]
    places = {a.what for a in answers}
    if failures:
        return f"{' or '.join(sorted(places))} failed on {len(failures)} of {len(answers)} ranks; " + "; ".join(
            failures
        )
    if len(places) > 1:
        return (
            f"ranks are at different points of the program ({_holders([a.what for a in answers])}); every rank must "
            "make the same calls in the same order"
        )
    digests = [a.digest for a in answers]
    if all(isinstance(d, dict) for d in digests):
        names = sorted({name for d in digests for name in d})
        columns = {name: [d.get(name, "missing") for d in digests if isinstance(d, dict)] for name in names}
        differing = [f"{name}: {_holders(column)}" for name, column in columns.items() if len(set(column)) > 1]
        return f"{places.pop()} differs between ranks ({'; '.join(differing)}); every rank must be given the same"
    return (
        f"{places.pop()} differs between ranks ({_holders([str(d)[:12] for d in digests])}); every rank must be given "
        "the same inputs in the same order (check seeds, data files and filters that depend on the rank)"
    )


def _holders(values: Sequence[str]) -> str:
    """Who has what, as "X on ranks [0, 2]; Y on ranks [1]"."""
    holders: dict[str, list[int]] = {}
    for r, value in enumerate(values):
        holders.setdefault(value, []).append(r)
    short = {value: value if len(value) <= _SHOWN else value[:_SHOWN] + "..." for value in holders}
    return "; ".join(f"{short[value]} on ranks {ranks}" for value, ranks in holders.items())
