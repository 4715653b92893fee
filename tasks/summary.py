"""What a finished stage tells: to the flow, as a small record; to people on Prefect's page, as a table with curves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from pydantic import BaseModel, ConfigDict

from xray_runtime.report.figures import PANELS
from xray_runtime.store.ref import CheckpointRef

BARS = "▁▂▃▄▅▆▇█"
MAX_BARS = 24
Series = Mapping[str, Sequence[tuple[int, float]]]


class StageResult(BaseModel):
    """What a finished stage tells the flow; small, since it travels through Prefect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: str
    key: str
    checkpoint: CheckpointRef
    parents: dict[str, str]
    """Role → checkpoint sha256."""
    dataset: str | None
    mlflow_run_id: str
    seconds: float
    attempts: int
    """0: it was fetched from the shared store."""


def stage_markdown(result: StageResult, series: Series, page: str | None, image: str | None) -> str:
    """A stage for Prefect's page.

    Args:
        series: metric → (step, value) points.
        page: its MLflow run.
        image: its training curves.
    """
    again = f" in {result.attempts} attempts" if result.attempts > 1 else ""
    lines = [f"**{result.name}** took {result.seconds:.1f} s{again}: `{result.checkpoint.sha256[:12]}`", ""]
    if page is not None:
        lines += [f"[Its run in MLflow]({page}): parameters, curves, tables, what it came from.", ""]
    lines += [f"- {role}: `{sha256[:12]}`" for role, sha256 in sorted(result.parents.items())]
    lines += [f"- files: `{result.checkpoint.path}`", ""]
    names = [name for _, panel in PANELS.get(result.kind, []) for name in panel if series.get(name)]
    if names:
        lines += ["| metric | first | last | curve |", "|---|---|---|---|"]
    for name in names:
        values = [value for _, value in series[name]]
        lines.append(f"| {name} | {values[0]:.4g} | {values[-1]:.4g} | {sparkline(values)} |")
    if image is not None:
        lines += ["", f"![training curves]({image})"]
    evaluation = result.checkpoint.path / "evaluation.json"
    if evaluation.is_file():
        lines += ["| result | value |", "|---|---|"]
        found = json.loads(evaluation.read_text(encoding="utf-8"))
        lines += [f"| {name} | {value:.4g} |" for name, value in found.items() if isinstance(value, int | float)]
    return "\n".join(lines)


def sparkline(values: Sequence[float]) -> str:
    """`values` as a row of bars, the lowest and the highest of them as the shortest and the tallest."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(len(values), MAX_BARS)
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(int((mean - low) / span * len(BARS)), len(BARS) - 1)] for mean in means)
