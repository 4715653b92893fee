"""Training curves of each stage, from the metrics it recorded.

A stage draws them when it ends (`drawn_panels`). The report of a run shows these; MLflow gets all on one sheet.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.graph.kind import Panels
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.tracking.recorder import MAX_METRICS_BYTES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#7d8694", "#8b94a366"
"""Legible on light pages and on Prefect's dark ones."""
PANEL_INCHES = (3.9, 2.5)
COLORS = ("#2f7ed8", "#e07b39", "#3a9d6e", "#b4489a")
IN_A_ROW = 3
MAX_INTERVALS = 5
"""Between the ticks of an axis."""
PIXELS = 96
"""An inch in SVG."""


@dataclass(frozen=True)
class StageRecord:
    """A stage and the file of its metrics: lines of {"step": int, "metrics": {name: number}}."""

    name: str
    kind: str
    metrics_path: Path

    @property
    def panels(self) -> Panels:
        """The panels of its kind; empty if the kind is not registered in this process."""
        kind = find_kind(self.kind)
        return kind.panels if kind is not None else ()


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Metric → its (step, value) points; empty without a file that can be read; damaged lines are left out."""
    try:
        return parse_metrics(read_bounded(path, MAX_METRICS_BYTES))
    except (OSError, ValueError):
        return {}


def parse_metrics(content: bytes) -> dict[str, list[tuple[int, float]]]:
    """As `read_metrics`, from the content of the file."""
    series: dict[str, list[tuple[int, float]]] = {}
    for line in content.splitlines():
        try:
            record = json.loads(line)
            step, points = record["step"], record["metrics"].items()
            parsed = [(str(name), step, value) for name, value in points if _is_number(step) and _is_number(value)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        for name, at, value in parsed:
            series.setdefault(name, []).append((at, value))
    return series


def _is_number(value: Any) -> bool:
    # Larger integers than these fit into no float.
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def training_figure(panels: Panels, series: dict[str, list[tuple[int, float]]]) -> Figure | None:
    """Curves of one stage; None if it recorded none of the metrics."""
    shown = [(title, [n for n in names if n in series]) for title, names in panels]
    shown = [(title, names) for title, names in shown if names]
    if not shown:
        return None
    figure, grid = panel_grid([title for title, _ in shown], PANEL_INCHES[1])
    width, height = figure.get_size_inches()
    # Fixed margins: measuring every label for a layout takes twice as long as drawing them.
    figure.subplots_adjust(0.55 / width, 0.3 / height, 1 - 0.1 / width, 1 - 0.3 / height, 0.22, 0.33)
    for axes, (title, names) in zip(grid, shown, strict=True):
        if title.startswith("seconds"):
            _stack(axes, names, series)
        else:
            for color, name in zip(itertools.cycle(COLORS), names, strict=False):
                steps, values = zip(*series[name], strict=True)
                marker = "o" if len(steps) < 15 else ""
                one_group = len({n.split("/")[0] for n in names}) == 1
                label = _label(name) if one_group else name.replace("/", " ", 1).replace("_", " ")
                axes.plot(steps, values, color=color, linewidth=1.6, marker=marker, markersize=3, label=label)
        if len(names) > 1:
            _legend(axes, stacked=title.startswith("seconds"))
    return figure


def drawn_panels(panels: Panels, series: dict[str, list[tuple[int, float]]]) -> list[str]:
    """Each panel of which the stage recorded a metric, as an SVG element."""
    figures = [training_figure([panel], series) for panel in panels]
    return [svg(figure) for figure in figures if figure is not None]


def svg(figure: Figure) -> str:
    """A figure as an SVG element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    # The header before the element is only for a file of its own.
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def panels_of(text: str) -> list[str]:
    """The panels in a file of curves: SVG elements, none inside another."""
    return re.findall(r"<svg.*?</svg>", text, re.DOTALL)


def sheet(panels: Sequence[str]) -> str:
    """One SVG picture of `drawn_panels`."""
    width, height = (PIXELS * inches for inches in PANEL_INCHES)
    columns, rows = _shape(len(panels))
    placed = [
        panel.replace("<svg", f'<svg x="{n % columns * width:g}" y="{n // columns * height:g}"', 1)
        for n, panel in enumerate(panels)
    ]
    size = f'width="{columns * width:g}" height="{rows * height:g}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *placed, "</svg>"])


def _shape(num_panels: int) -> tuple[int, int]:
    """(columns, rows)."""
    columns = min(IN_A_ROW, num_panels)
    return columns, -(-num_panels // columns)


def _legend(axes: Axes, *, stacked: bool) -> None:
    """Bars have their legend in a row above them, lines where there is room."""
    if stacked:
        axes.set_ylim(top=1.2 * axes.get_ylim()[1])
        row = {"ncols": 4, "columnspacing": 0.8, "handlelength": 1.0, "handletextpad": 0.4}
        axes.legend(loc="upper left", fontsize=7, frameon=False, labelcolor=INK, borderaxespad=0.1, **row)
    else:
        axes.legend(fontsize=7, frameon=False, labelcolor=INK)


def _stack(axes: Axes, names: list[str], series: dict[str, list[tuple[int, float]]]) -> None:
    bottom: dict[int, float] = {}
    for color, name in zip(itertools.cycle(COLORS), names, strict=False):
        steps = [step for step, _ in series[name]]
        values = [value for _, value in series[name]]
        axes.bar(steps, values, bottom=[bottom.get(s, 0.0) for s in steps], width=0.8, color=color, label=_label(name))
        for step, value in series[name]:
            bottom[step] = bottom.get(step, 0.0) + value


def _label(name: str) -> str:
    return name.split("/", 1)[1].replace("_", " ")


def panel_grid(titles: Sequence[str], row_inches: float, layout: Any = None) -> tuple[Figure, list[Axes]]:
    """A figure with one styled panel for each title, three in a row."""
    from matplotlib.figure import Figure

    columns, rows = _shape(len(titles))
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, row_inches * rows), layout=layout)
    figure.patch.set_alpha(0.0)
    grid = [figure.add_subplot(rows, columns, number) for number in range(1, len(titles) + 1)]
    for axes, title in zip(grid, titles, strict=True):
        style(axes, title)
    return figure, grid


def style(axes: Any, title: str) -> None:
    """The look of every panel."""
    axes.patch.set_alpha(0.0)
    # Drawing ticks takes half of the time, and so would keeping the title clear of what is beside it.
    axes.set_title(title, fontsize=9, color=INK, loc="left", y=1.0)
    axes.locator_params(nbins=MAX_INTERVALS)
    axes.yaxis.set_offset_position("right")
    axes.yaxis.get_offset_text().set(fontsize=7, color=INK)
    axes.tick_params(colors=INK, labelsize=7)
    axes.grid(color=GRID, linewidth=0.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
