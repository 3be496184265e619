"""The CUDA path on one GPU: right first, then fast. `python benchmarks/gpu.py` takes less than 8 minutes.

1. Kernels are compiled, by a process for each case, side by side: the library tunes each of its kernels over up to 25
   configurations for every number of heads, which one process would spend all of its time on.
2. Against fp64: outputs, final states and gradients of a tree in fp32 and bf16, and of a chain in three slices, whose
   middle one carries E and M; loss and LoRA gradients of the tiny model in fp32 and of the 6-layer model in bf16. If
   any is wrong, nothing is timed, nothing is written, and the exit code is 1.
3. Forward and backward on one chain against flash-linear-attention's own `chunk_gated_delta_rule`.
4. Trees: one call of ours, with both ways to make jobs, against one call of the library per depth of the tree.
5. LoRA steps (forward, loss, backward, AdamW) of the tiny and the 6-layer model in bf16: backend "fla" against backend
   "torch", and against "fla" on the same lengths with nothing shared.

In 3 and 4 all peers' outputs and gradients are compared at the timed size; a case in which they differ gets no times.

Milliseconds are medians of 5 or more laps, peers in turns, by CUDA events, after two laps in which kernels are compiled
and tuned; `launched_ms` is when Python was done (close to `ms`: the host is what takes the time). `peak_mib` is what a
lap allocates at most beyond what was there before it. Cases that do not fit into --budget-s are listed in `left_out`,
never estimated; cases that raised are in `failed`, and the exit code is 1.

Results are written to benchmarks/results/gpu.json as they come ("complete" at the end) and printed. Without a CUDA
device the script says so, writes nothing and exits with 0.
"""

# ruff: noqa: E402 (the clock starts before imports, which take seconds; Triton reads the environment at its import)
import time

START = time.perf_counter()

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Before Triton and the library are imported. Exact fp32 products for fp32 rows; bf16 rows are not touched by it.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# The library keeps index tables of so many batches; with its 4, calls per depth would make them anew every time.
os.environ.setdefault("FLA_TENSOR_CACHE_SIZE", "64")

import numpy as np
import torch
from _data import Sequences, forward_inputs, group, num_tokens, unshared
from _gpu_checks import (
    Sizes,
    autotuners,
    backward,
    check,
    check_cases,
    draw,
    leaves_of,
    triangular_solve,
)
from _gpu_laps import OutOfTime, PeersDiffer, Run, Work, measure, side_by_side
from _model import trainer, write_model
from torch import Tensor

from deltamesh.ops.gated_delta_rule import ScanContext, gated_delta_rule
from deltamesh.plan.pieces import Pieces, chain_pieces
from deltamesh.train.micro_batches import Item
from deltamesh.train.optim import AdamParams

SIZES: Sizes = {
    "check": {
        "lengths": [130, 1, 70, 64, 3], "parents": [-1, 0, 0, 2, 2], "heads": 4, "chain": 390,
        # exact fp32 products are unrolled multiply-adds: kernels of dim 64 take minutes to compile for sm_90
        "dim": {torch.float32: 16, torch.bfloat16: 128},
        "group": {"prompt": 70, "completions": 3, "length": 9},
    },
    "dim": 128,
    "dtype": torch.bfloat16,
    "chains": [(8192, 32), (32768, 32), (8192, 16), (32768, 16), (8192, 48), (32768, 48)],
    "key_heads": 16,
    "trees": {
        "prompt 4096, 16 completions of 1024": ([4096] + 16 * [1024], [-1] + 16 * [0]),
        "binary tree of depth 6, nodes of 512": (63 * [512], [(node - 1) // 2 if node else -1 for node in range(63)]),
    },
    "tree_heads": 32,
    "laps": 10,
    "steps": [
        ("six-layers", {"prompt": 1024, "completions": 16, "length": 128}, ("fla", "torch", "fla, nothing shared")),
        ("tiny", {"prompt": 1024, "completions": 16, "length": 128}, ("fla", "torch", "fla, nothing shared")),
        ("six-layers", {"prompt": 4096, "completions": 16, "length": 1024}, ("fla", "fla, nothing shared")),
    ],
    "max_rows": 32768,
}  # fmt: skip
Rule = Callable[[dict[str, Tensor]], Tensor]


# ---------------------------------------------------------------- the op


def forward_backward(rule: Rule, inputs: dict[str, Tensor]) -> Work:
    """One call and its gradients; works that are given the same inputs are given the same gradient of the output."""
    leaves = leaves_of(inputs)
    random = torch.Generator().manual_seed(1)
    gradient = torch.randn(inputs["v"].shape, generator=random).to(inputs["v"])

    def work() -> Sequence[Tensor]:
        o = rule(leaves)
        return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), gradient)]

    return work


def ours(pieces: Pieces, split: str | None, device: torch.device) -> Rule:
    """Our op, with trees made jobs in the given way rather than in the one that would be chosen."""
    from deltamesh.ops.gated_delta_rule.cuda.schedule import FlaSchedule

    context = ScanContext.build(pieces, device=device)
    vars(context)["fla_schedule"] = FlaSchedule(pieces, device, split=split)  # type: ignore[arg-type]
    return lambda x: gated_delta_rule(**x, use_qk_l2norm=True, context=context, backend="fla")[0]


