"""Long-lived local ranks for tests: a function runs on each of them inside a fresh gloo process group.

Starting processes costs imports, which a fork server does once; process groups are made and destroyed per run, so one
pool serves every topology up to its size.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from deltamesh.distributed.launch import start_fork_server
from deltamesh.testing.rank_worker import READY, Answer, Job, serve

T = TypeVar("T")

PRELOAD = (
    "__main__",
    "torch",
    "torch.distributed",
    "peft",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3_next.modeling_qwen3_next",
    "deltamesh.testing.rank_worker",
)
_START_SECONDS = 120.0
_GRACE_SECONDS = 10.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RanksFailed(RuntimeError):
    """Some ranks of a run failed; the text has their tracebacks, causes before consequences.

    Attributes:
        failures: the exceptions by rank.
    """

    def __init__(self, message: str, failures: dict[int, Exception]) -> None:
        super().__init__(message)
        self.failures = failures


class RankTimeout(TimeoutError):
    """A rank gave no answer in time and was killed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    stack_path: Path


class RankPool:
    """Up to `size` local processes that run functions as the ranks of a gloo world.

    Imports begin at once, in the background; workers start when a run first needs them, and use one CPU thread each. A
    worker that crashed or hung is killed, and replaced at the next run.

    Functions and their results are pickled, so a function is found by its module and name: it must be importable, which
    includes test modules and an `if __name__ == "__main__"` guarded script, and excludes lambdas and local functions.

    Args:
        size: the largest world size.
        preload: modules that the fork server imports once for all workers, if it is not running yet.

    Example:
        >>> def total(x: int) -> int:
        ...     import torch, torch.distributed as dist
        ...     t = torch.tensor(x + dist.get_rank())
        ...     dist.all_reduce(t)
        ...     return int(t)
        >>> with RankPool(4) as pool:  # doctest: +SKIP
        ...     pool.run(total, 4, 10)
        [46, 46, 46, 46]
    """

    def __init__(self, size: int, *, preload: Sequence[str] = PRELOAD) -> None:
        if size < 1:
            raise ValueError(f"size={size} is not positive; use the largest world size that a run needs")
        self.size = size
        self._workers: list[_Worker | None] = [None] * size
        self._runs = 0
        self._failed_order: list[int] = []
        with _one_thread():
            start_fork_server(preload)  # imports while the caller goes on
        self._directory = tempfile.TemporaryDirectory(prefix="deltamesh-ranks-")

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[T]:
        """Calls `fn(*args, **kwargs)` on ranks 0 to world_size - 1 and returns their results by rank.

        Each rank starts from `torch.manual_seed(0)` in a new world, which is destroyed afterwards.

        Raises:
            RanksFailed: the function failed on some ranks.
            TimeoutError: no rank failed, but some gave no answer within `timeout` seconds; has their stacks.
            ValueError: the world does not fit in the pool.
        """
        outcomes = self.outcomes(fn, world_size, *args, timeout=timeout, **kwargs)
        failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Exception)}
        if not failures:
            return outcomes  # type: ignore[return-value]
        message = _report(fn, failures, self._failed_order, world_size)
        if all(isinstance(failure, RankTimeout) for failure in failures.values()):
            raise RankTimeout(message)
        raise RanksFailed(message, failures)

    def outcomes(
        self, fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[T | Exception]:
        """As `run`, but a rank's exception is its outcome. It carries the remote traceback as a note.

        A rank that does not answer in time has a TimeoutError. Once a rank has failed, the others have 10 seconds.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size={world_size} does not fit in a pool of {self.size}; use 1..{self.size}")
        call = pickle.dumps((fn, args, kwargs))
        workers = self._started(world_size)
        self._runs += 1
        self._failed_order = []
        try:
            for rank, worker in enumerate(workers):
                job = Job(
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                    store_path=str(Path(self._directory.name) / f"store-{self._runs}"),
                    sys_path=tuple(sys.path),
                    call=call,
                )
                worker.connection.send_bytes(pickle.dumps(job))
            return self._collect(workers, timeout)
        except BaseException:  # interrupted: workers may be anywhere
            for rank in range(world_size):
                self._kill(rank)
            raise

    def close(self) -> None:
        """Ends the workers. The pool cannot be used afterwards."""
        for worker in self._workers:
            if worker is not None:
                worker.connection.close()
        for rank, worker in enumerate(self._workers):
            if worker is not None:
                worker.process.join(timeout=5)
                self._kill(rank)
        self._directory.cleanup()

    # ------------------------------------------------------------ workers

    def _started(self, world_size: int) -> list[_Worker]:
        """The first workers, alive and ready."""
        for rank in range(world_size):
            worker = self._workers[rank]
            if worker is not None and not worker.process.is_alive():
                self._kill(rank)
        new = [rank for rank in range(world_size) if self._workers[rank] is None]
        for rank in new:
            self._workers[rank] = self._start(rank)
        workers = [worker for worker in self._workers[:world_size] if worker is not None]
        for rank in new:
            if not workers[rank].connection.poll(_START_SECONDS) or workers[rank].connection.recv_bytes() != READY:
                raise RuntimeError(f"worker {rank} did not start within {_START_SECONDS:.0f} s")
        return workers

    def _start(self, rank: int) -> _Worker:
        context = get_context("forkserver")
        ours, theirs = context.Pipe()
        stack_path = Path(self._directory.name) / f"stacks-{rank}.txt"
        process = context.Process(target=serve, args=(theirs, str(stack_path)), name=f"rank-{rank}", daemon=True)
        process.start()
        theirs.close()
        return _Worker(process=process, connection=ours, stack_path=stack_path)

    def _kill(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker is not None:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()
            worker.process.close()
            self._workers[rank] = None

    # ------------------------------------------------------------ answers

    def _collect(self, workers: list[_Worker], timeout: float) -> list[Any]:
        pending: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
        outcomes: list[Any] = [None] * len(workers)
        start = time.monotonic()
        deadline = start + timeout
        while pending:
            answered = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                break
            for connection in answered:
                rank = pending.pop(connection)
                outcomes[rank] = self._receive(rank, workers[rank])
                if isinstance(outcomes[rank], Exception):
                    self._failed_order.append(rank)
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        waited = time.monotonic() - start
        for rank in pending.values():  # ask all of them first: a kill changes where its peers are
            os.kill(workers[rank].process.pid or 0, signal.SIGUSR1)
        for rank in pending.values():
            outcomes[rank] = RankTimeout(f"rank {rank} gave no answer within {waited:.1f} s and was killed")
            outcomes[rank].add_note(_read_stacks(workers[rank].stack_path))
            self._failed_order.append(rank)
        for rank in pending.values():
            self._kill(rank)
        return outcomes

    def _receive(self, rank: int, worker: _Worker) -> Any:
        try:
            answer: Answer = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join()
            code = worker.process.exitcode
            self._kill(rank)
            return RuntimeError(f"the process of rank {rank} ended with exit code {code} before it answered")
        outcome = pickle.loads(answer.payload)
        if answer.traceback is not None:
            outcome.add_note(answer.traceback)
        return outcome


def _report(fn: Callable[..., Any], failures: dict[int, Exception], order: list[int], world_size: int) -> str:
    """Every failed rank; those that only lost their peers come last and without traceback."""
    causes = [rank for rank in order if not _lost_its_peers(failures[rank])]
    ranks = ", ".join(str(rank) for rank in sorted(order))
    parts = [f"{getattr(fn, '__qualname__', fn)} failed on ranks {ranks} of {world_size}"]
    for rank in causes + [rank for rank in order if rank not in causes]:
        parts.append(f"--- rank {rank}: {type(failures[rank]).__qualname__}: {failures[rank]}")
        if rank in causes or not causes:
            parts += getattr(failures[rank], "__notes__", [])
    return "\n".join(parts)


def _lost_its_peers(error: Exception) -> bool:
    """Whether a connection broke, which is what happens to a rank whose peer failed."""
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


def _read_stacks(path: Path) -> str:
    """What the worker wrote on SIGUSR1, waiting up to a second for it."""
    for _ in range(20):
        time.sleep(0.05)
        if (text := path.read_text()).count("\n") > 1:
            break
    return text


@contextmanager
def _one_thread() -> Iterator[None]:
    """The fork server reads the number of threads from the environment when it imports torch."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
