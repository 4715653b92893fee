"""All evaluations and benchmarks of a graph side by side: a row for each policy, a column for each number.

Numbers of several policies share a column if they were measured in the same way: by the same kind with the same config
against the same inputs. If two ways give numbers of one name, each also has the name of its first stage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xray_runtime.kernel.graph.kind import StageKind
from xray_runtime.kernel.report.figures import COLORS, PANEL_INCHES, panel_grid
from xray_runtime.kernel.report.names import title
from xray_runtime.kernel.store.checkpoints import read_manifest
from xray_runtime.kernel.store.identity import digest
from xray_runtime.kernel.store.published import read_published

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTERVAL = "_ci95"
NEUTRAL = {"win_rate": 0.5, "gold_delta": 0.0, "reward_delta": 0.0, "length_delta": 0.0, "score_delta": 0.0}
"""Number → its value if there were no difference."""


class Number(NamedTuple):
    """A measured value, with its 95% interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        between = "" if self.low is None else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{self.value:.4g}{between}"


LINE_INCHES = 0.16
"""Height of a policy in a figure."""


@dataclass(frozen=True)
class EvaluationResults:
    """One evaluation or benchmark."""

    stage: str
    policy: str
    """sha256."""
    way: str
    """Equal for two that were measured in the same way."""
    numbers: Mapping[str, Number]


def measured(kind: StageKind, directory: Path, expected: str | None = None) -> EvaluationResults:
    """The results in the checkpoint of an evaluation. Raises OSError or ValueError if it is damaged.

    Args:
        expected: its digest, where the caller knows it.
    """
    manifest, sha256 = read_manifest(directory)
    if expected not in (None, sha256):
        raise ValueError(f"{directory}: it is {sha256[:12]}, not {str(expected)[:12]}")
    assert kind.sides is not None
    assert kind.results is not None
    policy = kind.sides[0]
    others = {role: sha for role, sha in manifest.parents.items() if role != policy}
    results = json.loads(read_published(directory, sha256, kind.results))
    judges = results.get("judges") or {}
    # Each judge has its own column of wins.
    left_out = {"samples", "win_rate"} if judges else {"samples"}
    numbers = {
        f"win_rate by {judge}": Number(result["win_rate"], *result["win_rate_ci95"]) for judge, result in judges.items()
    }
    for tag, of_tag in (results.get("tags") or {}).items():
        for judge, result in of_tag.items():
            numbers[f"win_rate by {judge}, {tag}"] = Number(result["win_rate"], *result["win_rate_ci95"])
            numbers[f"score_delta by {judge}, {tag}"] = Number(result["delta"], *result["delta_ci95"])
    for name, value in sorted(results.items(), key=_in_order):
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in left_out:
            numbers[name] = Number(float(value), *results.get(f"{name}{INTERVAL}") or ())
    way = digest({"kind": manifest.kind, "config": manifest.config, "parents": others, "seed": manifest.seed})
    return EvaluationResults(manifest.stage, manifest.parents[policy], way, numbers)


def _in_order(result: tuple[str, Any]) -> tuple[str, bool]:
    """Sort a number from after next to the one from before."""
    return result[0].replace("_before", "").replace("_after", ""), "_after" in result[0]


@dataclass(frozen=True)
class SideBySide:
    """The table."""

    columns: list[str]
    rows: list[tuple[str, list[Number | None]]]
    """(policy, its numbers), a number for each column."""

    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [[policy, *("" if n is None else str(n) for n in numbers)] for policy, numbers in self.rows]


def side_by_side(evaluations: Sequence[EvaluationResults], names: Mapping[str, str]) -> SideBySide:
    """The table of all results, in order of the stages; `names`: sha256 of a policy → its name."""
    first = {one.way: one.stage for one in reversed(evaluations)}
    used: dict[str, set[str]] = {}
    for one in evaluations:
        for name in one.numbers:
            used.setdefault(name, set()).add(one.way)
    columns: dict[tuple[str, str], str] = {}
    rows: dict[str, dict[str, Number]] = {}
    for one in evaluations:
        for name, number in one.numbers.items():
            label = name if len(used[name]) == 1 else f"{name}, {first[one.way]}"
            column = columns.setdefault((one.way, name), label)
            rows.setdefault(one.policy, {})[column] = number
    listed = list(dict.fromkeys(columns.values()))
    return SideBySide(
        listed, [(names.get(sha, sha[:12]), [cells.get(column) for column in listed]) for sha, cells in rows.items()]
    )


