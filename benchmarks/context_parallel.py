"""Time the scan over two ranks against one process, op alone, forward and backward, alternating in one run.

`python benchmarks/context_parallel.py` prints a table and writes benchmarks/results/context_parallel.json. Each rank
has one thread, the one process as many threads as there are ranks. Times are medians over alternating turns: in every
turn each way runs once, the ranks start together, and the slowest rank counts.

`--clock wall` needs as many idle cores as there are ranks. `--clock cpu` does not: a rank's clock is its processor
time, every message carries its sender's clock, and who waits for one sets its own clock to that plus 0.3 ms and 1 ns
per byte. The one process then counts as its time with one thread over the number of ranks: no thread pool reaches that.

`one process`: the op on all rows. `scan`, `pipeline`: states go from slice to slice, slices of equal length.
`all-to-all`: the baseline that needs neither: rows are exchanged for heads, the one-process op runs on all rows and a
part of the heads, and the results are exchanged back.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from deltamesh.distributed import collectives
from deltamesh.distributed.collectives import (
    Group,
    Pending,
    all_to_all_rows,
    start_all_to_all_rows,
    start_receive,
    start_send,
)
from deltamesh.ops.gated_delta_rule import context_parallel, gated_delta_rule, pipeline_carrier, scan_carrier
from deltamesh.testing.rank_pool import RankPool

WAYS = ("pipeline", "scan", "all-to-all")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Segments of a stream, and the heads."""

    name: str
    cu_seqlens: tuple[int, ...]
    parents: tuple[int, ...]
    heads: int
    dim: int

    @property
    def rows(self) -> int:
        return self.cu_seqlens[-1]


def make_cases(scale: float, heads: int, dim: int) -> list[Case]:
    """A chain, and a prompt with sixteen completions of it."""
    chain, prompt, completion = (round(n * scale) for n in (8192, 2048, 384))
    group = (0, *(prompt + n * completion for n in range(17)))
    return [
        Case(name=f"chain of {chain}", cu_seqlens=(0, chain), parents=(-1,), heads=heads, dim=dim),
        Case(
            name=f"prompt of {prompt}, 16 x {completion}",
            cu_seqlens=group,
            parents=(-1, *[0] * 16),
            heads=heads,
            dim=dim,
        ),
    ]


def make_inputs(case: Case, rows: slice) -> tuple[list[Tensor], Tensor]:
    """Leaves q, k, v, g, beta of some rows and the gradient of o."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, case.rows, case.heads, *shape, generator=generator)[:, rows].clone()

    q, k, v, d_out = (draw(case.dim) for _ in range(4))
    g, beta = -0.1 * draw().sigmoid(), draw().sigmoid()
    return [x.requires_grad_() for x in (q, k, v, g, beta)], d_out


# ---------------------------------------------------------------- the baseline


class _RowsForHeads(torch.autograd.Function):
    """[1, own rows, H, ...] -> [1, all rows, own heads, ...]; backward the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return to_rows(dx, ctx.group), None


