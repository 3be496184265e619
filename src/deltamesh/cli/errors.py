"""Errors of the user, not of the program: one paragraph on stderr and a non-zero status, without a traceback."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class CommandError(Exception):
    """A command cannot do what it was asked; the text says what was given, why it cannot be, and what to do."""

    status = 1


class UsageError(CommandError):
    """The command line itself is wrong."""

    status = 2


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are raised like any other, so that under torchrun they are printed once."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


@contextmanager
def user_errors(*others: type[Exception]) -> Iterator[None]:
    """Turns ValueError, OSError and errors of the given kinds into a `CommandError` with the same text.

    Only around code whose errors are about what the user gave: a fault of the program keeps its traceback.

    Example:
        >>> with user_errors():
        ...     raise ValueError("tp=3 does not fit")
        Traceback (most recent call last):
        deltamesh.cli.errors.CommandError: tp=3 does not fit
    """
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, *others)
    try:
        yield
    except kinds as error:
        raise CommandError(_text(error)) from error


@contextmanager
def disagreements() -> Iterator[None]:
    """Turns only a disagreement between ranks into a `CommandError`: around the program's own work."""
    from deltamesh.distributed.agreement import RankDisagreement

    try:
        yield
    except RankDisagreement as error:
        raise CommandError(str(error)) from error


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
