"""Agreement: ranks compare what they are about to do before the first collective that depends on it.

An error on one rank is raised on all of them with the same text, and a difference between ranks is an error on all:
nobody waits for a peer that will not come.
"""

from collections.abc import Callable
from typing import TypeVar

from deltamesh.distributed.collectives import Group, all_gather_object

T = TypeVar("T")


class RankDisagreement(RuntimeError):
    """Ranks that must do the same were given different work, or only some of them failed; same text on every rank."""


def agree(compute: Callable[[], T], digest: Callable[[T], str], group: Group, *, what: str) -> T:
    """Runs `compute` and returns its value once all ranks of `group` have computed the same.

    Args:
        compute: local work without collectives.
        digest: a short string; equal values have equal digests.
        group: the ranks that must agree. All of them call this.
        what: names the value in errors, for example "the plan of micro-batch 3".

    Raises:
        Exception: whatever `compute` raised, if it raised the same on every rank.
        RankDisagreement: if it raised on some ranks only, or if digests differ.

    Example:
        >>> agree(lambda: 7, str, Group.single(), what="the answer")
        7
    """
    error: Exception | None = None
    try:
        value = compute()
        mine = ("ok", digest(value))
    except Exception as caught:  # not swallowed: raised below, on every rank
        error = caught
        mine = ("error", f"{type(caught).__name__}: {caught}")
    answers = all_gather_object(mine, group)
    if all(answer == mine for answer in answers):
        if error is not None:
            raise error
        return value
    raise RankDisagreement(_explain(answers, what)) from error


def _explain(answers: list[tuple[str, str]], what: str) -> str:
    failures = [f"rank {r}: {text}" for r, (kind, text) in enumerate(answers) if kind == "error"]
    if failures:
        return f"{what} failed on {len(failures)} of {len(answers)} ranks; " + "; ".join(failures)
    holders: dict[str, list[int]] = {}
    for r, (_, text) in enumerate(answers):
        holders.setdefault(text, []).append(r)
    versions = "; ".join(f"{text[:12]} on ranks {ranks}" for text, ranks in holders.items())
    return (
        f"{what} differs between ranks ({versions}); every rank must be given the same inputs in the same order "
        "(check seeds, data files and filters that depend on the rank)"
    )
