"""The console of a run: bars, one line of key metrics, and tables.

On a terminal `Progress` keeps two bars and the newest metrics in place. Anywhere
else (a CI log, a pipe) it prints one plain line a step, without escape codes, and
`table` prints the same table in plain text. What a model wrote is shown, never obeyed:
neither its control codes nor its brackets reach the terminal as commands.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column, Table
from rich.text import Text

from jppo.metrics import scalars

# What the console shows of a step, in this order: metric -> short label.
KEY_METRICS = {
    "scores": "score",
    "gold": "gold",
    "kl": "kl",
    "entropy": "entropy",
    "clip_frac": "clip",
    "explained_variance": "expl_var",
    "lengths": "length",
    "seconds": "s/step",
}


def number(value: Any) -> str:
    """A number as people read it: about three digits, steady in width."""
    if not isinstance(value, Real) or not math.isfinite(value):
        return "–" if value is None else str(value)
    whole, size = isinstance(value, Integral), abs(float(value))
    if not whole and size >= 1e7:
        return f"{value:.2e}"
    if whole or size >= 99.95:
        return f"{value:,.0f}"
    if 0 < size < 9.995e-4:
        return f"{value:.1e}"
    return f"{value:.{1 if size >= 9.995 else 2 if size >= 0.9995 else 3}f}"


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        known = task.total is not None
        return Text(f"{task.completed:.0f}/{task.total:.0f}" if known else "")


class _Pace:
    """Time left, from the pace since the first count, which also compiled."""

    def __init__(self, total: int | None):
        self.total = total
        self._first: tuple[int, float] | None = None  # count and time

    def left(self, done: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (done, now)
        count = done - self._first[0]
        if self.total is None or count < 1 or done >= self.total:
            return ""
        seconds = round((now - self._first[1]) / count * (self.total - done))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours}:{minutes:02d}:{seconds % 60:02d} left"


class Progress:
    """Bars with the time left on a terminal; one plain line a step elsewhere.

    with Progress(steps, title="PPO") as bar:
        bar.phase("generate")
        bar.step(1, {"scores": 0.2, "kl": 0.0})

    `done` steps were taken before (a resumed run). `keys` maps the metrics to show
    to their labels; where a step has none of them, all of its metrics are shown.
    """

    def __init__(
        self,
        total: int,
        *,
        title: str = "",
        quiet: bool = False,
        done: int = 0,
        keys: Mapping[str, str] = KEY_METRICS,
    ):
        self.total, self.title, self.quiet, self.keys = total, title, quiet, keys
        self._done, self._pace = done, _Pace(total)
        self._phase_done, self._phase_pace = 0, _Pace(None)
        self._shown: list[tuple[str, str]] = []
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        console = _console()
        if self.quiet or not console.is_terminal:
            return self
        short = Column(no_wrap=True, overflow="ellipsis", max_width=16)
        self._bars = Bars(
            TextColumn("{task.description}", table_column=short, markup=False),
            BarColumn(bar_width=None),
            _Count(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", style="cyan"),
            console=console,
            expand=True,
        )
        self._overall = self._bars.add_task(
            self.title, total=self.total, completed=self._done, left=""
        )
        self._phase = self._bars.add_task("", visible=False, left="")
        self._live = Live(console=console, get_renderable=self._render)
        self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._live is not None:
            self._bars.update(self._phase, visible=False)
            self._bars.stop_task(self._overall)
            self._live.stop()
            self._live = None

    def phase(self, name: str, total: int | None = None) -> None:
        """Names what runs now; with `total`, `advance` fills its bar."""
        self._phase_done, self._phase_pace = 0, _Pace(total)
        if self._live is not None:
            self._bars.remove_task(self._phase)
            self._phase = self._bars.add_task(f"  {name}", total=total, left="")
        elif total is not None and not self.quiet:  # long, and no step to show for it
            print(f"{self.title}  {name}, {total:,} to do".strip(), flush=True)

    def advance(self, n: int = 1) -> None:
        """Moves the bar of the current phase on by `n`."""
        self._phase_done += n
        left = self._phase_pace.left(self._phase_done)
        if self._live is not None:
            self._bars.update(self._phase, completed=self._phase_done, left=left)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Marks `step` steps as done and shows their key metrics."""
        self._done = step
        values = scalars(metrics)
        left = self._pace.left(step)
        if self._live is not None:
            self._shown = _key_items(values, self.keys)
            self._bars.update(self._overall, completed=step, left=left)
        elif not self.quiet:
            width = len(str(self.total))
            head = f"{self.title} {step:>{width}}/{self.total}".strip()
            tail = f"  {left}" if left else ""
            line = "".join(f"  {k} {v}" for k, v in _key_items(values, self.keys))
            print(head + line + tail, flush=True)

    def note(self, text: str) -> None:
        """Prints a line that stays, above the bars."""
        if self._live is not None:
            self._live.console.print(_printable(text, self._live.console))
        elif not self.quiet:
            print(_printable(text, _console()).plain, flush=True)

    def _render(self) -> Group:
        items = [Text.assemble((f"{k} ", "dim"), v) for k, v in self._shown]
        return Group(self._bars, Columns(items, padding=(0, 3)))


def _key_items(values: Mapping[str, Any], keys: Mapping[str, str]) -> list:
    shown = [(keys[k], number(values[k])) for k in keys if k in values]
    shown = shown or [(k, number(v)) for k, v in values.items()]
    if values.get("skipped"):  # a step that was thrown away is never left unsaid
        shown.append(("skipped", number(values["skipped"])))
    return shown


def table(title: str, rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> None:
    """Prints a table: columns of numbers to the right, texts folded to the width.

    Works when piped, without escape codes. Raises ValueError for a ragged row.
    """
    rows, console = [list(row) for row in rows], _console()
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"{len(row)} cells for {len(columns)} columns: {row}")
    is_text = [
        any(isinstance(row[i], str) for row in rows) for i in range(len(columns))
    ]
    long = any(len(c) > 40 for row in rows for c in row if isinstance(c, str))
    grid = Table(
        title=_printable(title, console),
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE,
        show_lines=long,
    )
    for name, text in zip(columns, is_text, strict=True):
        justify = "left" if text else "right"
        grid.add_column(Text(name), justify=justify, overflow="fold", no_wrap=not text)
    for row in rows:
        cells = (c if isinstance(c, str) else number(c) for c in row)
        grid.add_row(*(_printable(c, console) for c in cells))
    console.print(grid)


def show(text: str) -> None:
    """Prints what a model wrote: control codes are shown, not obeyed."""
    print(_printable(text, _console()).plain, flush=True)


def _console() -> Console:
    # Asked of stdout itself: FORCE_COLOR in a CI must not fill its log with codes.
    terminal = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return Console(
        file=sys.stdout,
        force_terminal=terminal,
        force_jupyter=False,
        color_system="auto" if terminal else None,
        width=None if terminal or "COLUMNS" in os.environ else 100,
        highlight=False,
        emoji=False,
    )


def _printable(text: str, console: Console) -> Text:
    """Text with control codes shown, not obeyed: a model may have written them."""
    shown = "".join(
        c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text
    ).encode(console.encoding, "replace")
    return Text(shown.decode(console.encoding))
