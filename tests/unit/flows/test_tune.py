"""How a search draws values, resumes, ends trials early and reports; its trials are fakes."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from xray.flows.search import SearchConfig
from xray.flows.study import DIRECTORY, JOURNAL, VALUES, Search, search_space
from xray.flows.subject import Subject
from xray.flows.tune import TrialRun, UnknownMetricError, run_search
from xray.flows.tune_report import report
from xray_runtime.methods.loading import load_config, validate

CONFIG = Subject(config=validate({"project": "xray-tune"}))
RATES = {"sft.lr": {"low": 1e-6, "high": 1e-1, "log": True}}


def search(root: Path, fields: dict[str, Any] = RATES, **more: Any) -> Search:
    how = {"until": "sft", "metric": "sft/heldout_loss", "mode": "min", "name": "rates", "trials": 3, "seed": 1}
    wanted = SearchConfig.model_validate({"fields": fields, **how, **more})
    made = Search(root, CONFIG, wanted, search_space(CONFIG, wanted))
    made.directory.mkdir(parents=True, exist_ok=True)
    return made


def loss(values: dict[str, Any]) -> float:
    return abs(math.log10(values["sft.lr"]) + 3)


class Pretended(TrialRun):
    """Comes out as its rate says, after two points."""

    def measure(self) -> float:
        with (self._search.root / "ran").open("a") as file:
            file.write(f"{self._directory.name}\n")
        if self.is_worse():
            assert self.stopped.wait(60)
            raise RuntimeError("the trial's run was stopped")
        return loss(self.values)

    def points(self) -> Iterator[tuple[int, float]]:
        yield from ((step, loss(self.values) + 1 - step) for step in (0, 1))

    def is_worse(self) -> bool:
        return False


class Stoppable(Pretended):
    """Waits to be stopped where it is worse than the median of those that finished."""

    def is_worse(self) -> bool:
        self.stopped = threading.Event()
        done = sorted(loss(t.user_attrs[VALUES]) for t in self._search.study.trials if t.state == TrialState.COMPLETE)
        middle = len(done) // 2
        return len(done) >= 2 and loss(self.values) > (done[middle] + done[~middle]) / 2

    def stop(self) -> None:
        self.stopped.set()


class Meeting(Pretended):
    """Ends when two are at work."""

    both = threading.Barrier(2, timeout=60)

    def measure(self) -> float:
        self.both.wait()
        return super().measure()


class Stumbling(Pretended):
    """Fails the first time, in each directory."""

    def measure(self) -> float:
        value = super().measure()
        if len(ran(self._search.root)) == 1:
            raise ValueError("the loss is nan")
        return value


class Failing(Pretended):
    """Has no such metric."""

    def measure(self) -> float:
        raise UnknownMetricError("metric: 'sft/win' is not allowed: stage 'sft' logs sft/loss")


def ran(root: Path) -> list[str]:
    return (root / "ran").read_text().split()


def outcomes(search: Search) -> list[tuple[str, TrialState, float | None]]:
    return [(trial.user_attrs[DIRECTORY], trial.state, trial.value) for trial in search.trials()]


def run(search: Search, count: int, state: TrialState = TrialState.COMPLETE) -> list[dict[str, Any]]:
    """Have so many of the search's next trials end; returns their values."""
    drawn = []
    for trial in islice(search.waiting(), count):
        drawn.append(trial.user_attrs[VALUES])
        if state == TrialState.COMPLETE:
            search.study.tell(trial, float(len(search.trials())))
    return drawn


