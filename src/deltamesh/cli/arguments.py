"""Topologies on the command line: `--dp 1 --cp 2 --tp 2`, or `--topology cp=2,tp=2` as often as wanted."""

import argparse
import difflib

from deltamesh.cli.errors import CommandError, user_errors
from deltamesh.topology import AXES, Topology

_FLAGS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def parse_topology(text: str) -> Topology:
    """A topology from `cp=2,tp=2` (axes left out are 1; `sp=on` or `sp=off`), or from three digits such as `122`.

    Raises:
        CommandError: the text is no topology; says what of it is wrong.

    Example:
        >>> str(parse_topology("cp=2,tp=2,sp=off"))
        'dp=1 cp=2 tp=2 sp=False'
        >>> parse_topology("122") == parse_topology("cp=2,tp=2")
        True
    """
    if len(text) == len(AXES) and text.isdecimal():
        text = ",".join(f"{axis}={size}" for axis, size in zip(AXES, text, strict=True))
    sizes: dict[str, int] = {}
    sp: bool | None = None
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise CommandError(f"topology {text!r}: {part.strip()!r} is not NAME=VALUE; write for example cp=2,tp=2")
        if name not in (*AXES, "sp"):
            close = difflib.get_close_matches(name, (*AXES, "sp"), n=1, cutoff=0.4)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise CommandError(f"topology {text!r}: unknown name {name!r}{hint} (names: {', '.join(AXES)}, sp)")
        if name in sizes or (name == "sp" and sp is not None):
            raise CommandError(f"topology {text!r}: {name} stands twice; keep one")
        if name == "sp":
            if value.lower() not in _FLAGS:
                raise CommandError(f"topology {text!r}: sp={value} is neither on nor off")
            sp = _FLAGS[value.lower()]
        elif not value.isdecimal() or int(value) < 1:
            raise CommandError(f"topology {text!r}: {name}={value} is not a positive integer")
        else:
            sizes[name] = int(value)
    return Topology(**sizes, sp=sp)


def add_topology_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--processes`, `--dp`, `--cp`, `--tp` and `--sp`."""
    group = parser.add_argument_group("topology")
    group.add_argument(
        "--processes", type=int, metavar="N", help="ranks to start; by default what the topology needs (dp x cp x tp)"
    )
    for axis, what in (("dp", "data"), ("cp", "context"), ("tp", "tensor")):
        variable = f"DELTAMESH_{what.upper()}_PARALLEL_SIZE"
        group.add_argument(
            f"--{axis}", type=int, metavar="N", help=f"{what} parallel size (default: ${variable}, or 1)"
        )
    group.add_argument(
        "--sp", action=argparse.BooleanOptionalAction, help="sequence parallelism over tp (default: on when tp > 1)"
    )


def resolve_topology(
    world_size: int | None,
    *,
    dp: int | None = None,
    cp: int | None = None,
    tp: int | None = None,
    sp: bool | None = None,
) -> Topology:
    """The topology of the sizes that were given, of DELTAMESH_* variables for the others, and of the world size.

    Raises:
        CommandError: a size cannot be, or the sizes do not make up the world.

    Example:
        >>> str(resolve_topology(4, cp=2, tp=2))
        'dp=1 cp=2 tp=2'
    """
    with user_errors():
        return Topology.from_env(world_size=world_size, dp=dp, cp=cp, tp=tp, sp=sp)
