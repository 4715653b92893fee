"""All that was measured of a graph's policies in one table."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.unit.trust.synthetic import Lifecycle
from xray_runtime.kernel.report.evaluations import (
    EvaluationResults,
    Number,
    as_json,
    figure,
    measured,
    measures,
    side_by_side,
)
from xray_runtime.methods.benchmark.kind import BENCHMARK
from xray_runtime.methods.evaluate.kind import EVALUATE


def test_policies_are_rows_and_ways_of_measuring_are_columns() -> None:
    found = [
        EvaluationResults("ppl-sft", "a" * 64, "1", {"perplexity": Number(9.0, 8.0, 10.0)}),
        EvaluationResults("ppl-ppo", "b" * 64, "1", {"perplexity": Number(7.0, 6.5, 7.5)}),
        EvaluationResults("maths", "b" * 64, "2", {"pass_at_1": Number(0.25)}),
        EvaluationResults("code", "b" * 64, "3", {"pass_at_1": Number(0.5)}),
    ]
    table = side_by_side(found, {"a" * 64: "sft"})
    assert table.columns == ["perplexity", "pass_at_1, maths", "pass_at_1, code"]
    assert table.cells() == [["sft", "9 (8 to 10)", "", ""], ["b" * 12, "7 (6.5 to 7.5)", "0.25", "0.5"]]
    assert as_json(table)["rows"][0] == {"policy": "sft", "numbers": [[9.0, 8.0, 10.0], None, None]}
    drawn = figure(table)
    assert drawn is not None
    [panel] = drawn.axes  # only perplexity is of more than one policy
    assert panel.get_title(loc="left") == "perplexity"
    assert [line.get_xdata()[0] for line in panel.lines if line.get_marker() == "o"] == [9.0, 7.0]
    assert figure(side_by_side(found[:1], {})) is None


def test_intervals_are_drawn_on_one_scale_with_no_difference_in_it() -> None:
    found = [
        EvaluationResults("e-1", "a" * 64, "1", {"win_rate by gold": Number(0.8, 0.7, 0.9), "kl": Number(2.0)}),
        EvaluationResults(
            "e-2", "b" * 64, "1", {"win_rate by gold": Number(0.6, 0.5, 0.7), "kl": Number(float("nan"))}
        ),
    ]
    rate, kl = measures(side_by_side(found, {"a" * 64: "ppo-1", "b" * 64: "ppo-2"}))
    assert (rate.title, kl.title) == ("win rate by gold", "KL to the baseline, nats a reply")
    # From 0.5 at 3% to 0.9 at 97%: 23.5 points are 0.1.
    assert rate.neutral == 3.0
    assert rate.rows == [
        ("ppo-1", "0.8 (0.7 to 0.9)", 73.5, 50.0, 97.0),
        ("ppo-2", "0.6 (0.5 to 0.7)", 26.5, 3.0, 50.0),
    ]
    assert (kl.neutral, kl.rows) == (None, [("ppo-1", "2", 3.0, 3.0, 3.0)])


def test_what_was_before_stands_beside_what_is_after() -> None:
    numbers = {"distinct_2_before": Number(0.9), "distinct_2_after": Number(0.75), "gold_before": Number(0.25)}
    numbers |= {"gold_after": Number(0.5), "win_rate by x_before": Number(0.8, 0.7, 0.9), "lost_before": Number(3.0)}
    [rate, variety, gold, lost] = measures(
        side_by_side([EvaluationResults("e", "a" * 64, "1", numbers)], {"a" * 64: "ppo"})
    )
    assert rate.title == "win rate by x_before"
    assert (variety.title, variety.rows[0][1]) == (
        "variety before → after, share of different word pairs",
        "0.9 → 0.75",
    )
    assert (gold.title, gold.rows[0][:2]) == ("gold score before → after", ("ppo", "0.25 → 0.5"))
    assert lost.rows[0][1] == "3"


def test_tags_have_columns_of_their_own(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path, tracking=False).whole()
    of_tag = {"win_rate": 0.25, "win_rate_ci95": [0.1, 0.5], "delta": -0.5, "delta_ci95": [-0.75, -0.25]}
    content = {"judges": {}, "kl": 1.0, "tags": {"rain": {"gold": of_tag}}}
    files = {"evaluation.json": json.dumps(content).encode()}
    roles = {"policy": life.policy, "against": "sft", "prompts": "prepare"}
    one = measured(EVALUATE, life.add("by-tag", "evaluate", files, roles, {}, 0).path)
    rate, delta, _ = measures(side_by_side([one], {}))
    assert (rate.title, delta.title) == ("win rate by gold, rain", "change of the score by gold, rain")
    # From 0.1 at 3% to 0.5, which is no difference, at 97%; from -0.75 to 0.
    assert (rate.neutral, rate.rows[0][2:]) == (97.0, (38.25, 3.0, 97.0))
    assert (delta.neutral, delta.rows[0][2:]) == (97.0, (34.33, 3.0, 65.67))


def test_names_of_policies_stay_apart() -> None:
    names = {f"{number:064}": f"a-stage-with-a-rather-long-name-{number}" for number in range(40)}
    found = [EvaluationResults("ppl", sha, "1", {"perplexity": Number(9.0, 8.0, 10.0)}) for sha in names]
    drawn = figure(side_by_side(found, names))
    assert drawn is not None
    drawn.draw_without_rendering()
    boxes = [label.get_window_extent() for label in drawn.axes[0].get_yticklabels()]
    assert len(boxes) == 40
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 for box in boxes)


def test_equal_measurements_share_a_column(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path, tracking=False).whole()

    def add(stage: str, policy: str, seed: int, nll: float) -> EvaluationResults:
        content = {"suite": "perplexity", "samples": 8, "nll": nll, "nll_ci95": [nll - 1, nll + 1]}
        roles = {"policy": policy, "prompts": "prepare"}
        files = {"benchmark.json": json.dumps(content).encode()}
        return measured(BENCHMARK, life.add(stage, "benchmark", files, roles, {"suite": "perplexity"}, seed).path)

    first, second, other = add("one", "sft", 0, 3.0), add("two", "ppo-2", 0, 2.0), add("three", "ppo-2", 1, 2.5)
    assert first.numbers == {"nll": Number(3.0, 2.0, 4.0)}
    assert first.way == second.way != other.way
    judged = measured(EVALUATE, life.done["evaluate"].path)
    assert judged.policy == second.policy == life.done["ppo-2"].sha256
    assert judged.numbers["win_rate by gold"] == Number(0.6, pytest.approx(0.4), pytest.approx(0.8))
    assert "win_rate" not in judged.numbers