class _HeadsForRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return to_rows(x, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return to_heads(dx, ctx.group), None


def to_heads(x: Tensor, group: Group) -> Tensor:
    """Slices and head counts must be equal on all ranks."""
    _, rows, heads = x.shape[:3]
    parts = x[0].unflatten(1, (group.size, heads // group.size)).transpose(0, 1).flatten(0, 1)
    splits = [rows] * group.size
    return exchange_heads(parts, splits, splits, group)[None]


def to_rows(x: Tensor, group: Group) -> Tensor:
    splits = [x.shape[1] // group.size] * group.size
    parts = exchange_heads(x[0].contiguous(), splits, splits, group)
    return parts.unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)[None]


exchange_heads = all_to_all_rows


def head_exchange(leaves: list[Tensor], case: Case, group: Group) -> Tensor:
    """The op on all rows and a part of the heads; gates travel together, as q, k and v do."""
    q, k, v, g, beta = leaves
    rows = _RowsForHeads.apply(torch.cat((q, k, v, g[..., None], beta[..., None]), -1), group)
    q, k, v, g, beta = rows.split([case.dim] * 3 + [1, 1], -1)
    o, _ = gated_delta_rule(
        q, k, v.contiguous(), g[..., 0], beta[..., 0], cu_seqlens=case.cu_seqlens, parents=case.parents
    )
    return _HeadsForRows.apply(o, group)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- clocks

_MESSAGE_SECONDS, _BYTE_SECONDS = 3e-4, 1e-9


class Clock:
    """Processor time of this rank, and what it would have waited for others that began at the same moment."""

    def __init__(self) -> None:
        self._zero = time.thread_time()

    def now(self) -> float:
        return time.thread_time() - self._zero

    def wait_until(self, moment: float) -> None:
        self._zero -= max(0.0, moment - self.now())


@dataclass(frozen=True, kw_only=True)
class Stamped:
    """A message with its sender's clock; a `Pending` for the carrier."""

    message: Pending
    stamp: Pending
    clock: Clock | None

    def wait(self) -> Tensor:
        data = self.message.wait()
        stamp = self.stamp.wait()
        if self.clock is not None:
            self.clock.wait_until(stamp.item() + _MESSAGE_SECONDS + data.numel() * data.element_size() * _BYTE_SECONDS)
        return data


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """An exchange and the moment at which the last rank's part is there."""

    rows: Pending
    arrival: float
    clock: Clock

    def wait(self) -> Tensor:
        data = self.rows.wait()
        self.clock.wait_until(self.arrival)
        return data


@contextmanager
def stamped_messages(clock: Clock) -> Iterator[None]:
    """All messages of the carriers and of the baseline set the clock."""

    def send(x: Tensor, peer: int, group: Group) -> Stamped:
        stamp = torch.tensor([clock.now()], dtype=torch.float64)
        return Stamped(message=start_send(x, peer, group), stamp=start_send(stamp, peer, group), clock=None)

    def receive(x: Tensor, peer: int, group: Group) -> Stamped:
        stamp = torch.empty(1, dtype=torch.float64)
        return Stamped(message=start_receive(x, peer, group), stamp=start_receive(stamp, peer, group), clock=clock)

    def start_exchange(x: Tensor, send: Sequence[int], recv: Sequence[int], group: Group) -> Exchanged:
        row = x[:1].numel() * x.element_size()
        here = clock.now() + _MESSAGE_SECONDS + (sum(send) - send[group.rank]) * row * _BYTE_SECONDS
        latest = collectives.all_reduce(torch.tensor([here], dtype=torch.float64), group, "max")
        return Exchanged(rows=start_all_to_all_rows(x, send, recv, group), arrival=latest.item(), clock=clock)

    def exchange(x: Tensor, send: Sequence[int], recv: Sequence[int], group: Group) -> Tensor:
        return start_exchange(x, send, recv, group).wait()

    with (
        mock.patch.object(pipeline_carrier, "start_send", send),
        mock.patch.object(pipeline_carrier, "start_receive", receive),
        mock.patch.object(scan_carrier, "start_all_to_all_rows", start_exchange),
        mock.patch.dict(globals(), {"exchange_heads": exchange}),
    ):
        yield


# ---------------------------------------------------------------- ranks


class Ranks:
    """What a rank runs in each turn, and the bytes it sends."""

    def __init__(self, case: Case) -> None:
        self.group = Group(rank=dist.get_rank(), size=dist.get_world_size(), handle=dist.group.WORLD)
        self.works: dict[str, Callable[[], object]] = {}
        self.rows = slice(
            case.rows * self.group.rank // self.group.size, case.rows * (self.group.rank + 1) // self.group.size
        )
        leaves, d_out = make_inputs(case, self.rows)
        for way in ("pipeline", "scan"):
            context = context_parallel(
                self.group.handle,
                cu_seqlens=case.cu_seqlens,
                parents=case.parents,
                carrier=way,  # type: ignore[arg-type]
            )
            assert context.rows == self.rows
            self.works[way] = lambda context=context: torch.autograd.grad(  # type: ignore[misc]
                gated_delta_rule(*leaves, context=context)[0], leaves, d_out
            )
        self.works["all-to-all"] = lambda: torch.autograd.grad(head_exchange(leaves, case, self.group), leaves, d_out)


def bytes_sent(rank: int, work: Callable[[], object]) -> int:
    """Of one run of forward and backward, to other ranks."""
    sent = 0
    exchange, send = dist.all_to_all_single, dist.isend

    def counted_exchange(out: Tensor, x: Tensor, recv: list[int], splits: list[int], **rest: Any) -> Any:
        nonlocal sent
        others = sum(splits) - splits[rank]
        sent += others * x[0].numel() * x.element_size() if others else 0
        return exchange(out, x, recv, splits, **rest)

    def counted_send(x: Tensor, **rest: Any) -> Any:
        nonlocal sent
        sent += x.numel() * x.element_size()
        return send(x, **rest)

    collectives.dist.all_to_all_single, collectives.dist.isend = counted_exchange, counted_send  # type: ignore[assignment]
    try:
        work()
    finally:
        collectives.dist.all_to_all_single, collectives.dist.isend = exchange, send
    return sent


def count_bytes(case: Case) -> dict[str, int]:
    """Runs on a rank: bytes it sends each way."""
    ranks = Ranks(case)
    return {way: bytes_sent(ranks.group.rank, work) for way, work in ranks.works.items()}


def wall_time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cpu_time(work: Callable[[], object]) -> float:
    clock = Clock()
    with stamped_messages(clock):
        work()
    return clock.now()


def time_ranks(case: Case, repeats: int, wall: bool) -> dict[str, list[float]]:
    """Runs on a rank: seconds of each turn on the slowest rank; between the turns of the ranks the one process runs."""
    ranks = Ranks(case)
    times: dict[str, list[float]] = {way: [] for way in [*ranks.works, "one process"]}
    whole, d_out = make_inputs(case, slice(None)) if ranks.group.rank == 0 else ([], torch.empty(0))

    def one_process() -> None:
        if ranks.group.rank == 0:
            torch.set_num_threads(ranks.group.size if wall else 1)
            o, _ = gated_delta_rule(*whole, cu_seqlens=case.cu_seqlens, parents=case.parents)
            torch.autograd.grad(o, whole, d_out)
            torch.set_num_threads(1)

    works = {"one process": one_process, **ranks.works}
    for turn in range(repeats + 1):
        for way, work in works.items():
            dist.barrier()
            seconds = wall_time(work) if wall else cpu_time(work)
            slowest = collectives.all_reduce(torch.tensor([seconds], dtype=torch.float64), ranks.group, "max").item()
            if turn:
                times[way].append(slowest / (1 if wall or way != "one process" else ranks.group.size))
    return times


def main(argv: Sequence[str] | None = None) -> None:
    """Run both cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "context_parallel.json")
    args = parser.parse_args(argv)
    results = []
    print(
        f"{args.clock} clock, {args.heads} heads, K = V = {args.dim}, fp32; "
        f"{args.ranks} ranks x 1 thread, 1 process x {args.ranks} threads"
    )
    print(f"{'case':<26}{'way':<13}{'s':>8}{'x one':>7}  {'MB sent per rank'}")
    with RankPool(args.ranks) as pool:
        for case in make_cases(args.scale, args.heads, args.dim):
            times = pool.run(time_ranks, args.ranks, case, args.repeats, args.clock == "wall", timeout=600)[0]
            sent = pool.run(count_bytes, args.ranks, case, timeout=300)
            alone = statistics.median(times["one process"])
            for way in ("one process", *WAYS):
                seconds = statistics.median(times[way])
                per_rank = [rank.get(way, 0) for rank in sent]
                row = {
                    "case": case.name,
                    "way": way,
                    "seconds": seconds,
                    "all_seconds": times[way],
                    "times_one_process": seconds / alone,
                    "bytes_sent_per_rank": per_rank,
                }
                results.append(row)
                megabytes = ", ".join(f"{b / 1e6:.2f}" for b in per_rank)
                print(f"{case.name:<26}{way:<13}{seconds:>8.3f}{seconds / alone:>7.2f}  {megabytes}", flush=True)
    facts = {
        "benchmark": "context_parallel",
        "date": datetime.now(UTC).date().isoformat(),
        "ranks": args.ranks,
        "threads_per_rank": 1,
        "threads_of_one_process": args.ranks,
        "heads": args.heads,
        "dim": args.dim,
        "repeats": args.repeats,
        "clock": args.clock,
        "statistic": "median of seconds, forward and backward, slowest rank",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
