"""A YAML file and options of the command line -> a configuration; every mistake is one paragraph."""

import difflib
import inspect
import re
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jsonargparse
import yaml  # type: ignore[import-untyped]

from deltamesh.cli.config import TrainConfig
from deltamesh.cli.errors import CommandError, UsageError

Known = Mapping[str, Any]
"""Dotted names of all fields, and their types."""


def make_parser(prog: str, description: str) -> jsonargparse.ArgumentParser:
    """The parser of `CONFIG` and one option for each field."""
    parser = jsonargparse.ArgumentParser(prog=prog, description=description, exit_on_error=False)
    parser.add_argument("config_file", metavar="CONFIG", help="a YAML file; see examples/human_eval.yaml")
    parser.add_argument("--config", action="config", help=jsonargparse.SUPPRESS)
    parser.add_class_arguments(TrainConfig, nested_key=None)
    texts = dict(_field_texts(TrainConfig))
    for action in parser._actions:
        action.help = texts.get(action.dest, action.help)
    return parser


def read_config(arguments: Sequence[str], parser: jsonargparse.ArgumentParser) -> TrainConfig:
    """The configuration of a YAML file and of the options that override it.

    Raises:
        CommandError: no such file, not YAML, an unknown key or option (with the closest known one), or a value that
            cannot be.
    """
    known = dict(_all_fields(TrainConfig))
    _check_options(arguments, known)
    try:
        # The file's name is only known after parsing, and options must win over the file wherever they stand.
        path = parser.parse_args([*arguments, *_placeholders(arguments)]).config_file
        _check_keys(_read_yaml(path), known, path)
        parsed = parser.parse_args(["--config", path, *arguments])
        built = parser.instantiate(parsed)
        return TrainConfig(**{f.name: getattr(built, f.name) for f in fields(TrainConfig)})
    except ArgumentError as error:
        raise UsageError(_reworded(str(error), known)) from error
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error


def _placeholders(arguments: Sequence[str]) -> list[str]:
    """Values of required fields that the file may give."""
    given = {word.partition("=")[0] for word in arguments}
    return [] if "--run_directory" in given else ["--run_directory", "-"]


# ---------------------------------------------------------------- unknown keys


def _dataclass_of(kind: Any) -> Any:
    """The dataclass in a field's type (`X` or `X | None`), or None."""
    return next((t for t in (kind, *get_args(kind)) if isinstance(t, type) and is_dataclass(t)), None)


def _all_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in get_type_hints(config).items():
        yield prefix + name, kind
        if group := _dataclass_of(kind):
            yield from _all_fields(group, f"{prefix}{name}.")


def _field_texts(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What the docstrings' `Attributes:` say of each field, by dotted name."""
    texts = dict(re.findall(r"^ +(\w+): (.*)$", inspect.getdoc(config) or "", re.MULTILINE))
    for name, kind in get_type_hints(config).items():
        yield prefix + name, texts[name]
        if group := _dataclass_of(kind):
            yield from _field_texts(group, f"{prefix}{name}.")


def _read_yaml(path: str) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CommandError(f"{path}: there is no such configuration file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise CommandError(f"{path} is not valid YAML: {_one_paragraph(str(error))}") from error
    if not isinstance(content, dict):
        raise CommandError(f"{path} holds no `key: value` lines; see examples/human_eval.yaml for what a run needs")
    return content


def _check_keys(content: Mapping[str, Any], known: Known, path: str, prefix: str = "") -> None:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name not in known:
            raise CommandError(f"{path}: unknown key {name!r}{_closest(name, known)}")
        if isinstance(value, dict) and _dataclass_of(known[name]):
            _check_keys(value, known, path, f"{name}.")


def _check_options(arguments: Sequence[str], known: Known) -> None:
    helps = {"help", "print_config", *(f"{name}.help" for name, kind in known.items() if _dataclass_of(kind))}
    for word in arguments:
        name = word.partition("=")[0].removesuffix("+").removeprefix("--")
        if word.startswith("--") and name not in helps and name not in known:
            raise UsageError(f"unknown option --{name}{_closest(name, known, mark='--')}")


def _closest(name: str, known: Known, mark: str = "") -> str:
    """A hint at the closest field of the same group, else of any group with such a last name, else a list."""
    group, _, leaf = name.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == group}
    everywhere = {k.rpartition(".")[2]: k for k in known}
    for candidates, likeness in ((siblings, 0.6), (everywhere, 0.8)):
        if close := difflib.get_close_matches(leaf, candidates, n=1, cutoff=likeness):
            return f", did you mean {mark}{candidates[close[0]]}?"
    return f" ({group or 'a configuration'} has: {', '.join(siblings)})" if siblings else " (see --help for all)"


# ---------------------------------------------------------------- texts


def _one_paragraph(text: str) -> str:
    return " ".join(text.split())


def _reworded(text: str, known: Known) -> str:
    """The parser lists what it tried, line by line; one needs the name, the value and the type."""
    if missing := re.search(r"arguments are required: (.*)", text):
        return f"{missing[1].replace('config_file', 'CONFIG, a YAML file,')} must be given; see --help"
    found = re.search(r'Parser key "([^"]+)"', text)
    value = re.search(r"(?:Given|Got) value: (?!NestedArg)([^\n]*)", text)
    nested = re.search(r"NestedArg\(key='([^']+)', val=([^)]*)\)", text)
    if found is not None and nested is not None:
        name, shown = f"{found[1]}.{nested[1]}", nested[2]
    elif found is not None and value is not None:
        name, shown = found[1], value[1]
    else:
        return _one_paragraph(text)
    return f"{name}={shown} is not {_type_text(known[name])}" if name in known else _one_paragraph(text)


def _type_text(kind: Any) -> str:
    if group := _dataclass_of(kind):
        return f"a group of {', '.join(f.name for f in fields(group))}, or null"
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    return text.replace("typing.Literal", "one of ").replace("NoneType", "null").replace("None", "null")
