"""One rank of a `RankPool`: receives a call, runs it inside a fresh process group, answers, and waits for the next."""

import faulthandler
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from deltamesh.distributed.launch import accept_interrupts, use_loopback

READY = b"ready"


class RemoteError(RuntimeError):
    """Stands for a rank's exception that cannot be pickled; the text names the original type."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call on one rank.

    Attributes:
        store_path: file through which the ranks of this run find each other; no other run has the same.
        call: the pickled (function, args, kwargs).
    """

    rank: int
    world_size: int
    timeout: float
    store_path: str
    sys_path: tuple[str, ...]
    call: bytes


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The pickled value or exception of a call, with the exception's traceback as text."""

    payload: bytes
    traceback: str | None


def serve(connection: Connection, stack_path: str) -> None:
    """Runs in the worker process until the pool closes its end of the connection.

    SIGUSR1 makes the worker write its threads' Python stacks to `stack_path`, even while it hangs in a collective.
    """
    accept_interrupts(signal.SIG_IGN)  # Ctrl-C is the pool's to handle: it kills its workers
    torch.set_num_threads(1)
    with open(stack_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send_bytes(READY)
        while True:
            try:
                job = pickle.loads(connection.recv_bytes())
                connection.send_bytes(pickle.dumps(_answer(job)))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return


def _answer(job: Job) -> Answer:
    sys.path[:] = job.sys_path
    try:
        with _process_group(job):
            function, args, kwargs = pickle.loads(job.call)
            payload = pickle.dumps(_call(function, args, kwargs))
        return Answer(payload=payload, traceback=None)
    except BaseException as error:  # not swallowed: it is the answer, and the pool raises it
        text = traceback.format_exc()
        return Answer(payload=_dump_error(error), traceback=text)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the call from the same random state and defaults, whatever ran in this process before."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    return function(*args, **kwargs)


@contextmanager
def _process_group(job: Job) -> Iterator[None]:
    use_loopback()
    store = dist.FileStore(job.store_path, job.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo",
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        # The pool ends a run that takes too long, and can say which ranks hang; it must not be outrun by gloo's error.
        timeout=timedelta(seconds=job.timeout + 60),
    )
    try:
        # Without this, a rank whose function fails at once closes connections that its peers are still making, and they
        # report that instead of their own outcome.
        store.set(f"connected/{job.rank}", "")
        store.wait([f"connected/{rank}" for rank in range(job.world_size)])
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _dump_error(error: BaseException) -> bytes:
    """The exception pickled, or a RemoteError where the exception would not come back as itself."""
    if isinstance(error, Exception):
        try:
            dumped = pickle.dumps(error)
            if type(pickle.loads(dumped)) is type(error):
                return dumped
        except Exception as cause:
            return pickle.dumps(RemoteError(f"{_describe(error)} (not picklable: {cause})"))
    return pickle.dumps(RemoteError(_describe(error)))


def _describe(error: BaseException) -> str:
    return f"{type(error).__qualname__}: {error}"
