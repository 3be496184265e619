"""How `gpu.py` measures: works in turns, their memory, when to stop, and processes side by side."""

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _gpu_checks import Sizes, relative_error, within
from torch import Tensor

LEAST_LAPS = 5
# Two results in bf16 whose rounding differs; the library also rounds state gradients, which costs g's gradient 1%.
PEER_BOUND = 5e-2
Work = Callable[[], Sequence[Tensor] | None]


class OutOfTime(Exception):
    """A case was cut short before it had enough laps."""


class PeersDiffer(Exception):
    """Two ways to compute one thing gave two results."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How cases are measured.

    Attributes:
        device: where.
        sizes: as `gpu.SIZES`.
        deadline: of `time.perf_counter`; no lap starts later, apart from those a case needs to have any result.
        only: run this work once, to compile its kernels, and measure nothing.
    """

    device: torch.device
    sizes: Sizes
    deadline: float = float("inf")
    only: str | None = None


def synchronize(device: torch.device) -> None:
    """Waits for all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lap_ms(work: Work, device: torch.device) -> tuple[float, float]:
    """Milliseconds until the device was done, and until Python was."""
    synchronize(device)
    on_device = device.type == "cuda"
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_device else []
    begin = time.perf_counter()
    if on_device:
        events[0].record()
    work()
    launched = 1e3 * (time.perf_counter() - begin)
    if not on_device:
        return launched, launched
    events[1].record()
    synchronize(device)
    return events[0].elapsed_time(events[1]), launched


def peak_mib(work: Work, device: torch.device) -> float | None:
    """What the work allocates at most beyond what is there before it; None where nobody counts."""
    if device.type != "cuda":
        work()
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    synchronize(device)
    return round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1)


def compare(results: dict[str, Sequence[Tensor]]) -> dict[str, float]:
    """The largest relative error of each peer's outputs against the first's.

    Raises:
        PeersDiffer: one is above the bound, or not finite.
    """
    (first, wanted), *others = results.items()
    worst: dict[str, float] = {}
    for name, found in others:
        errors = {str(n): relative_error(a, b) for n, (a, b) in enumerate(zip(found, wanted, strict=True))}
        if not within(errors, PEER_BOUND):
            raise PeersDiffer(f"{name!r} against {first!r}: relative errors {errors}, at most {PEER_BOUND}")
        worst[name] = max(errors.values())
    return worst


def measure(works: dict[str, Work], run: Run, laps: int) -> dict[str, Any]:
    """Times the works in turns, after two laps that do not count: one compiles and tunes, one counts memory.

    Raises:
        OutOfTime: the deadline came before `LEAST_LAPS` laps.
        PeersDiffer: see `compare`; of works that return tensors.
    """
    if run.only is not None:
        works[run.only]()
        synchronize(run.device)
        return {}
    results = {}
    for name, work in works.items():
        if time.perf_counter() > run.deadline:
            raise OutOfTime("before its first lap was over")
        found = work()
        if found is not None:
            results[name] = found
    worst = compare(results) if len(results) > 1 else {}
    results.clear()
    rows: dict[str, dict[str, Any]] = {name: {"peak_mib": peak_mib(work, run.device)} for name, work in works.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    done = 0
    while done < max(laps, LEAST_LAPS):
        if time.perf_counter() > run.deadline:
            if done < LEAST_LAPS:
                raise OutOfTime(f"after {done} of {LEAST_LAPS} laps")
            break
        for name, work in works.items():
            times[name].append(lap_ms(work, run.device))
        done += 1
    for name, row in rows.items():
        row["ms"], row["launched_ms"] = (round(statistics.median(t), 3) for t in zip(*times[name]))
        if name in worst:
            row["error_against_first"] = worst[name]
    return {**rows, "laps": done}


def side_by_side(commands: Sequence[Sequence[str]], *, limit_s: float, at_once: int) -> dict[str, int]:
    """Runs processes, so many at once; returns how many went well, failed, and were ended or not begun in time."""
    environment = os.environ | {"FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
    todo, running = list(commands), list[subprocess.Popen[bytes]]()
    counts = {"done": 0, "failed": 0, "out_of_time": 0}
    end = time.perf_counter() + limit_s
    while (todo or running) and time.perf_counter() < end:
        while todo and len(running) < at_once:
            running.append(subprocess.Popen(todo.pop(0), env=environment, stdout=subprocess.DEVNULL))
        time.sleep(0.05)
        for process in [p for p in running if p.poll() is not None]:
            running.remove(process)
            counts["failed" if process.returncode else "done"] += 1
    counts["out_of_time"] = len(todo) + len(running)
    for process in running:
        process.kill()
        process.wait()
    return counts
