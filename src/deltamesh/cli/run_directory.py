"""A run directory: `config.yaml`, `metrics.jsonl` (a line per step, flushed), and `adapter/` or `model/` at the end."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from deltamesh.cli.errors import CommandError

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
ADAPTER = "adapter"
MODEL = "model"


def check_new_run(path: Path) -> None:
    """Passes if a run can start in `path`.

    Raises:
        CommandError: something is there already, or a parent is not a directory.
    """
    if path.exists() or path.is_symlink():
        raise CommandError(
            f"the run directory {path} exists already; give another run_directory, or move or remove that one"
        )
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise CommandError(f"the run directory {path} cannot be made: {parent} is not a directory")


class RunDirectory:
    """Written by one rank. Making it creates the directory and `config.yaml`; closing it closes `metrics.jsonl`.

    Args:
        path: must not exist.
        config: text of `config.yaml`.

    Raises:
        OSError: the directory exists or cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RunDirectory(Path(folder, "run"), "steps: 3\\n") as run:
        ...         run.log({"step": 1, "loss_sum": float("nan")})
        ...     Path(folder, "run", METRICS).read_text()
        '{"step": 1, "loss_sum": null}\\n'
    """

    def __init__(self, path: Path, config: str) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()  # not exist_ok: of two runs that start together, one must lose
        (path / CONFIG).write_text(config, encoding="utf-8")
        self._metrics = (path / METRICS).open("x", encoding="utf-8")

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()

    def log(self, values: Mapping[str, Any]) -> None:
        """Appends one line; numbers that are not finite become null, because JSON has none."""
        plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self._metrics.write(json.dumps(plain, allow_nan=False) + "\n")
        self._metrics.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (path / METRICS).read_text(encoding="utf-8").splitlines()]
