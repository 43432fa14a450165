"""Draws the charts of a result."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from encoder_svc.bench.result import AnyResult, Chart
from encoder_svc.errors import SetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (7.0, 4.2)
_DOTS_PER_INCH = 120


def require_matplotlib() -> None:
    """Makes sure that a plot can be drawn: to be asked before a run, not after it.

    Raises:
        SetupError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise SetupError("plots are drawn by matplotlib: `pip install 'encoder-svc[bench]'`")


def write_plot(result: AnyResult, file: Path) -> None:
    """Draws all charts of a result, side by side.

    Args:
        result: what to draw.
        file: a PNG; replaced if it is there.

    Raises:
        SetupError: matplotlib is not installed, or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Without pyplot: there is no window, no state of the process, and nothing to close.
    layout = ConstrainedLayoutEngine(rect=(0, 0.03, 1, 0.97))  # the foot is for the machine
    figure = Figure(figsize=(_INCHES[0] * len(result.charts), _INCHES[1]), layout=layout)
    for number, chart in enumerate(result.charts, start=1):
        _draw(figure.add_subplot(1, len(result.charts), number), chart)
    machine = result.machine
    figure.text(
        0.995, 0.005, f"{machine.cpu}, {machine.cores} cores, {result.started_at[:10]}",
        ha="right", va="bottom", fontsize=6, color="gray",
    )  # fmt: skip
    try:
        figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise SetupError(f"cannot write {file}: {error.strerror}") from None


def _draw(axes: Axes, chart: Chart) -> None:
    if chart.kind == "lines":
        seen: dict[str, Any] = {}
        for series in chart.series:
            # Series of one name, such as the lives of one process, share a colour and a line of the legend.
            label = "_nolegend_" if series.label in seen else series.label
            [line] = axes.plot([float(x) for x in series.x], series.y, label=label, color=seen.get(series.label))
            seen.setdefault(series.label, line.get_color())
    else:
        _draw_bars(axes, chart)
    if chart.logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    if chart.bound is not None:
        axes.axhline(chart.bound, color="gray", linestyle="--", linewidth=1)
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def _draw_bars(axes: Axes, chart: Chart) -> None:
    width = 0.8 / len(chart.series)
    for number, series in enumerate(chart.series):
        shift = (number - (len(chart.series) - 1) / 2) * width
        bars = axes.bar([place + shift for place in range(len(series.y))], series.y, width, label=series.label)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axes.set_xticks(range(len(chart.series[0].x)), [str(x) for x in chart.series[0].x])
