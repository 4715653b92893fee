"""Results of a search: results.json, best.yaml, search.png, and tables for terminal and page."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import yaml
from rich.console import Console

from xray.flows.search import SearchConfig, Space, Span
from xray.flows.trials import Search, State, Trial, TrialRecord
from xray_runtime.config.loading import resolved_yaml
from xray_runtime.files import write_atomic
from xray_runtime.report.figures import COLORS, style
from xray_runtime.terminal import print_table

RESULTS, BEST, FIGURE = "results.json", "best.yaml", "search.png"
MIN_FOR_IMPORTANCE = 5
"""Number of finished trials needed to estimate importances."""
STATES: dict[State, optuna.trial.TrialState] = {
    "finished": optuna.trial.TrialState.COMPLETE,
    "pruned": optuna.trial.TrialState.PRUNED,
    "failed": optuna.trial.TrialState.FAIL,
}


def report(search: Search, trials: Sequence[tuple[Trial, TrialRecord]]) -> dict[str, Any]:
    """Write the results into the search's directory; returns the content of results.json."""
    wanted, directory = search.wanted, search.directory
    finished = [record for _, record in trials if record.state == "finished"]
    sign = 1 if wanted.mode == "max" else -1
    best = max(finished, key=lambda record: sign * (record.value or 0.0), default=None)
    results: dict[str, Any] = {
        "search": wanted.model_dump(mode="json"),
        "trials": [
            {"directory": str(trial.place), **record.model_dump(mode="json", exclude={"points", "search"})}
            for trial, record in trials
        ],
        "best": None,
        "importance": importance(search, [record for _, record in trials]),
    }
    if best is not None:
        results["best"] = {"number": best.number, "value": best.value, "values": best.values}
        subject = search.subject.with_values(best.values)
        text = resolved_yaml(subject.config) if subject.config is not None else yaml.safe_dump(subject.content())
        write_atomic(directory / BEST, text)
    write_atomic(directory / FIGURE, figure(results, wanted))
    write_atomic(directory / RESULTS, json.dumps(results, indent=2))
    return results


def importance(search: Search, records: Sequence[TrialRecord]) -> dict[str, float]:
    """Field → importance (PED-ANOVA, Watanabe et al. 2023); empty with too few trials."""
    if len({record.value for record in records if record.state == "finished"}) < MIN_FOR_IMPORTANCE:
        return {}
    study = study_of(search, records)
    return {path: float(share) for path, share in optuna.importance.get_param_importances(study).items()}


def study_of(search: Search, records: Sequence[TrialRecord]) -> optuna.Study:
    """A study in memory with these trials and their outcomes."""
    study = optuna.create_study(direction="maximize" if search.wanted.mode == "max" else "minimize")
    space = distributions(search.space)
    for record in records:
        params, state = search.drawn(record.values), STATES[record.state]
        study.add_trial(optuna.trial.create_trial(state=state, value=record.value, params=params, distributions=space))
    return study


def distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    """A space as Optuna distributions; choices become indices, since Optuna cannot compare arbitrary values."""
    return {path: _distribution(values) for path, values in space.items()}


def _distribution(values: Span | list[Any]) -> optuna.distributions.BaseDistribution:
    if isinstance(values, list):
        return optuna.distributions.CategoricalDistribution(range(len(values)))
    if values.whole:
        return optuna.distributions.IntDistribution(int(values.low), int(values.high), log=values.log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)


def figure(results: dict[str, Any], search: SearchConfig) -> bytes:
    """A figure (PNG): value by trial, then value by field, the most important first."""
    from matplotlib.figure import Figure

    trials = [trial for trial in results["trials"] if trial["state"] == "finished"]
    shares = results["importance"]
    paths = sorted(search.fields, key=lambda path: -shares.get(path, 0.0))
    columns = min(3, len(paths) + 1)
    rows = -(-(len(paths) + 1) // columns)
    picture = Figure(figsize=(4.2 * columns, 2.9 * rows), layout="constrained")
    axes = picture.add_subplot(rows, columns, 1)
    style(axes, f"{search.metric} ({search.mode}) by trial")
    axes.plot([t["number"] for t in trials], [t["value"] for t in trials], "o", color=COLORS[0], markersize=4)
    choose = max if search.mode == "max" else min
    best = [choose(t["value"] for t in trials[: i + 1]) for i in range(len(trials))]
    axes.step([t["number"] for t in trials], best, where="post", color=COLORS[1], linewidth=1.4)
    for trial in results["trials"]:
        if trial["state"] != "finished":
            axes.axvline(trial["number"], color=COLORS[3], linewidth=0.8, linestyle=":")
    for place, path in enumerate(paths, start=2):
        axes = picture.add_subplot(rows, columns, place)
        share = f" ({100 * shares[path]:.0f}%)" if path in shares else ""
        style(axes, f"{path}{share}")
        shown = [_shown(trial["values"][path]) for trial in trials]
        axes.plot(shown, [trial["value"] for trial in trials], "o", color=COLORS[2], markersize=4)
        if search.fields[path].log:
            axes.set_xscale("log")
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _shown(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value)


def results_markdown(results: dict[str, Any], search: SearchConfig) -> str:
    """The trials as a Markdown table for Prefect's page."""
    lines = ["| trial | " + " | ".join(search.fields) + f" | {search.metric} | |"]
    lines.append("|---" * (len(search.fields) + 3) + "|")
    for trial in results["trials"]:
        cells = [str(trial["number"]), *(_cell(trial["values"][path]) for path in search.fields), _cell(trial["value"])]
        lines.append(f"| {' | '.join([*cells, trial['state']])} |")
    return "\n".join(lines)


def print_results(console: Console, results: dict[str, Any], search: SearchConfig, directory: Path) -> None:
    """Print all trials, importances and the paths of the results."""
    columns, best, rows = ("trial", *search.fields, search.metric), results["best"], []
    for trial in results["trials"]:
        values = [_cell(trial["values"][path]) for path in search.fields]
        note = trial["error"] or ("" if trial["state"] == "finished" else trial["state"])
        if best is not None and trial["number"] == best["number"]:
            note = "best"
        rows.append((str(trial["number"]), *values, _cell(trial["value"]), note))
    print_table(console, (*columns, ""), rows, right=columns)
    lines = [f"importance  {', '.join(f'{path} {100 * share:.0f}%' for path, share in results['importance'].items())}"]
    lines = lines if results["importance"] else []
    if best is not None:
        lines.append(f"best        trial {best['number']}, {search.metric} {best['value']:.4g}: {directory / BEST}")
    lines += [f"record      {directory / RESULTS}", f"picture     {directory / FIGURE}"]
    console.print("\n".join(["", *lines]), highlight=False, soft_wrap=True, markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
