"""Planning: `python benchmarks/planning.py` writes benchmarks/results/planning.json.

Seconds to plan a micro-batch for 8 slices (1,000 sequences per 65,536 rows, in groups of ten), beside what else is made
of indices once per micro-batch: dealing the items, and one slice's tables for the layers. Then the work of the busiest
slice over the mean, attention, heads and transitions included, for two models' costs.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from _alternate import alternate, report
from _data import Sequences, agent_trace, forward_inputs, group

from deltamesh.distributed.collectives import Group
from deltamesh.models import load_config
from deltamesh.ops.context import SliceContext
from deltamesh.plan.plan import MicroBatchPlan, plan_micro_batch
from deltamesh.train.micro_batches import CheckedInput, check_inputs, deal
from deltamesh.train.setup import cost_model

SLICES = 8
VOCAB = 259  # of the tiny model, so that both costs take the same data


def groups(rows: int) -> list[Sequences]:
    """Groups of ten completions of 49 tokens on a prompt of 165, as many as fill `rows`."""
    rng = np.random.default_rng(0)
    return [group(rng, VOCAB, prompt=165, completions=10, length=49) for _ in range(round(rows / 655))]


def plan_of(items: list[list[CheckedInput]], slices: int, model: str) -> MicroBatchPlan:
    """One micro-batch of all items."""
    flat = [x for item in items for x in item]
    config = load_config(model)
    return plan_micro_batch(
        [x.tokens for x in flat],
        [x.targets for x in flat],
        num_slices=slices,
        conv_width=config.linear_conv_kernel_dim,
        cost=cost_model(config),
    )


def context_of(plan: MicroBatchPlan) -> SliceContext:
    """The tables of the middle slice."""
    alone = Group.single()
    own = plan.slices[len(plan.slices) // 2]
    return SliceContext.from_plan(own, cp=alone, tp=alone, sp=False, device=torch.device("cpu"))


def main() -> None:
    """Times, then balance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16384, 65536, 262144])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines: list[dict[str, object]] = []
    cost = cost_model(load_config("qwen3.5-27b-shape"))
    for rows in options.rows:
        items = check_inputs([forward_inputs(g) for g in groups(rows)], VOCAB)
        plan = plan_of(items, SLICES, "qwen3.5-27b-shape")
        works: dict[str, Callable[[], object]] = {
            "plan": lambda items=items: plan_of(items, SLICES, "qwen3.5-27b-shape"),  # type: ignore[misc]
            "deal": lambda items=items: deal(items, dp=1, max_rows=1 << 30, cost=cost),  # type: ignore[misc]
            "tables": lambda plan=plan: context_of(plan),  # type: ignore[misc]
        }
        seconds = alternate(works, options.repeats)
        lines.append(
            {
                "case": "groups",
                "slices": SLICES,
                "rows": plan.tree.num_rows,
                "sequences": plan.tree.num_sequences,
                "plan s": seconds["plan"],
                "us per row": seconds["plan"] / plan.tree.num_rows * 1e6,
                "deal s": seconds["deal"],
                "one slice's tables s": seconds["tables"],
            }
        )
    rng = np.random.default_rng(0)
    cases: dict[str, list[Sequences]] = {
        "groups": groups(65536),
        "groups of 16 x 128 on 1,024": [group(rng, VOCAB, prompt=1024, completions=16, length=128) for _ in range(20)],
        "one group of 16 x 128 on 1,024": [group(rng, VOCAB, prompt=1024, completions=16, length=128)],
        "agent traces": [
            agent_trace(rng, VOCAB, prompt=256, turns=6, branches=3, answer=96, observation=64) for _ in range(20)
        ],
        "one chain of 65,536": [[(rng.integers(0, VOCAB, 65536), 1)]],
    }
    for case, data in cases.items():
        items = check_inputs([forward_inputs(g) for g in data], VOCAB)
        for slices in (2, 4, 8):
            line: dict[str, object] = {"case": case, "slices": slices}
            for model in ("qwen3.5-27b-shape", "tiny"):
                plan = plan_of(items, slices, model)
                line |= {
                    "rows": plan.tree.num_rows,
                    "sequences": plan.tree.num_sequences,
                    f"busiest/mean, {model}": round(plan.busiest_over_mean, 4),
                }
            lines.append(line)
    report("planning", lines, repeats=options.repeats)


if __name__ == "__main__":
    main()
