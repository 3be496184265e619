"""Time the gated delta rule against Hugging Face's chunked rule, alternating in one run.

`python benchmarks/gated_delta_rule.py --lengths 1024 4096 8192` prints a table and writes
benchmarks/results/gated_delta_rule.json. Times are medians; the share is of the rate that batched 128 x 64 x 128 fp32
products reach from the cache in the same run. Memory is the growth of the peak resident size over the inputs (outputs
and gradients included), of a fresh process for every case.
Last, all lengths of ours take turns: how flat rows/s is over the length, whatever the machine does meanwhile.
On a busy machine `--threads 1 --clock cpu` gives steadier ratios.

`ours`: deltamesh. `peer`: transformers' `torch_chunk_gated_delta_rule`. `stacked`: the peer with its writes of one
slice per chunk, whose backward copies the whole tensor every time, replaced by unbind and stack.
"""

import argparse
import gc
import inspect
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import l2norm, torch_chunk_gated_delta_rule

from deltamesh.ops.gated_delta_rule import gated_delta_rule

Rule = Callable[..., Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """deltamesh."""
    return gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True)[0]


def peer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """transformers' rule, undecorated."""
    o: Tensor = inspect.unwrap(torch_chunk_gated_delta_rule)(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    return o


def stacked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """The same formulas and order of work as `peer`, with unbind and stack around the loop over chunks."""
    rows = v.shape[1]
    q, k, v, beta, g = (x.transpose(1, 2).contiguous() for x in (q, k, v, beta, g))
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    pad = -rows % chunk
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    beta, g = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk)) for x in (beta, g))
    k_beta = k * beta[..., None]
    above = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    total = g.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()
    system = (k_beta @ k.mT) * decay
    attention = (q @ k.mT) * decay
    value = torch.linalg.solve_triangular(system, v * beta[..., None], upper=False, unitriangular=True)
    reader = torch.linalg.solve_triangular(system, k_beta * total.exp()[..., None], upper=False, unitriangular=True)
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    left = total[..., -1].exp()[..., None, None]
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for q_c, k_c, v_c, r_c, a_c, left_c in zip(
        *(x.unbind(2) for x in (q, k, value, reader, attention, left)), strict=True
    ):
        new = v_c - r_c @ state
        out.append(q_c @ state + a_c @ new)
        state = state * left_c + k_c.mT @ new
    return torch.stack(out, 2).flatten(2, 3)[:, :, :rows].transpose(1, 2).contiguous()


RULES: dict[str, Rule] = {"ours": ours, "peer": peer, "stacked": stacked}


def make_inputs(length: int, key_heads: int, heads: int, dim: int) -> tuple[list[Tensor], Tensor]:
    """Leaves q, k, v, g, beta and the gradient of o."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, length, key_heads, dim) for _ in range(2))
    v = torch.randn(1, length, heads, dim)
    g, beta = -0.1 * torch.rand(1, length, heads), torch.rand(1, length, heads)
    return [x.requires_grad_() for x in (q, k, v, g, beta)], torch.randn_like(v)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def forward_time(rule: Rule, leaves: list[Tensor], d_out: Tensor, clock: str) -> float:
    """Seconds of a forward without gradients."""
    with torch.no_grad():
        start = CLOCKS[clock]()
        rule(*leaves)
        return CLOCKS[clock]() - start


def both_time(rule: Rule, leaves: list[Tensor], d_out: Tensor, clock: str) -> float:
    """Seconds of a forward and backward."""
    start = CLOCKS[clock]()
    torch.autograd.grad(rule(*leaves), leaves, d_out)
    return CLOCKS[clock]() - start


def alternate(
    time_one: Callable[..., float], names: Sequence[str], *inputs: object, repeats: int
) -> dict[str, list[float]]:
    """Times of every rule, taking turns, after one turn to warm up."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name in names:
            seconds = time_one(RULES[name], *inputs)
            if turn:
                times[name].append(seconds)
    return times


def length_times(
    lengths: Sequence[int], sizes: tuple[int, int, int], clock: str, repeats: int
) -> dict[int, list[float]]:
    """Forward and backward of ours, the lengths taking turns, after one turn to warm up."""
    inputs = {length: make_inputs(length, *sizes) for length in lengths}
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for turn in range(repeats + 1):
        for length in lengths:
            seconds = both_time(ours, *inputs[length], clock)
            if turn:
                times[length].append(seconds)
    return times


