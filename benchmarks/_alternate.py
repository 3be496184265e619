"""Times two ways of doing one thing in turns, so that whatever else the machine does meets both alike."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def alternate(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each work over `repeats` rounds, after one round that is not counted.

    With one thread these are processor seconds, which other processes of the machine hardly disturb; with more,
    wall seconds.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in works}
    for lap in range(repeats + 1):
        for name, work in works.items():
            start = clock()
            work()
            if lap:
                times[name].append(clock() - start)
    return {name: statistics.median(laps) for name, laps in times.items()}


def report(name: str, rows: list[dict[str, Any]], *, repeats: int) -> None:
    """Prints the rows as a table and writes benchmarks/results/<name>.json."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
    threads = torch.get_num_threads()
    clock = "processor" if threads == 1 else "wall"
    print(f"medians of {repeats} alternating runs, {clock} time, {threads} threads, torch {torch.__version__}")
    RESULTS.mkdir(exist_ok=True)
    facts = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "repeats": repeats,
        "threads": threads,
        "clock": clock,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": rows,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
