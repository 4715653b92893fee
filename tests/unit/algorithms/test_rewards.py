"""Several sources as one reward: what fails, what does not apply, and ensembles, in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from xray_runtime.algorithms.rewards import (
    ModelScores,
    SourceScores,
    ensemble,
    lowest_where_cut,
    overlong_penalty,
    statistics,
    weighted_sum,
)

NAN = math.nan


def scores(values: dict[str, list[float]], applies: dict[str, list[bool]] | None = None) -> SourceScores:
    everywhere = {source: [True] * len(row) for source, row in values.items()} | (applies or {})
    return SourceScores(
        {source: torch.tensor(row) for source, row in values.items()},
        {source: torch.tensor(row) for source, row in everywhere.items()},
    )


def test_a_row_that_a_counted_source_failed_has_no_reward() -> None:
    found = weighted_sum(scores({"a": [1.0, NAN, 3.0], "b": [4.0, 5.0, NAN]}), {"a": 1.0, "b": 0.5})
    assert found[0] == 3.0
    assert found.isnan().tolist() == [False, True, True]
    # One that is only logged loses no row.
    logged = weighted_sum(scores({"a": [1.0, 2.0], "b": [NAN, 7.0]}), {"a": 2.0, "b": 0.0})
    assert logged.tolist() == [2.0, 4.0]
    # Nor does it hide those after it.
    assert weighted_sum(scores({"b": [NAN, 7.0], "a": [1.0, 2.0]}), {"a": 2.0, "b": 0.0}).tolist() == [2.0, 4.0]


def test_a_source_that_does_not_apply_contributes_nothing() -> None:
    found = weighted_sum(
        scores(
            {"a": [1.0, NAN, 3.0, NAN], "b": [NAN, 5.0, 6.0, NAN]},
            {
                "a": [True, False, True, False],
                "b": [False, True, True, False],
            },
        ),
        {"a": 1.0, "b": 2.0},
        {"a": (1.0, 0.5)},
    )
    # (1 − 1) / ½; 2 · 5; (3 − 1) / ½ + 2 · 6; and where none applies there is no reward at all.
    assert found[:3].tolist() == [0.0, 10.0, 16.0]
    assert found[3].isnan()


@pytest.mark.parametrize(
    ("uncertainty", "expected"),
    # Mean 2, population variance 2/3.
    [(0.0, 2.0), (0.5, 5 / 3), (3.0, 0.0)],
)
def test_an_ensemble_loses_by_what_its_members_disagree(uncertainty: float, expected: float) -> None:
    # Standardized: 1, 2, 3 and 4, 4, 4.
    raw = ([1.0, 4.0], 0.0, 1.0), ([5.0, 9.0], 1.0, 2.0), ([13.0, 17.0], 1.0, 4.0)
    found = ensemble([ModelScores(torch.tensor(of).double(), mean, std) for of, mean, std in raw], uncertainty)
    # Where all agree nothing is lost.
    assert found.values.tolist() == pytest.approx([expected, 4.0])
    assert found.disagreement is not None
    assert found.disagreement.tolist() == pytest.approx([(2 / 3) ** 0.5, 0.0])
    assert ensemble([ModelScores(torch.tensor([of])) for of in (1.0, NAN)], uncertainty).values.isnan().all()


def test_statistics_are_of_what_there_is() -> None:
    found = statistics(scores({"a": [1.0, NAN, 3.0, 9.0], "b": [NAN, NAN, NAN, NAN]}, {"a": [True, True, True, False]}))
    assert found["a"] == {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0, "failed": 1.0}
    assert found["b"] == {"failed": 4.0}
    disagreeing = scores({"a": [1.0, 3.0]})
    disagreeing = SourceScores(disagreeing.values, disagreeing.applies, {"a": torch.tensor([0.5, 1.0])})
    assert statistics(disagreeing)["a"]["disagreement"] == 0.75

    running = scores({"a": [1.0, 3.0, 4.0]})
    running = SourceScores(running.values, running.applies, refused={"a": [True, False, True]})
    assert statistics(running)["a"]["refused"] == 2.0
    assert "refused" not in found["a"]


def test_the_overlong_penalty_by_hand() -> None:
    # 16 tokens at most, the last 4 of them punished: a quarter for each.
    found = overlong_penalty(torch.tensor([1, 12, 13, 15, 16, 20]), 16, 4)
    assert found.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]


def test_a_reply_that_was_cut_has_no_more_than_the_worst_that_ended() -> None:
    rewards, ended = torch.tensor([3.0, 2.0, 5.0, 1.0]), torch.tensor([True, True, False, False])
    assert lowest_where_cut(rewards, ended).tolist() == [3.0, 2.0, 2.0, 1.0]
    assert lowest_where_cut(rewards, ~ended).tolist() == [1.0, 1.0, 5.0, 1.0]
    assert lowest_where_cut(rewards, torch.zeros(4, dtype=torch.bool)).tolist() == [1.0] * 4
    assert lowest_where_cut(rewards, torch.ones(4, dtype=torch.bool)).tolist() == rewards.tolist()