def time_chain(T: int, H: int, run: Run) -> dict[str, Any]:
    """One sequence of T rows."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    sizes = run.sizes
    inputs = draw(T, H, min(H, sizes["key_heads"]), sizes["dim"], sizes["dtype"], run.device)
    rules: dict[str, Rule] = {
        "fla": lambda x: chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)[0],
        "ours": ours(chain_pieces(T), None, run.device),
    }
    return measure({name: forward_backward(rule, inputs) for name, rule in rules.items()}, run, sizes["laps"])


def time_tree(lengths: list[int], parents: list[int], run: Run) -> dict[str, Any]:
    """The nodes stand in order of depth, so that the calls per depth take views and gather no rows."""
    sizes = run.sizes
    length, parent = np.array(lengths), np.array(parents)
    start, none = np.cumsum(length) - length, np.full(len(length), -1)
    pieces = Pieces(start=start, length=length, parent=parent, slot=none, num_slots=0, exports=none[:0])
    H = sizes["tree_heads"]
    inputs = draw(int(length.sum()), H, min(H, sizes["key_heads"]), sizes["dim"], sizes["dtype"], run.device)
    rules = {"fla, a call per depth": per_depth(lengths, parents, run.device)}
    for name, split in (("trees", "tree"), ("chains", "chains"), ("chosen", None)):
        rules[f"ours, jobs are {name}"] = ours(pieces, split, run.device)
    return measure({name: forward_backward(rule, inputs) for name, rule in rules.items()}, run, sizes["laps"])


def per_depth(lengths: list[int], parents: list[int], device: torch.device) -> Rule:
    """One packed call for all nodes of a depth, from the final states of the depth above."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    depth: list[int] = []
    for parent in parents:
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    assert depth == sorted(depth), "nodes stand in order of depth"
    levels = []
    first_row = 0
    for level in range(depth[-1] + 1):
        nodes = [n for n, d in enumerate(depth) if d == level]
        edges = torch.tensor([0, *lengths[nodes[0] : nodes[-1] + 1]]).cumsum(0)
        above = depth.index(level - 1) if level else 0
        source = torch.tensor([parents[n] - above for n in nodes], device=device)
        end_row = first_row + int(edges[-1])
        levels.append((slice(first_row, end_row), edges.to(device, torch.int32), source))  # as ours: tuned once
        first_row = end_row

    def rule(x: dict[str, Tensor]) -> Tensor:
        outputs, final = [], None
        for rows, edges, source in levels:
            o, final = chunk_gated_delta_rule(
                **{name: t[:, rows] for name, t in x.items()},
                initial_state=None if final is None else final[source],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=edges,
            )
            outputs.append(o)
        return torch.cat(outputs, 1)

    return rule


# ---------------------------------------------------------------- whole steps


def step_of(path: str | Path, backend: str, data: Sequences, *, shared: bool, run: Run) -> Work:
    """One LoRA step as a work; each has a model and an optimizer of its own."""
    sizes = run.sizes
    rank = trainer(
        path, max_rows=sizes["max_rows"], dtype=sizes["dtype"], device=run.device, backend=backend
    )  # fmt: skip
    items: list[Item] = [forward_inputs(data)] if shared else list(forward_inputs(unshared(data)))
    scale = 1 / sum(len(tokens) - first for tokens, first in data)

    def work() -> None:
        loss = backward(rank, items)
        result = rank.optim_step(AdamParams(learning_rate=1e-4), scale_grads=scale)
        if result.skipped:
            raise PeersDiffer(f"a step with loss {float(loss)} and gradients that are not finite")

    return work


