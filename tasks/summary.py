"""Texts about finished stages, for the terminal and Prefect's page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from xray.tasks.spec import StageResult
from xray_runtime.kernel.graph.kind import StageKind
from xray_runtime.kernel.report.rendering import markdown_table

BARS = "▁▂▃▄▅▆▇█"
MAX_BARS = 24
Series = Mapping[str, Sequence[tuple[int, float]]]


def stage_markdown(kind: StageKind, result: StageResult, series: Series, page: str | None, image: str | None) -> str:
    """A stage for Prefect's page.

    Args:
        series: metric → (step, value) points.
        page: its MLflow run.
        image: its training curves.
    """
    again = f" in {result.attempts} attempts" if result.attempts > 1 else ""
    lines = [f"**{result.name}** took {result.seconds:.1f} s{again}: `{result.checkpoint.sha256[:12]}`", ""]
    if page is not None:
        lines += [f"[Its run in MLflow]({page}): parameters, curves, tables, lineage.", ""]
    lines += [f"- {role}: `{sha256[:12]}`" for role, sha256 in sorted(result.parents.items())]
    lines += [f"- files: `{result.checkpoint.path}`", ""]
    names = [name for _, panel in kind.panels for name in panel if series.get(name)]
    curves = {name: [value for _, value in series[name]] for name in names}
    if names:
        rows = [(name, f"{v[0]:.4g}", f"{v[-1]:.4g}", sparkline(v)) for name, v in curves.items()]
        lines += markdown_table(("metric", "first", "last", "curve"), rows)
    if image is not None:
        lines += ["", f"![training curves]({image})"]
    if kind.results is not None:
        results = _results(kind, result).items()
        lines += markdown_table(("result", "value"), [(name, f"{value:.4g}") for name, value in results])
    return "\n".join(lines)


def headline(kind: StageKind, result: StageResult, series: Series) -> str:
    """The main results of a stage, as `loss 4.5 → 3.9`; empty if its kind has none."""
    parts = []
    results = _results(kind, result)
    for name, word in kind.headline.items():
        values = [value for _, value in series.get(name, ())] or ([results[name]] if name in results else [])
        if values:
            ends = dict.fromkeys(f"{value:.3g}" for value in (values[0], values[-1]))
            parts.append(f"{word} {' → '.join(ends)}")
    return ", ".join(parts)


def _results(kind: StageKind, result: StageResult) -> dict[str, float]:
    if kind.results is None:
        return {}
    results = json.loads((result.checkpoint.path / kind.results).read_text(encoding="utf-8"))
    return {name: value for name, value in results.items() if isinstance(value, int | float)}


def evaluation_rows(e: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, text) of the main results of an evaluation (`evaluation.json`)."""
    rows = [] if e.get("judges") else [("win rate", "none: there is no judge")]
    for name, judged in (e.get("judges") or {}).items():
        low, high = judged["win_rate_ci95"]
        shown = "" if judged["judges"] else ", shown only"
        counts = f"over {judged['samples']} held-out prompts, {judged['tied']} tied, by {name}{shown}"
        rows.append(("win rate", f"{judged['win_rate']:.3f} (95%: {low:.3f} to {high:.3f}) {counts}"))
    for name, title in (("gold", "gold score"), ("reward", "reward")):
        if e[f"{name}_after"] is not None:
            low, high = e[f"{name}_delta_ci95"]
            change = f"{e[f'{name}_before']:+.3f} → {e[f'{name}_after']:+.3f}, difference {e[f'{name}_delta']:+.3f}"
            rows.append((title, f"{change} (95%: {low:+.3f} to {high:+.3f})"))
    return [*rows, ("KL", f"{e['kl']:.2f} nats per reply to the baseline")]


def run_description(content: Mapping[str, Any], prefect: str | None, output: Path) -> str:
    """The description of a run's page in MLflow (Markdown), from its lifecycle.json; `prefect`: its page there."""
    rows = evaluation_rows(content["evaluation"]) if content["evaluation"] is not None else []
    why = f": {content['failure']}" if "failure" in content else "."
    lines = [f"**{content['project']}**, seed {content['seed']}: {content['status']}{why}", ""]
    lines += [*markdown_table(("result", "value"), rows), ""] if rows else []
    if (registered := content["registered"]) is not None:
        address = f"#/models/{quote(registered['name'])}/versions/{registered['version']}"
        lines.append(f"- Model: [{registered['name']} version {registered['version']}]({address})")
    read = {stage["dataset"] for stage in content["stages"]}
    made = [(stage["name"], stage["checkpoint"]["sha256"]) for stage in content["stages"]]
    datasets = [f"`{name}` ({sha256[:12]})" for name, sha256 in made if sha256 in read]
    lines += [f"- Data: {', '.join(datasets)}"] if datasets else []
    lines += [f"- [Its run in Prefect]({prefect})"] if prefect else []
    lines += ["- Report: `report.html` among the artifacts", f"- Pages: `xray studio --output {output}`"]
    return "\n".join(lines)


def sparkline(values: Sequence[float]) -> str:
    """`values` as a row of bars, from the shortest (the minimum) to the tallest (the maximum)."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(len(values), MAX_BARS)
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(int((mean - low) / span * len(BARS)), len(BARS) - 1)] for mean in means)
