"""The command line. One module per command; only the module of the command that was asked for is imported.

A command's module has `make_parser(prog, description)` and `main(arguments, parser) -> int`, the exit status.
"""

import argparse
import difflib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final

from deltamesh import __version__
from deltamesh.cli.errors import CommandError
from deltamesh.cli.ranks import complain
from deltamesh.distributed.launch import WorkerFailed

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "train": "train an adapter or a model on JSONL data",
        "probe": "time training steps on topologies and compare what they computed",
        "verify": "compare a model on many topologies with one process and with Hugging Face",
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 good, 1 failed, 2 bad usage, 130 interrupted.

    Example:
        >>> main(["train", "--help"])  # doctest: +SKIP
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    place = next((i for i, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    overview = _overview()
    overview.parse_args(arguments[:place])
    if place == len(arguments):
        overview.print_help(sys.stderr)
        return 2
    return _run(arguments[place], arguments[place + 1 :])


def _run(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        complain("deltamesh", f"there is no command {name!r}{hint} (commands: {', '.join(COMMANDS)})")
        return 2
    prog = f"deltamesh {name}"
    # fla's remark about itself, where it is installed without a GPU, would come once from every rank.
    warnings.filterwarnings("ignore", message="Triton is not supported", category=UserWarning)
    try:
        module = import_module(f"deltamesh.cli.{name}")
        return int(module.main(arguments, module.make_parser(prog, _sentence(COMMANDS[name]))))
    except CommandError as error:
        complain(prog, str(error))
        return error.status
    except WorkerFailed as error:
        complain(prog, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="deltamesh",
        usage="deltamesh [-h] [--version] command ...",
        description="One result on every topology.",
        epilog=f"commands (each has its own --help):\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"deltamesh {__version__}")
    return parser


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."
