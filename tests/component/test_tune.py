"""Ray Tune and Optuna over trials that have been run: what a search does that is gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xray.flows.search import SearchConfig, with_values
from xray.flows.trials import Trial, TrialRecord, search_directory, write_record
from xray.flows.tune import run_search
from xray.flows.tune_report import report
from xray_runtime.config.loading import load_config, validate

CONFIG = validate({"project": "xray-tune"})
LOSS = {0.1: 2.0, 0.01: 1.0, 0.001: 3.0, 1e-4: 4.0, 1e-5: 5.0, 1e-6: 9.0}


def search(**more: Any) -> SearchConfig:
    fields = {"sft.lr": {"choices": list(LOSS)}}
    how = {"until": "sft", "metric": "sft/heldout_loss", "mode": "min", "name": "rates", "trials": 12, "seed": 1}
    return SearchConfig.model_validate({"fields": fields, **how, **more})


def ran(root: Path, of: SearchConfig) -> None:
    """The records that trials of every value leave: each loses its whole loss in two steps, and is then done."""
    for lr, loss in LOSS.items():
        trial = Trial(root, CONFIG, of, {"sft.lr": lr})
        points = [(1, loss + 1.0), (2, loss)]
        write_record(trial, TrialRecord(values=trial.values, state="finished", value=loss, points=points))


def outcomes(trials: list[tuple[Trial, TrialRecord]]) -> list[tuple[float, str]]:
    return [(record.values["sft.lr"], record.state) for _, record in trials]


@pytest.mark.usefixtures("cluster")
def test_the_same_search_tries_the_same_values_and_runs_none_again(tmp_path: Path) -> None:
    wanted = search()
    ran(tmp_path, wanted)
    first = run_search(tmp_path, CONFIG, wanted)
    assert {state for _, state in outcomes(first)} == {"finished"}
    assert len(first) == 12
    more = run_search(tmp_path, CONFIG, wanted.model_copy(update={"trials": 15}))
    assert outcomes(more)[:12] == outcomes(first)
    assert not list(tmp_path.glob("checkpoints"))

    results = report(search_directory(tmp_path, "rates"), CONFIG, wanted, more)
    tried = {record.values["sft.lr"] for _, record in more}
    lr = min(tried, key=lambda rate: LOSS[rate])
    assert results["best"]["values"] == {"sft.lr": lr}
    assert results["importance"] == {"sft.lr": 1.0}
    place = search_directory(tmp_path, "rates")
    assert load_config(place / "best.yaml") == with_values(CONFIG, {"sft.lr": lr})
    assert json.loads((place / "results.json").read_text()) == results
    assert (place / "search.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("cluster")
def test_a_trial_worse_than_the_median_of_those_before_it_is_pruned(tmp_path: Path) -> None:
    wanted = search(prune={"after_steps": 2, "min_trials": 2})
    ran(tmp_path, wanted)
    found = outcomes(run_search(tmp_path, CONFIG, wanted))
    # From the second step on alone: no mean but that of one point, the loss itself.
    seen: list[float] = []
    for lr, state in found:
        before = sorted(seen)
        middle = len(before) // 2
        median = before[middle] if len(before) % 2 else sum(before[middle - 1 : middle + 1]) / 2 if before else 0.0
        worse = len(before) >= 2 and LOSS[lr] > median
        assert state == ("pruned" if worse else "finished"), (lr, before)
        seen.append(LOSS[lr])
    assert {state for _, state in found} == {"finished", "pruned"}
    # What was pruned is not run again either: nothing here could run.
    assert outcomes(run_search(tmp_path, CONFIG, wanted)) == found
