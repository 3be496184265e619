"""Does sharing prefixes pay? `python benchmarks/prefix_sharing.py` writes benchmarks/results/prefix_sharing.json.

Whole models (tiny, and 6 layers of width 512) with a LoRA of rank 8, forward, loss and backward of one process:

- data that shares prefixes, against the same lengths with another first token in every sequence, so that nothing is
  shared; the speed-up is held against the ratio of tokens to computed rows;
- sequences that share nothing, in micro-batches, against each of them alone: what trees cost where they give nothing.

Only completions are trained, so logits are no fewer where prefixes are shared. The C library is told to keep freed
memory: left alone, it returns a large micro-batch's activations to the system and faults their pages in again, which is
a cost of the size of micro-batches (6% at 4,096 rows), not of trees.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _alternate import alternate, report
from _data import Sequences, agent_trace, forward_inputs, group, unshared
from _model import trainer, write_model

from deltamesh.train.micro_batches import Item
from deltamesh.train.trainer_rank import TrainerRank


def passes(rank: TrainerRank, items: list[Item]) -> dict[str, float]:
    """Forward, loss and backward of all items; rows, tokens and micro-batches."""
    stats = {"rows": 0.0, "tokens": 0.0, "micro-batches": 0.0}
    for batch in rank.forward_micro_batches(items):
        losses = [-out.target_logprobs.sum() for out in batch.outputs if out.target_logprobs is not None]
        torch.stack(losses).sum().backward()
        for name in ("rows", "tokens"):
            stats[name] += batch.stats[name]
        stats["micro-batches"] += 1
    for p in rank.trainable_parameters().values():
        p.grad = None
    return stats


def line(
    case: str,
    rank: TrainerRank,
    ours: list[Item],
    peer: Callable[[], dict[str, float]],
    goal: float,
    repeats: int,
) -> dict[str, object]:
    """One case: shared against unshared, with the speed-up over the ratio of rows that both compute."""
    found: dict[str, dict[str, float]] = {}
    works = {"ours": lambda: found.update(ours=passes(rank, ours)), "peer": lambda: found.update(peer=peer())}
    seconds = alternate(works, repeats)
    stats, peer_stats = found["ours"], found["peer"]
    ratio, speed = peer_stats["rows"] / stats["rows"], seconds["peer"] / seconds["ours"]
    assert peer_stats["rows"] == stats["tokens"], "the peer computes every token"
    print(f"{case}: {speed:.2f} times as fast, {speed / ratio:.3f} of the ratio", flush=True)
    return {
        "case": case,
        "tokens": int(stats["tokens"]),
        "rows": int(stats["rows"]),
        "micro-batches": f"{stats['micro-batches']:.0f} / {peer_stats['micro-batches']:.0f}",
        "ours s": seconds["ours"],
        "peer s": seconds["peer"],
        "token ratio": ratio,
        "speed-up": speed,
        "of the ratio": speed / ratio,
        "goal": goal,
        "met": speed / ratio >= goal,
    }


def keep_freed_memory() -> None:
    """Starts this process again with glibc's malloc set to return nothing to the system; others ignore the settings."""
    settings = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 32)}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)


def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=("tiny", "six-layers"), default=["tiny", "six-layers"])
    parser.add_argument("--cases", nargs="+", choices=("group", "agent", "none"), default=["group", "agent", "none"])
    parser.add_argument("--max-rows", type=int, default=4096, help="of a micro-batch, on both sides")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for model in options.models:
            path = write_model(Path(directory)) if model == "six-layers" else model
            rank = trainer(path, max_rows=options.max_rows)
            alone = trainer(path, max_rows=1)  # an item above the limit gets a micro-batch of its own
            rng = np.random.default_rng(0)
            vocab = rank.model.config.vocab_size
            shapes: dict[str, tuple[str, Sequences]] = {
                "group": ("16 x 128 on 1,024", group(rng, vocab, prompt=1024, completions=16, length=128)),
                "agent": (
                    "agent trace, 6 turns of 3 branches",
                    agent_trace(rng, vocab, prompt=256, turns=6, branches=3, answer=96, observation=64),
                ),
            }
            for name, (title, data) in shapes.items():
                if name in options.cases:
                    apart: list[Item] = list(forward_inputs(unshared(data)))
                    peer = lambda rank=rank, apart=apart: passes(rank, apart)  # type: ignore[misc]  # noqa: E731
                    entry = line(title, rank, [forward_inputs(data)], peer, 0.85, options.repeats)
                    lines.append({"model": model, "peer": "unshared", **entry})
            if "none" in options.cases:
                for title, count, half in (("6 x 1,024, nothing shared", 6, 512), ("24 x 128, nothing shared", 24, 64)):
                    chains = unshared(group(rng, vocab, prompt=half, completions=count, length=half))
                    items: list[Item] = list(forward_inputs(chains))
                    each = lambda alone=alone, items=items: passes(alone, items)  # type: ignore[misc]  # noqa: E731
                    entry = line(title, rank, items, each, 0.97, options.repeats)
                    lines.append({"model": model, "peer": "one at a time", **entry})
    report("prefix_sharing", lines, repeats=options.repeats)


if __name__ == "__main__":
    main()
