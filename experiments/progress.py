"""Progress of a long loop: a live bar on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Mapping

import rich.console
import rich.progress


class Progress:
    """Shows step, scalars, steps per second and time left, on standard error."""

    def __init__(self, total: int, *, start: int = 0, title: str = "", line_seconds: float = 10.0):
        """Starts the clock.

        Args:
          start: Steps done before, by a run that this one resumes; they do not count as speed.
          line_seconds: Without a terminal, at most one line per so many seconds.
        """
        self._total, self._start, self._done = total, start, start
        self._title, self._line_seconds = title, line_seconds
        self._began = self._last_line = time.monotonic()
        self._text = ""
        self._console = rich.console.Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._bar = None
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[text]}"),
                rich.progress.TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, completed=start, text="")

    def update(self, done: int, scalars: Mapping[str, float] | None = None) -> None:
        """Reports that `done` steps are done, and new scalars if there are any."""
        self._done = done
        if scalars is not None:
            self._text = " ".join(f"{name} {value:.3g}" for name, value in scalars.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=f"{self._text} {self._rate():.1f}/s")
        elif time.monotonic() - self._last_line >= self._line_seconds:
            self._line()

    def close(self) -> None:
        """Leaves the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()
        else:
            self._line()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _rate(self) -> float:
        return (self._done - self._start) / max(time.monotonic() - self._began, 1e-9)

    def _line(self) -> None:
        self._last_line = time.monotonic()
        rate = self._rate()
        left = f"{(self._total - self._done) / rate:.0f} s left" if rate else "time left unknown"
        self._console.print(
            f"{self._title} {self._done}/{self._total} {self._text} {rate:.2f} steps/s, {left}",
            markup=False,
        )
