"""Optuna over trials that only pretend: restored, gone on with, pruned, side by side."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from xray.flows.search import SearchConfig, search_space
from xray.flows.subject import Subject
from xray.flows.trial_process import TrialProcess
from xray.flows.trials import Search, Trial, TrialRecord, UnknownMetricError
from xray.flows.tune import Event, run_search
from xray.flows.tune_report import report
from xray_runtime.config.loading import load_config, validate

CONFIG = Subject(config=validate({"project": "xray-tune"}))
pytestmark = pytest.mark.usefixtures("cluster")


def search(root: Path, fields: dict[str, Any] | None = None, **more: Any) -> Search:
    rates = {"sft.lr": {"low": 1e-6, "high": 1e-1, "log": True}}
    how = {"until": "sft", "metric": "sft/heldout_loss", "mode": "min", "name": "rates", "trials": 3, "seed": 1}
    wanted = SearchConfig.model_validate({"fields": fields or rates, **how, **more})
    return Search(root, CONFIG, wanted, search_space(CONFIG, wanted))


def loss(values: dict[str, Any]) -> float:
    return abs(math.log10(values["sft.lr"]) + 3)


class Pretended(TrialProcess):
    """Comes out as its rate says, after two points."""

    def measure(self) -> float:
        with (self.trial.root / "ran").open("a") as file:
            file.write(f"{self.trial.place.name}\n")
        value = loss(self.trial.values)
        for step in (1, 2):
            self.points.append((step, value + 2 - step))
        return value


class Meeting(Pretended):
    """Ends when two are at work."""

    def measure(self) -> float:
        value, deadline = super().measure(), time.monotonic() + 120
        while len((self.trial.root / "ran").read_text().split()) < 2:
            assert time.monotonic() < deadline, "the other trial did not begin"
            time.sleep(0.2)
        return value


class Stumbling(Pretended):
    """Fails the first time, in each directory."""

    def measure(self) -> float:
        value = super().measure()
        if len((self.trial.root / "ran").read_text().split()) == 1:
            raise ValueError("the loss is nan")
        return value


class Failing(Pretended):
    """Has no such metric."""

    def measure(self) -> float:
        raise UnknownMetricError("metric: 'sft/win' is not allowed: stage 'sft' logs sft/loss")


def ran(root: Path) -> list[str]:
    return (root / "ran").read_text().split()


def records(trials: list[tuple[Trial, TrialRecord]]) -> list[TrialRecord]:
    return [record for _, record in trials]


def places(trials: list[tuple[Trial, TrialRecord]]) -> list[str]:
    return [trial.place.name for trial, _ in trials]


def test_a_search_goes_on_and_more_trials_add_to_it(tmp_path: Path) -> None:
    def die(event: Event) -> None:
        if (event[1].number, event[1].state) == (1, "running"):
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run_search(search(tmp_path), Pretended, die)
    trials = run_search(search(tmp_path), Pretended)
    assert [record.state for record in records(trials)] == ["finished"] * 3
    assert [record.value for _, record in trials] == [loss(trial.values) for trial, _ in trials]
    assert ran(tmp_path).count(places(trials)[0]) == 1

    before = ran(tmp_path)
    assert records(run_search(search(tmp_path), Pretended)) == records(trials)
    assert ran(tmp_path) == before
    more = run_search(search(tmp_path, trials=4), Pretended)
    assert records(more)[:3] == records(trials)
    assert places(more)[3:] == ran(tmp_path)[len(before) :]

    edited = search(tmp_path, {"sft.lr": {"low": 1e-7, "high": 1e-1, "log": True}}, trials=1)
    found = run_search(edited, Pretended)
    assert places(found)[:4] == places(more)
    assert len(found) == 5

    results = report(edited, found)
    best = min(records(found), key=lambda record: loss(record.values))
    assert results["best"]["number"] == best.number
    assert results["importance"] == {"sft.lr": 1.0}
    place = tmp_path / "searches" / "rates"
    assert load_config(place / "best.yaml") == CONFIG.with_values(best.values).config
    assert json.loads((place / "results.json").read_text()) == results
    assert (place / "search.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_trial_worse_than_the_median_of_those_before_it_is_pruned(tmp_path: Path) -> None:
    rule = {"prune": {"after_steps": 2, "min_trials": 2}}
    first = run_search(search(tmp_path, trials=3, **rule), Pretended)
    found = run_search(search(tmp_path, trials=6, **rule), Pretended)
    assert records(found)[:3] == records(first)
    # From the second step on alone: no mean but that of one point, the loss itself.
    seen: list[float] = []
    for trial, record in found:
        before, value = sorted(seen), loss(trial.values)
        middle = len(before) // 2
        median = before[middle] if len(before) % 2 else sum(before[middle - 1 : middle + 1]) / 2 if before else 0.0
        worse = len(before) >= 2 and value > median
        assert record.state == ("pruned" if worse else "finished"), (value, before)
        seen.append(value)
    assert {record.state for record in records(found)} == {"finished", "pruned"}


def test_trials_side_by_side(tmp_path: Path) -> None:
    found = run_search(search(tmp_path, trials=2, concurrent=2), Meeting)
    assert [record.state for record in records(found)] == ["finished"] * 2


@pytest.mark.long
def test_a_trial_that_failed_is_tried_again(tmp_path: Path) -> None:
    failed, other = records(run_search(search(tmp_path, trials=2), Stumbling))
    assert (failed.state, failed.error) == ("failed", "ValueError: the loss is nan")
    again = run_search(search(tmp_path, trials=2), Stumbling)
    assert records(again) == [failed.model_copy(update=expected(again[0][0])), other]
    assert len(ran(tmp_path)) == 3


def expected(trial: Trial) -> dict[str, Any]:
    value = loss(trial.values)
    return {"state": "finished", "value": value, "points": [(1, value + 1), (2, value)], "error": None}


def test_a_metric_that_is_not_logged_ends_the_search(tmp_path: Path) -> None:
    with pytest.raises(UnknownMetricError, match="stage 'sft' logs sft/loss"):
        run_search(search(tmp_path), Failing)