def figure(table: SideBySide) -> Figure | None:
    """A panel for each column that several policies have, with 95% intervals; None if there is none."""
    shown = [
        (name, [(policy, numbers[index]) for policy, numbers in table.rows if numbers[index] is not None])
        for index, name in enumerate(table.columns)
    ]
    shown = [(name, points) for name, points in shown if len(points) > 1]
    if not shown:
        return None
    # One line for each policy keeps names of any length and number apart.
    policies = [policy for policy, _ in table.rows]
    height = max(PANEL_INCHES[1], 0.7 + LINE_INCHES * len(policies))
    drawn, grid = panel_grid([name for name, _ in shown], height, "constrained")
    for number, (axes, (_, points)) in enumerate(zip(grid, shown, strict=True)):
        for policy, values in points:
            assert values is not None
            index = policies.index(policy)
            axes.plot(values.value, index, "o", color=COLORS[0], markersize=4)
            if values.low is not None and values.high is not None:
                axes.plot([values.low, values.high], [index, index], color=COLORS[0], linewidth=1.6)
        axes.set_yticks(range(len(policies)), policies if number % 3 == 0 else [""] * len(policies))
        axes.set_ylim(len(policies) - 0.5, -0.5)
    return drawn


@dataclass(frozen=True)
class DrawnResult:
    """One number of several policies, drawn on one scale; positions are in percent of it."""

    title: str
    """For people."""
    name: str
    neutral: float | None
    """Position of what no difference would be; None where there is no such value."""
    rows: list[tuple[str, str, float, float, float]]
    """(policy, text, value, low, high)."""


def measures(table: SideBySide) -> list[DrawnResult]:
    """The columns of the table, to be drawn with their intervals; numbers that are not finite are left out.

    Those that compare two models come first. A number from before stands beside the same from after.
    """
    found = []
    pairs = {after: before for before in table.columns if (after := _after(before)) in table.columns}
    for place, name in enumerate(table.columns):
        if name in pairs.values():
            continue
        cells = [(policy, n) for policy, numbers in table.rows if (n := numbers[place]) and isfinite(n.value)]
        spans = [(n.value if n.low is None else n.low, n.value if n.high is None else n.high) for _, n in cells]
        neutral = NEUTRAL.get(re.split(r" by |, ", name)[0])
        ends = [end for span in spans for end in span if isfinite(end)] + ([neutral] if neutral is not None else [])
        if not cells:
            continue
        low, span = min(ends), (max(ends) - min(ends)) or 1.0

        def at(value: float, low: float = low, span: float = span) -> float:
            return round(3 + 94 * (value - low) / span, 2) if isfinite(value) else 3.0

        first: dict[str, Number | None] = {}
        if name in pairs:
            first = {policy: numbers[table.columns.index(pairs[name])] for policy, numbers in table.rows}
        texts = [f"{first[p]} → {n}" if first.get(p) is not None else str(n) for p, n in cells]
        drawn = [(at(n.value), at(a), at(b)) for (_, n), (a, b) in zip(cells, spans, strict=True)]
        rows = [(p, text, *places) for (p, _), text, places in zip(cells, texts, drawn, strict=True)]
        heading = title(pairs[name]).replace(" before", " before → after", 1) if name in pairs else title(name)
        found.append(DrawnResult(heading, name, at(neutral) if neutral is not None else None, rows))
    return sorted(found, key=lambda result: result.neutral is None)


def _after(name: str) -> str | None:
    """The column of the same number from after: `gold_after, evaluate` for `gold_before, evaluate`."""
    match = re.fullmatch(r"(\w+)_before((?: by |, ).*)?", name, re.DOTALL)
    return f"{match[1]}_after{match[2] or ''}" if match else None


def as_json(table: SideBySide) -> dict[str, Any]:
    """For lifecycle.json: columns, and rows of {policy, numbers: [value, low, high] or null}."""
    return {
        "columns": table.columns,
        "rows": [
            {"policy": policy, "numbers": [None if n is None else list(n) for n in numbers]}
            for policy, numbers in table.rows
        ],
    }