def time_step(path: str | Path, shape: dict[str, int], names: Sequence[str], run: Run) -> dict[str, Any]:
    """A group of completions of one prompt."""
    data = group(np.random.default_rng(0), 256, **shape)
    wanted = [name for name in names if run.only in (None, name)]
    works = {
        name: step_of(path, name.split(",")[0], data, shared="nothing shared" not in name, run=run) for name in wanted
    }
    found = measure(works, run, run.sizes["laps"] // 2)
    rows = shape["prompt"] + shape["completions"] * shape["length"]
    return {"tokens": num_tokens(data), "rows_shared": rows, **found}


# ---------------------------------------------------------------- all of it


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to measure.

    Attributes:
        section, name: where its row goes.
        work: measures.
        kernels: works whose kernels no earlier case compiles.
    """

    section: str
    name: str
    work: Callable[[Run], dict[str, Any]]
    kernels: tuple[str, ...] = ()


def cases_of(sizes: Sizes, models: dict[str, str | Path]) -> list[Case]:
    """All cases, the most wanted first."""
    heads: set[int] = set()
    chains = []
    for T, H in sizes["chains"]:
        kernels = () if H in heads else ("fla", "ours")
        heads.add(H)
        chains.append(Case(section="chains", name=f"T={T} H={H}", work=partial(time_chain, T, H), kernels=kernels))
    trees = [
        Case(section="trees", name=name, work=partial(time_tree, *shape), kernels=("fla, a call per depth",)[n:])
        for n, (name, shape) in enumerate(sizes["trees"].items())
    ]
    steps = []
    for model, shape, names in sizes["steps"]:
        title = f"{model}, prompt {shape['prompt']}, {shape['completions']} completions of {shape['length']}"
        work = partial(time_step, models[model], shape, names)
        kernels = ("fla",) if all(model not in case.name for case in steps) else ()
        steps.append(Case(section="steps", name=title, work=work, kernels=kernels))
    return [*chains[:2], *trees, *steps, *chains[2:]]


def run_cases(cases: Sequence[Case], run: Run, found: dict[str, Any], save: Callable[[], None]) -> None:
    """Measures what fits into the time, and puts it into `found`; a case that raises does not stop the others."""
    slowest = 0.0
    for case in cases:
        start = time.perf_counter()
        label = f"{case.section}: {case.name}"
        if start + slowest > run.deadline:
            found["left_out"].append(f"{label} (not started)")
            continue
        try:
            found.setdefault(case.section, {})[case.name] = case.work(run)
        except OutOfTime as error:
            found["left_out"].append(f"{label} (cut short {error})")
        except Exception as error:
            traceback.print_exc()
            found["failed"][label] = f"{type(error).__name__}: {error}"[:2000]
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        slowest = max(slowest, time.perf_counter() - start)
        save()


def compile_only(target: str, cases: Sequence[Case], device: torch.device, sizes: Sizes, models: Any) -> None:
    """Runs one check, or one work of one case, once. Kernels are compiled and not tuned: others use the device."""
    for tuner in autotuners():
        vars(tuner)["do_bench"] = lambda call, **_: (call(), [1.0, 1.0, 1.0])[1]
    check(device, sizes["check"], models, only=[target])
    for case in cases:
        for work in case.kernels:
            if target == f"{case.section}/{case.name}/{work}":
                case.work(Run(device=device, sizes=sizes, only=work))


def measure_all(
    device: torch.device, sizes: Sizes, *, begin: float, budget_s: float, compile_s: float, save: Callable[[Any], None]
) -> dict[str, Any]:
    """Everything that fits into the time; `save` gets what there is so far, once the checks are right."""
    found: dict[str, Any] = {"unit": "ms, forward and backward, bf16", "complete": False, "left_out": [], "failed": {}}
    with tempfile.TemporaryDirectory() as directory:
        models: dict[str, str | Path] = {"tiny": "tiny", "six-layers": write_model(Path(directory))}
        cases = cases_of(sizes, models)
        if compile_s > 0:
            targets = [
                *check_cases(device, sizes["check"], checked_models(models)),
                *(f"{c.section}/{c.name}/{work}" for c in cases for work in c.kernels),
            ]
            commands = [[sys.executable, __file__, "--compile", t, "--models", directory] for t in targets]
            found["compiled"] = side_by_side(commands, limit_s=compile_s, at_once=os.cpu_count() or 1)
        found["checks"] = check(device, sizes["check"], checked_models(models))
        found["triangular_solve"] = triangular_solve()
        found["right"] = all(case["right"] for case in found["checks"].values())
        found["seconds_before_timing"] = round(time.perf_counter() - begin, 1)
        if found["right"]:
            run = Run(device=device, sizes=sizes, deadline=begin + budget_s)
            run_cases(cases, run, found, lambda: save(found))
            found["complete"] = True
            found["seconds"] = round(time.perf_counter() - begin, 1)
            save(found)
    return found


def checked_models(models: dict[str, str | Path]) -> dict[str, tuple[str | Path, torch.dtype]]:
    """The models that are checked: the tiny one exactly, the other in the type in which it is timed."""
    return {
        "tiny, fp32": (models["tiny"], torch.float32),
        "six-layers, bf16": (models["six-layers"], torch.bfloat16),
    }


def main() -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=420, help="no case starts that might end later than this")
    parser.add_argument("--compile-s", type=float, default=150, help="at most so long for compiling side by side")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # of the processes that compile
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"device": None, "note": "no CUDA device here: nothing was run and nothing is claimed"}))
        return 0
    import fla
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    if arguments.compile:
        models = {"tiny": "tiny", "six-layers": arguments.models / "six-layers"}
        compile_only(arguments.compile, cases_of(SIZES, models), device, SIZES, checked_models(models))
        return 0
    head = {
        "device": torch.cuda.get_device_name(device),
        # with these installed the library leaves Triton, for its own call or also inside ours
        "library_uses": [name for name in ("flash_qla", "tilelang") if importlib.util.find_spec(name)],
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "fla": fla.__version__},
    }

    def save(found: dict[str, Any]) -> None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(head | found, indent=1) + "\n")

    found = measure_all(
        device, SIZES, begin=START, budget_s=arguments.budget_s, compile_s=arguments.compile_s, save=save
    )
    print(json.dumps(head | found, indent=1))
    return 0 if found["right"] and not found["failed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