def matmul_rate(dim: int, heads: int, clock: str) -> float:
    """FLOP/s of batched products of one chunk of all heads, operands in the cache."""
    a, b, out = torch.randn(heads, 64, dim), torch.randn(heads, dim, dim), torch.empty(heads, 64, dim)
    best = float("inf")
    for _ in range(200):
        start = CLOCKS[clock]()
        torch.bmm(a, b, out=out)
        best = min(best, CLOCKS[clock]() - start)
    return 2 * heads * 64 * dim * dim / best


def flops(length: int, heads: int, dim: int, *, backward: bool) -> float:
    """Of the products that the rule needs (chunks of 64), nothing recomputed."""
    square, narrow = dim * dim, 64 * dim  # multiply-adds per row and head
    forward = 3 * square + 4 * narrow
    return 2.0 * length * heads * (forward + backward * (6 * square + 8 * narrow))


def _memory_case(name: str, threads: int, *sizes: int) -> float:
    torch.set_num_threads(threads)
    both_time(RULES[name], *make_inputs(128, *sizes[1:]), "wall")
    leaves, d_out = make_inputs(*sizes)
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    both_time(RULES[name], leaves, d_out, "wall")
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak_memory(name: str, threads: int, *sizes: int) -> float:
    """MiB that forward and backward add to the peak of a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_memory_case, name, threads, *sizes).result()


def main(argv: Sequence[str] | None = None) -> None:
    """Run all lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest-peer", type=int, default=8192, help="its backward is quadratic in the length")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gated_delta_rule.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    sizes = (args.key_heads, args.heads, args.dim)
    rate = matmul_rate(args.dim, args.heads, args.clock)
    print(
        f"{args.threads} threads, {args.clock} clock, {args.heads}/{args.key_heads} heads, K = V = {args.dim}, "
        f"in-cache products {rate / 1e9:.0f} GFLOP/s"
    )
    print(f"{'rows':>6} {'pass':<9}{'rule':<9}{'ms':>9}{'rows/s':>9}{'share':>7}{'x ours':>8}{'MiB':>7}")
    results = []
    for length in args.lengths:
        inputs = make_inputs(length, *sizes)
        names = [n for n in args.rules if n == "ours" or length <= args.longest_peer]
        for label, timer in (("forward", forward_time), ("both", both_time)):
            times = alternate(timer, names, *inputs, args.clock, repeats=args.repeats)
            ours_s = statistics.median(times["ours"])
            for name in names:
                seconds = statistics.median(times[name])
                row = {
                    "rows": length,
                    "pass": label,
                    "rule": name,
                    "seconds": seconds,
                    "all_seconds": times[name],
                    "rows_per_second": length / seconds,
                    "share_of_matmul_rate": flops(length, args.heads, args.dim, backward=label == "both")
                    / seconds
                    / rate,
                    "times_ours": seconds / ours_s,
                }
                if label == "both" and not args.no_memory:
                    row["peak_mib"] = peak_memory(name, args.threads, length, *sizes)
                results.append(row)
                print(
                    f"{length:>6} {label:<9}{name:<9}{seconds * 1e3:>9.1f}{length / seconds:>9.0f}"
                    f"{row['share_of_matmul_rate']:>7.0%}{row['times_ours']:>8.2f}{row.get('peak_mib', 0):>7.0f}",
                    flush=True,
                )
    in_turns = length_times(args.lengths, sizes, args.clock, args.repeats)
    rates = {length: length / statistics.median(times) for length, times in in_turns.items()}
    spread = 1 - min(rates.values()) / max(rates.values())
    listed = ", ".join(f"{length}: {rate:.0f}" for length, rate in rates.items())
    print(f"ours, forward and backward, lengths in turns: rows/s {listed}; spread {spread:.0%}")
    setup = {key: getattr(args, key) for key in ("heads", "key_heads", "dim", "threads", "repeats", "clock")}
    versions = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {**versions, **setup, "statistic": "median", "matmul_flops_per_second": rate, "results": results}
    report["lengths_in_turns"] = {"seconds": in_turns, "rows_per_second": rates, "spread": spread}
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
