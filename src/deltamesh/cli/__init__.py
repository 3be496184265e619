"""The command line. One module per command; only the module of the command that was asked for is imported.

A command's module has `add_arguments(parser)` and `run(args) -> int`, the exit status.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from deltamesh import __version__

COMMANDS: Final = {
    "doctor": "check this machine: devices, libraries, collectives",
    "plan": "show how a batch is cut and what each rank computes, sends and holds",
    "verify": "compare a model on chosen topologies with one process",
    "train": "train an adapter on JSONL or chat data",
    "probe": "measure what the plan's costs are on this machine",
    "report": "draw and tabulate the runs of a directory",
    "export": "write an adapter or a merged model in Hugging Face format",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Example:
        >>> main(["plan", "--help"])  # doctest: +SKIP
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="deltamesh", description="One result on every topology.")
    parser.add_argument("--version", action="version", version=f"deltamesh {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    requested = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == requested:
            module = import_module(f"deltamesh.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
