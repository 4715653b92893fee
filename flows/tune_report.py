"""Results of a search: results.json, best.yaml, search.png, and tables for terminal and page."""

from __future__ import annotations

import io
import json
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from xray.flows.search import SearchConfig
from xray.flows.study import DIRECTORY, ERROR, VALUES, Search
from xray_runtime.kernel.config.loading import to_yaml
from xray_runtime.kernel.evidence.log import read_run
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.report.figures import COLORS, style
from xray_runtime.kernel.report.rendering import markdown_table
from xray_runtime.kernel.terminal import print_table
from xray_runtime.methods.loading import resolved_yaml

RESULTS, BEST, FIGURE = "results.json", "best.yaml", "search.png"
MIN_FOR_IMPORTANCE = 5
"""Number of finished trials needed to estimate importances."""
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned"}
"""Any other state is "failed"."""


def report(search: Search) -> dict[str, Any]:
    """Write the results into the search's directory; returns the content of results.json."""
    wanted, directory = search.wanted, search.directory
    trials = [_entry(directory, number, trial) for number, trial in enumerate(search.trials())]
    finished = [trial for trial in trials if trial["state"] == "finished"]
    choose = max if wanted.mode == "max" else min
    best = choose(finished, key=lambda trial: trial["value"], default=None)
    results = {
        "search": wanted.model_dump(mode="json"),
        "trials": trials,
        "best": {name: best[name] for name in ("number", "value", "values")} if best is not None else None,
        "importance": _importance(search.study, len({trial["value"] for trial in finished})),
    }
    if best is not None:
        subject = search.subject.with_values(best["values"])
        text = resolved_yaml(subject.config) if subject.config is not None else to_yaml(subject.content())
        write_atomic(directory / BEST, text)
    write_atomic(directory / FIGURE, figure(results, wanted))
    write_atomic(directory / RESULTS, json.dumps(results, indent=2))
    return results


def _entry(directory: Path, number: int, trial: FrozenTrial) -> dict[str, Any]:
    trial_directory = directory / "trials" / trial.user_attrs[DIRECTORY]
    return {
        "directory": str(trial_directory),
        "number": number,
        "values": trial.user_attrs[VALUES],
        "state": STATES.get(trial.state, "failed"),
        "value": trial.value if trial.state == TrialState.COMPLETE else None,
        "error": trial.user_attrs.get(ERROR),
        "run_id": read_run(trial_directory).get("run_id"),
    }


def _importance(study: optuna.Study, different: int) -> dict[str, float]:
    """Field → importance (PED-ANOVA, Watanabe et al. 2023); empty with too few different values."""
    if different < MIN_FOR_IMPORTANCE:
        return {}
    return {path: float(share) for path, share in optuna.importance.get_param_importances(study).items()}


def figure(results: dict[str, Any], search: SearchConfig) -> bytes:
    """A figure (PNG): value by trial, then value by field, the most important first."""
    from matplotlib.figure import Figure

    trials = [trial for trial in results["trials"] if trial["state"] == "finished"]
    numbers, values = [trial["number"] for trial in trials], [trial["value"] for trial in trials]
    paths = sorted(search.fields, key=lambda path: -results["importance"].get(path, 0.0))
    columns = min(3, len(paths) + 1)
    rows = -(-(len(paths) + 1) // columns)
    picture = Figure(figsize=(4.2 * columns, 2.9 * rows), layout="constrained")
    by_trial, *by_field = picture.subplots(rows, columns, squeeze=False).flat
    style(by_trial, f"{search.metric} ({search.mode}) by trial")
    by_trial.plot(numbers, values, "o", color=COLORS[0], markersize=4)
    best = accumulate(values, max if search.mode == "max" else min)
    by_trial.step(numbers, list(best), where="post", color=COLORS[1], linewidth=1.4)
    for trial in results["trials"]:
        if trial["state"] != "finished":
            by_trial.axvline(trial["number"], color=COLORS[3], linewidth=0.8, linestyle=":")
    for path, axes in zip_longest(paths, by_field):
        if path is None:
            axes.remove()
            continue
        share = results["importance"].get(path)
        style(axes, path if share is None else f"{path} ({100 * share:.0f}%)")
        axes.plot([_shown(trial["values"][path]) for trial in trials], values, "o", color=COLORS[2], markersize=4)
        if search.fields[path].log:
            axes.set_xscale("log")
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _shown(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value)


def results_markdown(results: dict[str, Any], search: SearchConfig) -> str:
    """The trials as a Markdown table for Prefect's page."""
    rows = [[*_cells(trial, search), trial["state"]] for trial in results["trials"]]
    return "\n".join(markdown_table(("trial", *search.fields, search.metric, ""), rows))


def print_results(console: Console, results: dict[str, Any], search: SearchConfig, directory: Path) -> None:
    """Print all trials, importances and the paths of the results."""
    columns, best, rows = ("trial", *search.fields, search.metric), results["best"], []
    for trial in results["trials"]:
        note = trial["error"] or ("" if trial["state"] == "finished" else trial["state"])
        if best is not None and trial["number"] == best["number"]:
            note = "best"
        rows.append([*_cells(trial, search), note])
    print_table(console, (*columns, ""), rows, right=columns)
    importance = ", ".join(f"{path} {100 * share:.0f}%" for path, share in results["importance"].items())
    lines = [f"importance  {importance}"] if importance else []
    if best is not None:
        lines.append(f"best        trial {best['number']}, {search.metric} {best['value']:.4g}: {directory / BEST}")
    lines += [f"record      {directory / RESULTS}", f"picture     {directory / FIGURE}"]
    console.print("\n".join(["", *lines]), highlight=False, soft_wrap=True, markup=False)


def _cells(trial: dict[str, Any], search: SearchConfig) -> list[str]:
    """Number, values and outcome of a trial."""
    return [str(trial["number"]), *(_cell(trial["values"][path]) for path in search.fields), _cell(trial["value"])]


def _cell(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
