"""`deltamesh verify [MODEL]`: the topology matrix against one process, and one process against Hugging Face."""

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltamesh.cli.arguments import parse_topology
from deltamesh.cli.errors import CommandError, CommandParser, user_errors
from deltamesh.cli.ranks import under_launcher
from deltamesh.topology import Topology

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from transformers import Qwen3_5TextConfig

    from deltamesh.testing.equivalence import Scenario
    from deltamesh.testing.verification import Verdict

_MAX_PARAMETERS = 50_000_000
_CUTS = ("balanced", "before-forks", "at-forks", "after-forks", "one-row-and-empty")


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = CommandParser(prog=prog, description=description)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="tiny", help="'tiny' or a directory (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "both"),
        default="both",
        help="float64: against one process with naive ops; float32: against one process, and that against Hugging Face",
    )
    parser.add_argument(
        "--trained",
        choices=("all", "lora", "both"),
        default="all",
        help="every parameter, or a rank-1 LoRA (%(default)s)",
    )
    parser.add_argument(
        "--topology",
        action="extend",
        nargs="+",
        metavar="SIZES",
        help="only these, such as cp=2,tp=2 or 122 (default: a matrix of up to 8 ranks, with and without sp)",
    )
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--cuts", choices=_CUTS, default="balanced", help="where slices begin (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and of the adapter (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there; must not exist")
    return parser


def main(arguments: list[str], parser: argparse.ArgumentParser) -> int:
    """Runs the matrix, prints its tables, and fails if anything is out of tolerance."""
    args = parser.parse_args(arguments)
    topologies = _checked(args)
    start = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from rich.console import Console

    from deltamesh.testing.rank_pool import RankPool

    console = Console()
    verdicts: list[tuple[dict[str, Any], Verdict]] = []
    with RankPool(max(topology.world_size for topology in topologies)) as pool:
        for labels, scenario in _scenarios(args):
            verdicts += [(labels, v) for v in _run(pool, labels, scenario, topologies, args.timeout, console)]
    if args.json is not None:
        _write_json(args.json, verdicts)
    missed = [f"{v.run} ({labels['dtype']}, {labels['trained']})" for labels, v in verdicts if not v.good]
    if missed:
        raise CommandError(f"{len(missed)} of {len(verdicts)} comparisons are out of tolerance: {', '.join(missed)}")
    print(f"all {len(verdicts)} comparisons are within tolerance ({time.monotonic() - start:.0f} s)")
    return 0


def _checked(args: argparse.Namespace) -> list[Topology]:
    """The topologies; everything that can be wrong is found here."""
    if under_launcher():
        raise CommandError("verify starts its own processes, as many as each topology needs; run it without torchrun")
    if args.json is not None and (args.json.exists() or not args.json.absolute().parent.is_dir()):
        raise CommandError(f"--json {args.json}: give a file that does not exist yet, in a directory that does")
    if args.timeout <= 0:
        raise CommandError(f"--timeout {args.timeout} is not positive")
    chosen = None if args.topology is None else list(dict.fromkeys(parse_topology(text) for text in args.topology))
    with user_errors():
        from deltamesh.models.config import load_config

        config = load_config(args.model)
        _check_size(args.model, config)
        for topology in chosen or []:
            topology.check_model(config)
    if chosen is not None:
        return chosen
    from deltamesh.testing.verification import matrix
    from deltamesh.topology import tensor_parallel_sizes

    return [topology for topology in matrix() if topology.tp in tensor_parallel_sizes(config)]


def _check_size(model: str, config: "Qwen3_5TextConfig") -> None:
    from deltamesh.models.specs import param_specs

    size = sum(math.prod(spec.shape) for spec in param_specs(config).values())
    if size > _MAX_PARAMETERS:
        raise CommandError(
            f"{model} has {size:,} parameters; verify runs many copies on this machine's CPU and takes models of up to "
            f"{_MAX_PARAMETERS:,}; verify a smaller model of its family, or compare topologies with the probe command"
        )


def _scenarios(args: argparse.Namespace) -> "Sequence[tuple[dict[str, Any], Scenario]]":
    from deltamesh.models.config import load_config
    from deltamesh.testing.equivalence import Scenario, both_factors_lora, forked_inputs

    inputs = forked_inputs(vocab_size=load_config(args.model).vocab_size)
    adapters = {"all": None, "lora": both_factors_lora()}
    return [
        (
            {"model": args.model, "dtype": dtype, "trained": trained},
            Scenario(
                model=args.model,
                dtype=dtype,
                lora=lora,
                recompute=args.recompute,
                cuts=args.cuts,
                seed=args.seed,
                inputs=inputs,
            ),
        )
        for trained, lora in adapters.items()
        if args.trained in (trained, "both")
        for dtype in ("float64", "float32")
        if args.dtype in (dtype, "both")
    ]


def _run(
    pool: Any,
    labels: dict[str, Any],
    scenario: "Scenario",
    topologies: Sequence[Topology],
    timeout: float,
    console: "Console",
) -> "list[Verdict]":
    """One table; what is known is shown even if a topology then fails to run."""
    from deltamesh.testing.rank_pool import RanksFailed, RankTimeout
    from deltamesh.testing.verification import verify

    what = "every parameter" if labels["trained"] == "all" else "a rank-1 LoRA"
    print(f"{labels['model']}, {labels['dtype']}, training {what}: relative errors, worst of all tensors and ranks")
    verdicts: list[Verdict] = []
    try:
        with user_errors(RanksFailed, RankTimeout, AssertionError), console.status("running") as status:
            for verdict in verify(pool, scenario, topologies, timeout=timeout):
                verdicts.append(verdict)
                status.update(f"{len(verdicts)} done, last {verdict.run}")
    finally:
        for reference, same in groupby(verdicts, key=lambda verdict: verdict.reference):
            _print(console, _table(reference, list(same)))
    return verdicts


def _table(reference: str, verdicts: "Sequence[Verdict]") -> "Table":
    from rich.table import Table

    from deltamesh.testing.verification import KINDS

    table = Table(title=f"against {reference}; tolerance {verdicts[0].tolerance:g}", title_justify="left")
    for name in ("topology", *KINDS.values(), "worst tensor", "rank", ""):
        table.add_column(name, justify="right" if name in (*KINDS.values(), "rank") else "left", no_wrap=True)
    for verdict in verdicts:
        largest = verdict.largest
        errors = [verdict.worst.get(kind) for kind in KINDS]
        table.add_row(
            verdict.run,
            *("-" if d is None else f"{d.error:.1e}" for d in errors),
            largest.tensor if largest.error > 0 else "none differs",
            str(largest.rank) if largest.error > 0 else "",
            "ok" if verdict.good else "MISS",
            style=None if verdict.good else "bold red",
        )
    return table


def _print(console: "Console", table: "Table") -> None:
    from rich.console import Console

    (console if console.is_terminal else Console(width=200)).print(table)


def _write_json(path: Path, verdicts: "Sequence[tuple[dict[str, Any], Verdict]]") -> None:
    rows = [
        {
            **labels,
            "run": verdict.run,
            "reference": verdict.reference,
            "tolerance": verdict.tolerance,
            "good": verdict.good,
            "worst": {
                kind: {"error": d.error if math.isfinite(d.error) else None, "tensor": d.tensor, "rank": d.rank}
                for kind, d in verdict.worst.items()
            },
        }
        for labels, verdict in verdicts
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
