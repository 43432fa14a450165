"""What a person sees: how far the run is, in the end a table, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from encoder_client.bench.result import ENGINE, LANGUAGE_ONLY, SPLIT, WHOLE, Result, Served
from encoder_client.errors import EncoderClientError

_REFRESHES_PER_SECOND = 2
"""The display draws on the cores that are measured."""
_QUIET_LOAD = 0.5
_INCHES = (10.5, 4.2)
_DOTS_PER_INCH = 120
_MIB = 1 << 20
_LABELS = {WHOLE: "own tower", SPLIT: "by encoder"}


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
    def stage(self, text: str, total: float | None = None) -> Iterator[Callable[[], None]]:
        """A stage that lasts as long as the block.

        Args:
            text: what happens.
            total: steps; None: not known.

        Yields:
            To be called with each step.
        """
        task = self._progress.add_task(text, total=total)
        try:
            yield lambda: self._progress.advance(task, 1)
        finally:
            self._progress.update(task, total=1, completed=1)


def result_table(result: Result) -> Table:
    """The figures of both ways of serving, side by side."""
    table = Table(title="bench vllm", title_justify="left", title_style="bold")
    table.add_column("figure")
    for name in (*_LABELS.values(), ""):
        table.add_column(name, justify="right")
    if (load := result.machine.load_average_at_start) > _QUIET_LOAD:
        table.caption = f"load average at the start {load:g}: other programs had the cores too"
    for workload, sides in result.workloads.items():
        table.add_row(f"[bold]{workload} images[/]")
        for name, one, other in figures(sides[WHOLE], sides[SPLIT]):
            table.add_row(name, _shown(one), _shown(other), f"{other / one:.2f} ×")
        table.add_section()
    table.add_row("[bold]peak memory under load, MiB[/]")
    memory = {name: peaks["serving"] / _MIB for name, peaks in result.peak_bytes.items()}
    table.add_row("engine", _shown(memory.pop(ENGINE)), _shown(memory.pop(LANGUAGE_ONLY)))
    for name, value in memory.items():
        table.add_row(name, "", _shown(value))
    table.add_row("the tower's weights", _shown(result.tower_bytes / _MIB), "0")
    return table


def figures(one: Served, other: Served) -> Iterator[tuple[str, float, float]]:
    """Each figure by its name, of both."""
    yield "requests/s", one.requests_per_second, other.requests_per_second
    yield "first token, p50, ms", one.first_token_ms.p50, other.first_token_ms.p50
    yield "first token, p99, ms", one.first_token_ms.p99, other.first_token_ms.p99
    yield "whole answer, p50, ms", one.answer_ms.p50, other.answer_ms.p50


def write_plot(result: Result, file: Path) -> None:
    """Draws the figures as bars: a PNG, replaced if it is there.

    Raises:
        EncoderClientError: it cannot be written.
    """
    from matplotlib.figure import Figure

    # Without pyplot: there is no window, no state of the process, and nothing to close.
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots(1, 3)
    places = range(len(result.workloads))
    served = {side: [sides[side] for sides in result.workloads.values()] for side in (WHOLE, SPLIT)}
    rates = {side: [one.requests_per_second for one in of_side] for side, of_side in served.items()}
    times = {side: [one.first_token_ms.p50 for one in of_side] for side, of_side in served.items()}
    for axis, title, figures_of in ((axes[0], "requests per second", rates), (axes[1], "first token, p50, ms", times)):
        for shift, (side, label) in zip((-0.2, 0.2), _LABELS.items(), strict=True):
            values = figures_of[side]
            bars = axis.bar([place + shift for place in places], values, 0.4, label=label)
            axis.bar_label(bars, [_shown(one) for one in values], fontsize=7, padding=2)
        axis.set_xticks(places, [f"{workload} images" for workload in result.workloads])
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=7, loc="lower right")
    bars = axes[2].bar(
        list(result.peak_bytes), [peaks["serving"] / _MIB for peaks in result.peak_bytes.values()], color="gray"
    )
    axes[2].bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axes[2].set_title("peak memory under load, MiB", fontsize=10)
    axes[2].tick_params(axis="x", labelrotation=20, labelsize=7)
    machine = result.machine
    figure.supxlabel(f"{machine.cpu}, {machine.cores} cores, {result.started_at[:10]}", fontsize=6, color="gray")
    try:
        figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise EncoderClientError(f"cannot write {file}: {error.strerror}") from None


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")
