"""What a person sees: how far the run is, and in the end a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from encoder_svc.bench.result import AnyResult, FloorCheck

Advance = Callable[[float], None]
"""Tells how much more of a stage's total is done."""

_REFRESHES_PER_SECOND = 2
"""The display draws on the cores that are measured."""
_QUIET_LOAD = 0.5
_UNITS = {"video": "videos", "audio": "sounds"}
"""What a run counts; the keys of its result say images for all."""


class Display:
    """Stages of a run, one line each, drawn on stderr while they last.

    Args:
        console: where to draw. It draws nothing that is no terminal.
    """

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, console=console, transient=True, refresh_per_second=_REFRESHES_PER_SECOND,
            disable=not console.is_terminal,
        )  # fmt: skip

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draws until the block ends."""
        with self._progress:
            yield

    @contextmanager
    def stage(self, text: str, total: float | None = None) -> Iterator[Advance]:
        """A stage that lasts as long as the block.

        Args:
            text: what happens.
            total: in whatever the stage counts; None: not known.
        """
        task = self._progress.add_task(text, total=total)
        try:
            yield lambda amount: self._progress.advance(task, amount)
        finally:
            self._progress.update(task, total=1, completed=1)


def result_table(result: AnyResult) -> Table:
    """The figures of a result, with their floors."""
    table = Table(title=f"bench {result.command}", title_justify="left", title_style="bold")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("floor", justify="right")
    table.add_column("")
    load = result.machine.load_average_at_start
    if load > _QUIET_LOAD:
        table.caption = f"load average at the start {load:g}: other programs had the cores too"
    floors = {check.figure: check for check in result.floors}
    unit = _UNITS.get(str(result.parameters.get("medium")), "images")
    for name, value in flatten(result.figures()):
        check = floors.get(name)
        text = "" if check is None else bound(check)
        table.add_row(name.replace("images", unit), shown(value), text, "" if check is None else _mark(check))
    return table


def flatten(figures: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float | bool | None]]:
    """Each number by its dotted name; lists are left out, charts show them."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield prefix + name, value


def shown(value: float | bool | None) -> str:
    """A figure as text, with three digits that tell something."""
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def bound(check: FloorCheck) -> str:
    """A floor as text."""
    return f"{'≥' if check.relation == 'at least' else '≤'} {check.bound:g}"


def _mark(check: FloorCheck) -> str:
    return "[green]✓[/]" if check.met else "[red]✗ not met[/]"
