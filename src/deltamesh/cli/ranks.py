"""Running a command's function on ranks: started from here, or, under torchrun, this process being one of them.

Rank 0 speaks. Under torchrun every rank runs the whole command and meets the same errors; the others give rank 0 the
time to say what is wrong, and speak only if it did not.
"""

import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from deltamesh.cli.errors import CommandError, user_errors
from deltamesh.distributed.launch import WorkerFailed, init_worker, is_worker, launch, shutdown

T = TypeVar("T")

_PATIENCE_SECONDS = 5.0


def under_launcher() -> bool:
    """Whether this process is a rank that torchrun (or `on_ranks`) started.

    Raises:
        CommandError: the environment says so by half.
    """
    with user_errors(RuntimeError):
        return is_worker()


def rank_here() -> int:
    """This process's rank; 0 outside of a launcher."""
    return int(os.environ.get("RANK", 0))


def say(text: str) -> None:
    """Prints a line on rank 0 only."""
    if rank_here() == 0:
        print(text, flush=True)


def complain(command: str, text: str) -> None:
    """Prints an error on stderr, once for all ranks of a launcher."""
    rank = rank_here()
    if rank > 0:
        time.sleep(_PATIENCE_SECONDS)  # the launcher ends this process as soon as rank 0 has spoken
        command = f"rank {rank}: {command}"
    print(f"{command}: {text}", file=sys.stderr, flush=True)


def world_size(processes: int | None) -> int | None:
    """The number of ranks as torchrun or `--processes` says it; None if neither does.

    Raises:
        CommandError: they differ.
    """
    if processes is not None and processes < 1:
        raise CommandError(f"processes={processes} is not positive; give the number of ranks, dp x cp x tp")
    if not under_launcher():
        return processes
    given = int(os.environ["WORLD_SIZE"])
    if processes not in (None, given):
        raise CommandError(
            f"processes={processes}, but the launcher started {given} ranks; leave processes out under torchrun"
        )
    return given


def on_ranks(function: Callable[..., T], *args: Any, processes: int) -> T:
    """Runs `function(*args)` on every rank and returns rank 0's result (under torchrun: this rank's).

    One process runs it here. A function that is sent to new processes must be importable, and its arguments picklable.

    Raises:
        CommandError: a rank raised one.
        WorkerFailed: a rank failed otherwise; all others were ended.
    """
    if under_launcher():
        return _on_this_rank(function, args)
    if processes == 1:
        return function(*args)
    try:
        results: list[T] = launch(_on_this_rank, function, args, processes=processes)
    except WorkerFailed as error:
        refusal = re.search(r"failed: CommandError: (.*?)\nTraceback ", str(error), re.DOTALL)
        if refusal is None:
            raise
        raise CommandError(refusal[1]) from error
    return results[0]


def _on_this_rank(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    init_worker()
    result = function(*args)
    # Not after an error: a peer would lose its connection, and its complaint would come before the cause.
    shutdown()
    return result
