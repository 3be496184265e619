"""Time the prefix tree: `python benchmarks/tree.py` prints a table and writes benchmarks/results/tree.json.

Cases: random sequences, all equal, a comb (sequence i shares i tokens with the next), all but the last token shared.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from deltamesh.tree import PrefixTree, all_sequence_rows, build_edges, build_prefix_tree, build_stream
from deltamesh.tree.prefix_tree import Ints


def random_case(num: int, length: int) -> list[Ints]:
    """Unrelated sequences."""
    return list(np.random.default_rng(0).integers(0, 150_000, size=(num, length)))


def equal_case(num: int, length: int) -> list[Ints]:
    """One sequence, repeated."""
    return [np.arange(length)] * num


def comb_case(num: int, length: int) -> list[Ints]:
    """Sequence i follows a spine for i tokens, then goes its own way."""
    spine = np.arange(length)
    rows = np.where(spine < np.arange(num)[:, None], spine, spine + length * (1 + np.arange(num)[:, None]))
    return list(rows[np.random.default_rng(1).permutation(num)])


def last_token_case(num: int, length: int) -> list[Ints]:
    """All tokens but the last are shared."""
    rows = np.tile(np.arange(length), (num, 1))
    rows[:, -1] += np.arange(num)
    return list(rows)


CASES: dict[str, Callable[[int, int], list[Ints]]] = {
    "random": random_case,
    "all equal": equal_case,
    "comb": comb_case,
    "all but last shared": last_token_case,
}


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of `work`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, num: int, length: int, repeats: int) -> dict[str, object]:
    """One row of the table."""
    sequences = CASES[name](num, length)
    targets = [np.append(row[1:], -100) for row in sequences]
    tree: PrefixTree = build_prefix_tree(sequences)
    return {
        "case": name,
        "sequences": num,
        "tokens": num * length,
        "rows": tree.num_rows,
        "nodes": tree.num_nodes,
        "build_s": seconds(lambda: build_prefix_tree(sequences), repeats),
        "stream_s": seconds(lambda: build_stream(tree), repeats),
        "sequence_rows_s": seconds(lambda: all_sequence_rows(tree), repeats),
        "edges_s": seconds(lambda: build_edges(tree, targets), repeats),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tree.json")
    args = parser.parse_args(argv)
    results = [measure(name, args.sequences, args.length, args.repeats) for name in CASES]
    print(f"{'case':<22}{'rows':>10}{'nodes':>8}{'build s':>10}{'stream s':>10}{'rows s':>10}{'edges s':>10}")
    for r in results:
        times = "".join(f"{r[key]:>10.4f}" for key in ("build_s", "stream_s", "sequence_rows_s", "edges_s"))
        print(f"{r['case']:<22}{r['rows']:>10}{r['nodes']:>8}{times}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "repeats": args.repeats}
    args.out.write_text(json.dumps({**versions, "statistic": "median", "results": results}, indent=2) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
