"""Progress of a run: a bar on a terminal, one line for each step elsewhere."""

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from deltamesh.train.loop import StepRecord


def step_text(record: "StepRecord") -> str:
    """What a step gave, in one line without its number.

    Example: `loss 1.2345  grad 0.52  1,234 tok/s  sharing 2.8x`
    """
    text = (
        f"loss {record.loss_per_token:.4f}  grad {record.grad_norm:.2g}  "
        f"{record.tokens_per_second:,.0f} tok/s  sharing {record.sharing:.1f}x"
    )
    return text + ("  SKIPPED: the gradients were not finite, nothing was updated" if record.skipped else "")


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any.

    Example:
        >>> clock(34.4), clock(3725)
        ('0:34', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class StepProgress:
    """Shows steps as they are done.

    The time left is guessed from all steps but the first, which also warms up.

    Args:
        steps: of the run.
        console: where to; a bar is drawn only if it is a terminal.
        quiet: shows nothing: for ranks that do not speak.
    """

    def __init__(self, steps: int, console: Console, *, quiet: bool = False) -> None:
        self._steps = steps
        self._console = console
        self._quiet = quiet
        self._first_done: float | None = None
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=steps)

    def __enter__(self) -> "StepProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, done: int, record: "StepRecord") -> None:
        """Shows step number `done` of the run."""
        if self._quiet:
            return
        if self._console.is_terminal:
            if record.skipped:  # stays on the screen, unlike the bar's text
                self._console.print(f"step {record.step}: {step_text(record)}", highlight=False)
            self._bar.update(self._task, completed=done, description=step_text(record))
            return
        now = time.monotonic()
        if self._first_done is None:
            self._first_done = now
            left = record.seconds * (self._steps - done)
        else:
            left = (now - self._first_done) / (done - 1) * (self._steps - done)
        width = len(str(self._steps))
        # print, not the console: a line must not be wrapped at the width of a terminal that is not there
        print(
            f"step {done:{width}}/{self._steps}  {step_text(record)}  eta {clock(left)}",
            file=self._console.file,
            flush=True,
        )
