"""Local ranks without torchrun, and the entry of a rank however it was started.

`launch` starts processes with torch's elastic agent, so a rank finds the same environment as under torchrun. torch is
imported on first use: a launcher's parent imports it while the fork server imports it for the children.
"""

import json
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_LOST_PEER = ("Connection reset by peer", "Connection closed by peer", "remote process exited")
_HOST = "127.0.0.1"
_PRELOAD = ("__main__", "torch", "torch.distributed", "deltamesh.distributed.launch")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE")
# Set by the agent for each rank, so not copied from the parent's environment.
_AGENT_PREFIXES = ("MASTER_", "TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")

_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class WorkerFailed(RuntimeError):
    """A rank failed; the text is its error and traceback. The other ranks were ended.

    Attributes:
        rank: the rank that failed first.
        exit_code: the exit status for the launching command, at least 1.
    """

    def __init__(self, rank: int, text: str, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed: {text}")
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, str(self).split(" failed: ", 1)[1], self.exit_code)


def is_worker(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a rank that torchrun or `launch` started.

    Raises:
        RuntimeError: only one of RANK and WORLD_SIZE is set.
    """
    environ = os.environ if environ is None else environ
    missing = [name for name in _RANK_VARIABLES if name not in environ]
    if len(missing) == 1:
        raise RuntimeError(
            f"{missing[0]} is not set in the environment but the other of RANK and WORLD_SIZE is; set both (torchrun "
            f"does), or neither to start ranks from here"
        )
    return not missing


def init_worker(*, device: Literal["cpu", "cuda"] | None = None, timeout: timedelta | None = None) -> "torch.device":
    """Initialises torch.distributed from the environment and returns this rank's device.

    Args:
        device: "cpu" for gloo, "cuda" for NCCL on device LOCAL_RANK; by default CUDA where there is one.
        timeout: how long a collective may wait, torch's default if None.

    Raises:
        RuntimeError: this process is no rank, or there is no CUDA device for its LOCAL_RANK.

    Example, under `torchrun --nproc-per-node 4` or in a function given to `launch`:
        >>> device = init_worker()  # doctest: +SKIP
        >>> mesh = build_mesh(Topology(tp=2, cp=2))  # doctest: +SKIP
    """
    import torch
    import torch.distributed as dist

    if not is_worker():
        raise RuntimeError(
            "RANK and WORLD_SIZE are not set: this process is no rank; start it with torchrun or through "
            "deltamesh.distributed.launch.launch"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        if os.environ.get("MASTER_ADDR") in (_HOST, "localhost"):
            use_loopback()
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"LOCAL_RANK={local_rank}, but this host has {torch.cuda.device_count()} CUDA devices; start fewer ranks "
            f"per host, or use device='cpu'"
        )
    place = torch.device("cuda", local_rank)
    torch.cuda.set_device(place)
    dist.init_process_group("nccl", device_id=place, timeout=timeout)
    return place


def shutdown() -> None:
    """Destroys this rank's process groups, if there are any."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def use_loopback() -> None:
    """Lets gloo use the loopback interface, so that local ranks do not depend on how the host's name resolves."""
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def threads_per_process(processes: int, environ: Mapping[str, str] | None = None) -> int:
    """OMP_NUM_THREADS if it is set, otherwise an equal share of this process's cores, at least 1."""
    environ = os.environ if environ is None else environ
    if text := environ.get("OMP_NUM_THREADS", ""):
        return int(text)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def start_fork_server(preload: Sequence[str]) -> None:
    """Starts this process's fork server, which imports `preload` in the background; a running one stays as it is.

    Its processes start with SIGINT blocked: a terminal sends Ctrl-C to all, and their parent is the one to end them.
    """
    get_context("forkserver").set_forkserver_preload(list(preload))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def accept_interrupts(action: signal.Handlers) -> None:
    """Ends the blocking of SIGINT in a process of the fork server; `action` is SIG_DFL (end) or SIG_IGN."""
    signal.signal(signal.SIGINT, action)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def launch(fn: Callable[..., T], *args: Any, processes: int) -> list[T]:
    """Calls `fn(*args)` in `processes` new local processes and returns their results by rank.

    Each finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun, and
    calls `init_worker` itself. Ctrl-C and a failing rank end all of them. The function, its arguments and its results
    are pickled.

    Raises:
        WorkerFailed: a rank failed; has the first failure's traceback.
        ValueError: `processes` is not positive.
        RuntimeError: called on a rank.

    Example:
        >>> launch(os.getppid, processes=2)  # doctest: +SKIP
        [4242, 4242]
    """
    if processes < 1:
        raise ValueError(f"processes={processes} is not positive; give the number of ranks, dp * cp * tp")
    if is_worker():
        raise RuntimeError(
            "launch() was called on a rank (RANK and WORLD_SIZE are set); ranks are started once, outside"
        )
    threads = threads_per_process(processes)
    start_fork_server(_PRELOAD)  # imports torch beside this process, which imports it in the next lines
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="deltamesh-launch-") as directory, _undisturbed():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            role="deltamesh",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{_HOST}:0",
            local_addr=_HOST,
            max_restarts=0,
            monitor_interval=0.05,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=directory),
        )
        environ = {name: text for name, text in os.environ.items() if not name.startswith(_AGENT_PREFIXES)}
        environ["OMP_NUM_THREADS"] = str(threads)
        try:
            results = elastic_launch(config, _worker)(directory, environ, threads, fn, args)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stopped.sigval) from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise _first_failure(directory, rank, failure.exitcode) from None
    return [pickle.loads(results[rank]) for rank in range(processes)]