def test_a_search_continues_and_more_trials_add_to_it(tmp_path: Path) -> None:
    def die(trial: TrialRun) -> None:
        if (trial.number, trial.has_ended) == (1, False):
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run_search(search(tmp_path), die, Pretended)
    run_search(search(tmp_path), kind=Pretended)
    first = outcomes(search(tmp_path))
    assert [state for _, state, _ in first] == [TrialState.COMPLETE] * 3
    assert [value for *_, value in first] == [loss(trial.user_attrs[VALUES]) for trial in search(tmp_path).trials()]
    assert sorted(ran(tmp_path)) == sorted(place for place, *_ in first)

    run_search(search(tmp_path), kind=Pretended)
    assert len(ran(tmp_path)) == 3
    run_search(search(tmp_path, trials=4), kind=Pretended)
    more = outcomes(search(tmp_path))
    assert more[:3] == first
    assert [place for place, *_ in more[3:]] == ran(tmp_path)[3:]

    edited = search(tmp_path, {"sft.lr": {"low": 1e-7, "high": 1e-1, "log": True}}, trials=1)
    run_search(edited, kind=Pretended)
    assert outcomes(edited)[:4] == more
    assert len(outcomes(edited)) == 5
    narrow = search(tmp_path, {"sft.lr": {"low": 1e-6, "high": 1e-5, "log": True}})
    assert {place for place, *_ in outcomes(narrow)} < {place for place, *_ in outcomes(edited)}

    results = report(edited)
    best = min(edited.trials(), key=lambda trial: loss(trial.user_attrs[VALUES]))
    assert results["trials"][results["best"]["number"]]["directory"].endswith(best.user_attrs[DIRECTORY])
    assert results["importance"] == {"sft.lr": 1.0}
    directory = tmp_path / "searches" / "rates"
    assert load_config(directory / "best.yaml") == CONFIG.with_values(best.user_attrs[VALUES]).config
    assert json.loads((directory / "results.json").read_text()) == results
    assert (directory / "search.png").read_bytes().startswith(b"\x89PNG")


def test_a_trial_worse_than_the_median_of_those_before_it_is_pruned(tmp_path: Path) -> None:
    rule = {"prune": {"after_steps": 2, "min_trials": 2}}
    run_search(search(tmp_path, trials=8, **rule), kind=Stoppable)
    results = report(search(tmp_path, trials=8, **rule))["trials"]
    assert {trial["state"] for trial in results} == {"finished", "pruned"}
    assert all((trial["value"] is None) == (trial["state"] == "pruned") for trial in results)


def test_trials_side_by_side(tmp_path: Path) -> None:
    wanted = search(tmp_path, trials=2, concurrent=2)
    run_search(wanted, kind=Meeting)
    assert [state for _, state, _ in outcomes(wanted)] == [TrialState.COMPLETE] * 2


def test_a_failed_trial_is_repeated(tmp_path: Path) -> None:
    run_search(search(tmp_path, trials=2), kind=Stumbling)
    failed, other = report(search(tmp_path, trials=2))["trials"]
    assert (failed["state"], failed["error"]) == ("failed", "ValueError: the loss is nan")
    run_search(search(tmp_path, trials=2), kind=Stumbling)
    again = report(search(tmp_path, trials=2))["trials"]
    assert again == [failed | {"state": "finished", "value": loss(failed["values"]), "error": None}, other]
    assert len(ran(tmp_path)) == 3


def test_a_metric_that_is_not_logged_ends_the_search(tmp_path: Path) -> None:
    with pytest.raises(UnknownMetricError, match="stage 'sft' logs sft/loss"):
        run_search(search(tmp_path), kind=Failing)


def test_a_search_that_was_cut_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    whole = run(search(tmp_path / "whole", trials=14), 14)
    cut = run(search(tmp_path / "cut", trials=14), 4)
    run(search(tmp_path / "cut", trials=14), 1, TrialState.RUNNING)
    journal = search(tmp_path / "cut").directory / JOURNAL
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 6, "wor')
    again = run(search(tmp_path / "cut", trials=14), 14)
    assert [*cut, *again] == whole
    assert run(search(tmp_path / "cut", trials=14), 1) == []
    assert len(run(search(tmp_path / "cut", trials=16), 16)) == 2


def test_interrupted_trials_come_first(tmp_path: Path) -> None:
    (done,) = run(search(tmp_path), 1)
    (cut,) = run(search(tmp_path), 1, TrialState.RUNNING)
    first, second = run(search(tmp_path), 9)
    assert first == cut
    assert second not in (cut, done)


def test_no_values_are_tried_twice_and_a_space_has_an_end(tmp_path: Path) -> None:
    fields = {"sft.batch_size": {"choices": [8, 16, 32]}, "sft.lora": {"choices": [None, {"rank": 4}]}}
    drawn = run(search(tmp_path, fields, trials=20), 20)
    assert sorted(json.dumps([values["sft.batch_size"], values["sft.lora"]]) for values in drawn) == sorted(
        json.dumps([size, lora]) for size in (8, 16, 32) for lora in (None, {"rank": 4})
    )
