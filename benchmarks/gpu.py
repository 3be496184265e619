"""The CUDA path on one GPU: right first, then fast. `python benchmarks/gpu.py` takes less than 8 minutes.

1. Outputs, final states and gradients of backend "fla" against the token-by-token rule in fp64: a tree in fp32 and
   bf16, and a chain in three slices, whose middle one carries E and M. If any is wrong, nothing is timed.
2. Forward and backward on one chain against flash-linear-attention's own `chunk_gated_delta_rule`.
3. Trees: one call of ours, with both ways to make jobs, against one call of the library per depth of the tree.
4. A training step of the tiny model through `TrainerRank`, with backends "torch" and "fla".

Writes benchmarks/results/gpu.json and prints it. Cases that do not fit into --budget-s are listed as left out, never
estimated. Without a CUDA device it says so, writes nothing and exits with 0. Times are medians, in turns.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # before Triton is imported: fp32 rows are multiplied in fp32

import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule import ExchangeCarrier, ScanContext, gated_delta_rule
from deltamesh.plan.pieces import Pieces, chain_pieces

NAMES = ("q", "k", "v", "g", "beta")
# bf16: 4 x 2^-9 for what is rounded inside, as in tests/kernels; as much again, as the loss is quadratic in states.
FP32_BOUND, BF16_BOUND = 2e-5, 1.6e-2
Sizes = dict[str, Any]
SIZES: Sizes = {
    "dim": 128,
    "check": {"lengths": [130, 1, 70, 64, 3], "parents": [-1, 0, 0, 2, 2], "heads": 4, "chain": 390},
    "chains": [(8192, 32), (32768, 32), (8192, 16), (32768, 16), (8192, 48), (32768, 48)],
    "key_heads": 16,
    "trees": {
        "prompt 4096, 16 completions of 1024": ([4096] + 16 * [1024], [-1] + 16 * [0]),
        "binary tree of depth 6, nodes of 512": (63 * [512], [(node - 1) // 2 if node else -1 for node in range(63)]),
    },
    "tree_heads": 32,
    "laps": 10,
    "step": {"sequences": 8, "tokens": 512},
}


def draw(T: int, H: int, Hk: int, dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Inputs [1, T, ...] that retain much of what they read."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    k = torch.nn.functional.normalize(normal(1, 1, Hk, dim) + normal(1, T, Hk, dim), dim=-1)
    rows = {"q": normal(1, T, Hk, dim), "k": k, "v": normal(1, T, H, dim)}
    gates = {"g": -0.02 * torch.rand(1, T, H, generator=random), "beta": torch.rand(1, T, H, generator=random)}
    return {name: x.to(device, dtype) for name, x in rows.items()} | {name: x.to(device) for name, x in gates.items()}


def leaves_of(inputs: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: x.detach().to(dtype or x.dtype).clone().requires_grad_() for name, x in inputs.items()}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


# ---------------------------------------------------------------- right


class ChainCarrier(ExchangeCarrier):
    """Carries the states of a chain whose slices run one after another in this process."""

    def __init__(self, board: dict[str, dict[int, Tensor]], rank: int) -> None:
        self.board, self.rank = board, rank

    def incoming(self, states: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        before = self.board["states"].get(self.rank - 1)
        for state in states:
            M = transitions[0] if before is not None else None
            self.board["states"][self.rank] = state.clone() if M is None else state + M @ before
        found = states[:0] if before is None else before[None]
        return lambda: found

    def outgoing_gradient(self, d_incoming: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        owed = self.board["gradients"].get(self.rank)
        for gradient in d_incoming:
            through = 0 if owed is None else transitions[0].mT @ owed
            self.board["gradients"][self.rank - 1] = gradient + through
        found = d_incoming[:0] if owed is None else owed[None]
        return lambda: found


def check_tree(dtype: torch.dtype, device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Relative errors of a tree against fp64."""
    lengths, heads = sizes["check"]["lengths"], sizes["check"]["heads"]
    inputs = draw(sum(lengths), heads, heads // 2, sizes["dim"], dtype, device)
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    results = []
    for backend, kind in (("fla", None), ("naive", torch.float64)):
        leaves = leaves_of(inputs, kind)
        o, final = gated_delta_rule(
            **leaves, cu_seqlens=offsets, parents=sizes["check"]["parents"], output_final_state=True, backend=backend
        )
        assert final is not None
        weight = torch.linspace(-1, 1, o.numel(), device=device, dtype=torch.float64).view(o.shape)
        loss = (o.double() * weight).sum() + final.double().square().sum()
        results.append([o, final, *torch.autograd.grad(loss, list(leaves.values()))])
    return dict(zip(("o", "final", *NAMES), map(relative_error, *results)))


def check_slices(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Relative errors of a chain in three slices, in fp32."""
    T, heads = sizes["check"]["chain"], sizes["check"]["heads"]
    inputs = draw(T, heads, heads // 2, sizes["dim"], torch.float32, device)
    weight = torch.linspace(-1, 1, inputs["v"].numel(), device=device).view(inputs["v"].shape)
    leaves = leaves_of(inputs, torch.float64)
    o, _ = gated_delta_rule(**leaves, backend="naive")
    wanted = [o, *torch.autograd.grad((o * weight).sum(), list(leaves.values()))]
    board: dict[str, dict[int, Tensor]] = {"states": {}, "gradients": {}}
    edges = [0, T // 3 + 1, 2 * T // 3 + 5, T]
    runs = []
    for rank in range(3):
        rows = slice(edges[rank], edges[rank + 1])
        part = leaves_of({name: x[:, rows] for name, x in inputs.items()})
        chain = chain_pieces(edges[rank + 1] - edges[rank], has_initial_state=rank > 0)
        exports = chain.start[: int(rank < 2)]
        pieces = Pieces(
            start=chain.start, length=chain.length, parent=chain.parent, slot=chain.slot, num_slots=chain.num_slots,
            exports=exports,
        )  # fmt: skip
        context = ScanContext.build(pieces, device=device, carrier=ChainCarrier(board, rank))
        o, _ = gated_delta_rule(**part, context=context, backend="fla")
        runs.append((o, list(part.values()), weight[:, rows]))
    grads = [torch.autograd.grad((o * w).sum(), part) for o, part, w in reversed(runs)][::-1]
    found = [torch.cat(columns, 1) for columns in ([o for o, _, _ in runs], *zip(*grads))]
    return dict(zip(("o", *NAMES), map(relative_error, found, wanted)))


def check(device: torch.device, sizes: Sizes) -> tuple[dict[str, Any], bool]:
    """All errors, and whether each is within its bound."""
    cases = {
        "tree, fp32": (check_tree(torch.float32, device, sizes), FP32_BOUND),
        "tree, bf16": (check_tree(torch.bfloat16, device, sizes), BF16_BOUND),
        "three slices, fp32": (check_slices(device, sizes), FP32_BOUND),
    }
    right = all(error <= bound for errors, bound in cases.values() for error in errors.values())
    return {name: {"bound": bound, "errors": errors} for name, (errors, bound) in cases.items()}, right


# ---------------------------------------------------------------- fast


def in_turns(works: dict[str, Callable[[], object]], laps: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds; the first two laps, in which kernels are compiled and tuned, do not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for lap in range(laps + 2):
        for name, work in works.items():
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            if lap > 1:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(t), 3) for name, t in times.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forward_backward(rule: Callable[[dict[str, Tensor]], Tensor], inputs: dict[str, Tensor]) -> Callable[[], object]:
    leaves = leaves_of(inputs)
    gradient = torch.randn_like(inputs["v"])
    return lambda: torch.autograd.grad(rule(leaves), list(leaves.values()), gradient)


def with_split(pieces: Pieces, split: str | None, device: torch.device) -> ScanContext:
    """A context whose trees become jobs in the given way, rather than in the one that would be chosen."""
    from deltamesh.ops.gated_delta_rule.cuda.schedule import FlaSchedule

    context = ScanContext.build(pieces, device=device)
    vars(context)["fla_schedule"] = FlaSchedule(pieces, device, split=split)  # type: ignore[arg-type]
    return context


def ours(context: ScanContext) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda x: gated_delta_rule(**x, use_qk_l2norm=True, context=context, backend="fla")[0]


def time_chain(T: int, H: int, device: torch.device, sizes: Sizes) -> dict[str, float]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    inputs = draw(T, H, min(H, sizes["key_heads"]), sizes["dim"], torch.bfloat16, device)
    rules: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
        "ours": ours(with_split(chain_pieces(T), None, device)),
        "fla": lambda x: chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)[0],
    }
    return in_turns({name: forward_backward(rule, inputs) for name, rule in rules.items()}, sizes["laps"], device)


def time_tree(lengths: list[int], parents: list[int], device: torch.device, sizes: Sizes) -> dict[str, float]:
    """The nodes stand in order of depth, so that the calls per depth take views and gather no rows."""
    import numpy as np

    length, parent = np.array(lengths), np.array(parents)
    start = np.cumsum(length) - length
    none = np.full(len(length), -1)
    pieces = Pieces(start=start, length=length, parent=parent, slot=none, num_slots=0, exports=none[:0])
    H = sizes["tree_heads"]
    inputs = draw(int(length.sum()), H, min(H, sizes["key_heads"]), sizes["dim"], torch.bfloat16, device)
    rules = {f"ours, jobs are {name}": ours(with_split(pieces, split, device))
             for name, split in (("trees", "tree"), ("chains", "chains"), ("chosen", None))}  # fmt: skip
    rules["fla, a call per depth"] = per_depth(lengths, parents, device)
    return in_turns({name: forward_backward(rule, inputs) for name, rule in rules.items()}, sizes["laps"], device)


def per_depth(lengths: list[int], parents: list[int], device: torch.device) -> Callable[[dict[str, Tensor]], Tensor]:
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
        levels.append((slice(first_row, end_row), edges.to(device), source))
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


def time_step(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of a step of the tiny model, and the log-probability that each backend sums up in the first."""
    from deltamesh.topology import Topology
    from deltamesh.train.micro_batches import ForwardInput
    from deltamesh.train.optim import AdamParams
    from deltamesh.train.trainer_rank import TrainerRank

    count, tokens = sizes["step"]["sequences"], sizes["step"]["tokens"]
    rows = torch.randint(0, 100, (count, tokens + 1), generator=torch.Generator().manual_seed(0))
    rows[:, : tokens // 2] = rows[0, : tokens // 2]  # a shared prompt
    inputs = [ForwardInput(input_tokens=row[:-1].tolist(), target_tokens=row[1:].tolist()) for row in rows]
    found: dict[str, Any] = {"log_probs": {}}

    def step(backend: str) -> Callable[[], object]:
        rank = TrainerRank.from_pretrained(
            "tiny", topology=Topology(), dtype=torch.bfloat16, device=device, backend=backend
        )

        def work() -> None:
            total = 0.0
            for batch in rank.forward_micro_batches(inputs):
                loss = -sum(out.target_logprobs.sum() for out in batch.outputs)
                loss.backward()
                total += float(loss)
            found["log_probs"].setdefault(backend, -total)
            rank.optim_step(AdamParams(learning_rate=1e-4), scale_grads=1 / (count * tokens))

        return work

    return found | in_turns({name: step(name) for name in ("torch", "fla")}, max(1, sizes["laps"] // 2), device)


# ---------------------------------------------------------------- all of it


def run(device: torch.device, sizes: Sizes, budget_s: float) -> dict[str, Any]:
    """Everything that fits into the time."""
    begin = time.perf_counter()
    found: dict[str, Any] = {"unit": "ms, forward and backward, bf16", "left_out": []}
    found["errors"], found["right"] = check(device, sizes)
    if not found["right"]:
        return found
    trees = [("trees", name, partial(time_tree, *shape, device, sizes)) for name, shape in sizes["trees"].items()]
    chains = [("chains", f"T={T} H={H}", partial(time_chain, T, H, device, sizes)) for T, H in sizes["chains"]]
    works: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
        *chains[:2],
        *trees,
        ("step", "tiny", partial(time_step, device, sizes)),
        *chains[2:],
    ]
    slowest = 0.0
    for section, name, work in works:
        start = time.perf_counter()
        if start - begin + slowest > budget_s:
            found["left_out"].append(f"{section}: {name}")
            continue
        found.setdefault(section, {})[name] = work()
        slowest = max(slowest, time.perf_counter() - start)
    found["seconds"] = round(time.perf_counter() - begin, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=450, help="start no case that might end later than this")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"device": None, "note": "no CUDA device here: nothing was run and nothing is claimed"}))
        return 0
    import fla
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    found = {
        "device": torch.cuda.get_device_name(device),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "fla": fla.__version__},
    } | run(device, SIZES, arguments.budget_s)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0 if found["right"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
