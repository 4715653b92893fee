"""What a search draws next, and which trial it ends early."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from xray.flows.search import SearchConfig, search_space
from xray.flows.subject import Subject
from xray.flows.trials import Points, Search, Trial, TrialRecord, is_worse_than_median
from xray.flows.tune import _next_trials
from xray_runtime.config.loading import validate

CONFIG = Subject(config=validate({"project": "xray-tune"}))
RATES = {"sft.lr": {"low": 1e-6, "high": 1e-1, "log": True}}


def search(root: Path, fields: dict[str, Any] = RATES, **more: Any) -> Search:
    how = {"until": "sft", "metric": "sft/heldout_loss", "mode": "min", "name": "rates", "seed": 1}
    wanted = SearchConfig.model_validate({"fields": fields, **how, **more})
    return Search(root, CONFIG, wanted, search_space(CONFIG, wanted))


def run(search: Search, count: int, **outcome: Any) -> list[Trial]:
    """Have so many of the search's next trials end."""
    trials = []
    for trial in islice(_next_trials(search), count):
        number = search.next_number()
        record = {"number": number, "search": search.digest, "values": trial.values, "value": float(number)}
        trial.keep(TrialRecord.model_validate({"state": "finished", **record, **outcome}))
        trials.append(trial)
    return trials


def test_a_search_that_was_cut_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    whole = run(search(tmp_path / "whole", trials=14), 14)
    cut = run(search(tmp_path / "cut", trials=14), 4)
    again = run(search(tmp_path / "cut", trials=14), 14)
    assert [trial.values for trial in [*cut, *again]] == [trial.values for trial in whole]
    assert run(search(tmp_path / "cut", trials=14), 1) == []
    assert len(run(search(tmp_path / "cut", trials=16), 16)) == 2


def test_trials_that_were_cut_or_failed_come_first(tmp_path: Path) -> None:
    (done,) = run(search(tmp_path), 1)
    (cut,) = run(search(tmp_path), 1, state="running", value=None)
    here = _next_trials(search(tmp_path, trials=3))
    assert next(here).values == cut.values
    assert next(here).values not in (cut.values, done.values)
    assert list(here) == []


def test_no_values_are_tried_twice_and_a_space_has_an_end(tmp_path: Path) -> None:
    fields = {"sft.batch_size": {"choices": [8, 16, 32]}}
    trials = run(search(tmp_path, fields, trials=20), 20)
    assert sorted(trial.values["sft.batch_size"] for trial in trials) == [8, 16, 32]


@pytest.mark.parametrize(
    ("mode", "points", "worse"),
    [
        # Means of the others at step 2: 1, 2, 3; their median is 2. The fourth has not come as far.
        ("max", [(1, 0.0), (2, 1.9)], True),
        ("max", [(1, 0.0), (2, 2.0)], False),
        ("max", [(1, 2.1), (2, 0.0)], False),
        ("min", [(1, 9.0), (2, 2.1)], True),
        ("min", [(1, 1.9), (2, 9.0)], False),
        # The first step is not held against anybody.
        ("max", [(1, -9.0)], False),
    ],
)
def test_a_trial_worse_than_the_median_of_means(tmp_path: Path, mode: str, points: Points, worse: bool) -> None:
    wanted = search(tmp_path, mode=mode, prune={"after_steps": 2, "min_trials": 3}).wanted
    others = [[(1, 50.0), (2, mean), (3, 99.0)] for mean in (1.0, 2.0, 3.0)]
    assert is_worse_than_median(wanted, points, [*others, [(1, 70.0)], []]) == worse
    assert not is_worse_than_median(wanted, points, others[:2])
