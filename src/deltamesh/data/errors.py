"""The one error of data files: it knows the file, the line and the field."""

from pathlib import Path


class DataError(ValueError):
    """A data file cannot be used; the message reads `file:line: field: what is wrong and what to do`.

    Attributes:
        path: the file.
        line: line number from 1, or None where the whole file is meant.
        field: the field of the line, such as `completions[2].weight`, or None.
        reason: the message without its position.
    """

    def __init__(self, reason: str, *, path: Path | str, line: int | None = None, field: str | None = None) -> None:
        self.path = Path(path)
        self.line = line
        self.field = field
        self.reason = reason
        position = str(path) if line is None else f"{path}:{line}"
        super().__init__(": ".join([position, *([field] if field else []), reason]))


class FieldError(ValueError):
    """What is wrong with one field of a line; the reader of the file adds the position and raises `DataError`."""

    def __init__(self, reason: str, *, field: str | None = None) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {reason}" if field else reason)