def _worker(
    directory: str, environ: dict[str, str], threads: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> bytes:
    """Runs in each new process. An error goes to a file for the launcher, which prints one instead of all."""
    accept_interrupts(signal.SIG_DFL)  # no traceback from each process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environ)
    import torch

    torch.set_num_threads(threads)
    try:
        return pickle.dumps(fn(*args))
    except SystemExit as error:
        if not error.code:
            return pickle.dumps(None)
        _record(directory, f"exit status {error.code}", "", error.code if isinstance(error.code, int) else 1)
    except BaseException as error:  # not swallowed: the launcher raises it
        _record(directory, f"{type(error).__qualname__}: {error}", traceback.format_exc(), 1)
    sys.exit(1)


def _end_with_parent() -> None:
    """A launcher that was killed cannot end its ranks, so they watch it."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _record(directory: str, summary: str, trace: str, exit_code: int) -> None:
    rank = int(os.environ["RANK"])
    path = Path(directory) / f"failed-{rank}.json"
    record = {"time": time.time_ns(), "rank": rank, "text": f"{summary}\n{trace}".rstrip(), "exit_code": exit_code}
    path.with_suffix(".part").write_text(json.dumps(record))
    path.with_suffix(".part").rename(path)


def _first_failure(directory: str, rank: int, exit_code: int) -> WorkerFailed:
    """The earliest recorded failure: later ones are mostly ranks that lost their peer.

    Args:
        directory: of the records.
        rank, exit_code: what the agent noticed first. A killed process leaves no record, and those of its peers
            only say that they lost it.
    """
    records = [json.loads(path.read_text()) for path in Path(directory).glob("failed-*.json")]
    killed = exit_code < 0 and exit_code != -signal.SIGTERM
    if not records or (killed and all(record["rank"] != rank for record in records)):
        return _without_text(rank, exit_code)
    first = min(records, key=lambda record: record["time"])
    text = first["text"]
    if any(sign in text for sign in _LOST_PEER):
        text += (
            "\nThis rank lost a peer that left no error before it: that process may have been killed, for example by "
            "the system for lack of memory"
        )
    return WorkerFailed(first["rank"], text, max(1, first["exit_code"]))


def _without_text(rank: int, exit_code: int) -> WorkerFailed:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = "; the system may have run out of memory" if -exit_code == signal.SIGKILL else ""
        return WorkerFailed(rank, f"its process was ended by {name}{hint}", 128 - exit_code)
    return WorkerFailed(rank, f"its process ended with exit status {exit_code} and no error text", max(1, exit_code))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps the agent's log lines off the screen, and its signal handlers and variables out of the caller's process."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    propagate, quiet, variables = [logger.propagate for logger in loggers], logging.NullHandler(), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(quiet)
    try:
        yield
    finally:
        for logger, before in zip(loggers, propagate):
            logger.removeHandler(quiet)
            logger.propagate = before
        os.environ.clear()
        os.environ.update(variables)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
