"""`deltamesh probe MODEL`: training steps on one or several topologies, side by side, and whether they agree."""

import argparse
import statistics
from collections.abc import Mapping
from itertools import groupby

from deltamesh.cli.arguments import add_topology_arguments, parse_topology, resolve_topology
from deltamesh.cli.errors import CommandError, CommandParser, UsageError, user_errors
from deltamesh.cli.probe_steps import ProbeResult, ProbeSettings, largest_difference, probe_on_rank
from deltamesh.cli.ranks import on_ranks, rank_here, say, under_launcher, world_size
from deltamesh.topology import Topology

TOLERANCES: Mapping[str, float] = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 5e-2}
_NEEDED = ("steps", "groups", "prompt_tokens", "completions", "completion_tokens", "max_rows")


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = CommandParser(prog=prog, description=description)
    parser.add_argument("model", metavar="MODEL", help="'tiny', a Hugging Face directory, or a Hub id")
    add_topology_arguments(parser)
    parser.add_argument(
        "--topology",
        action="extend",
        nargs="+",
        metavar="SIZES",
        help="instead of --dp, --cp and --tp: one or several topologies such as cp=2,tp=2; the first is the reference",
    )
    parser.add_argument(
        "--no-reference", action="store_true", help="with one topology: do not compare it with one process"
    )
    parser.add_argument("--steps", type=int, default=3, help="training steps of each topology (%(default)s)")
    parser.add_argument("--groups", type=int, default=2, help="groups of sequences of a step (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="shared by a group (%(default)s)")
    parser.add_argument("--completions", type=int, default=4, help="sequences of a group (%(default)s)")
    parser.add_argument("--completion-tokens", type=int, default=48, help="about, of each sequence (%(default)s)")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32", help="of the model (%(default)s)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--max-rows", type=int, default=16384, help="tokens of a micro-batch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (%(default)s)")
    return parser


def main(arguments: list[str], parser: argparse.ArgumentParser) -> int:
    """Runs the topologies, prints the table, and returns 1 if they disagree."""
    args = parser.parse_args(arguments)
    settings, topologies = _checked(args)
    results: dict[Topology, ProbeResult] = {}
    alone = [topology for topology in topologies if topology.world_size == 1]
    several = sorted((t for t in topologies if t.world_size > 1), key=lambda t: t.world_size)
    for size, group in groupby(several, key=lambda t: t.world_size):
        results |= on_ranks(probe_on_rank, settings, list(group), processes=size)
    if rank_here() > 0:
        return 0
    if alone and under_launcher() and not several:
        results |= on_ranks(probe_on_rank, settings, alone, processes=1)
    elif alone:  # in this process: where ranks were needed, they are done
        results |= probe_on_rank(settings, alone)
    return _report(settings, topologies, results)


def _checked(args: argparse.Namespace) -> tuple[ProbeSettings, list[Topology]]:
    for name in _NEEDED:
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} is not positive")
    world = world_size(args.processes)
    if args.topology is None:
        topologies = [resolve_topology(world, dp=args.dp, cp=args.cp, tp=args.tp, sp=args.sp)]
    elif any(getattr(args, name) is not None for name in ("dp", "cp", "tp", "sp")):
        raise UsageError("--topology and --dp, --cp, --tp, --sp both say how ranks are laid out; give one of them")
    else:
        topologies = list(dict.fromkeys(parse_topology(text) for text in args.topology))
    if world is not None:
        with user_errors():
            for topology in topologies:
                topology.check_world(world)
    if len(topologies) == 1 and topologies[0].world_size > 1 and not args.no_reference:
        topologies.insert(0, Topology())
    with user_errors():
        from deltamesh.models.config import load_config

        config = load_config(args.model)
        for topology in topologies:
            topology.check_model(config)
    names = ProbeSettings.__dataclass_fields__
    return ProbeSettings(**{name: getattr(args, name) for name in names}), topologies


def _report(settings: ProbeSettings, topologies: list[Topology], results: Mapping[Topology, ProbeResult]) -> int:
    from rich.console import Console
    from rich.table import Table

    first, tolerance = topologies[0], TOLERANCES[settings.dtype]
    one = results[first]
    table = Table(
        title=f"{settings.model}, rank-1 LoRA, {settings.dtype}: {one.tokens:,} tokens a step, {settings.steps} steps"
    )
    for name in ("topology", "ranks", "first step s", "s/step", "tok/s", "sharing", "loss", "grad norm", "difference"):
        table.add_column(name, justify="left" if name == "topology" else "right", no_wrap=True)
    complaints = []
    for topology in topologies:
        result = results[topology]
        later = statistics.median(result.seconds[1:] or result.seconds)
        difference = "reference"
        if topology != first:
            worst, where, norm = largest_difference(result, one)
            difference = f"{max(worst, norm):.1e}"
            if not (worst <= tolerance and norm <= tolerance):
                complaints.append(f"{topology}: {where} differs by {worst:.1e}, the gradient norm by {norm:.1e}")
        table.add_row(
            str(topology), str(topology.world_size), f"{result.seconds[0]:.3f}", f"{later:.3f}",
            f"{result.tokens / later:,.0f}", f"{result.tokens / result.rows:.1f}x",
            " ".join(f"{loss:.4f}" for loss in result.losses), " ".join(f"{norm:.4f}" for norm in result.norms),
            difference,
        )  # fmt: skip
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
    if len(topologies) == 1:
        say("one topology, so nothing to compare it with")
    elif complaints:
        raise CommandError(
            f"the topologies disagree with {first} by more than {tolerance:g} (relative): {'; '.join(complaints)}"
        )
    else:
        say(
            f"all topologies agree with {first}: log-probs, hidden states and gradient norm of every step on every "
            f"rank, within {tolerance:g} (relative)"
        )
    return 0
