"""Two sides against each other where some replies have no reward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.data.batch import Rollout
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.sampling.policy_replies import PolicyReplies
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.methods.evaluate.judging import Panel, judge, record_replies, tagged_rows
from xray_runtime.rewards.config import reward_term

NAN = math.nan


def sides(before: list[float], after: list[float]) -> dict[str, torch.Tensor]:
    return {"before": torch.tensor(before).double(), "after": torch.tensor(after).double()}


def test_a_pair_of_which_one_has_no_reward_is_left_out(tmp_path: Path) -> None:
    config = EvaluationConfig(bootstrap_samples=100)
    rewards, golds = sides([1.0, NAN, 2.0, 0.0], [2.0, 9.0, NAN, 0.0]), sides([0.0] * 4, [1.0] * 4)
    found = judge(config, 0, "evaluate", "after", "before", Panel({}, rewards))
    assert found == judge(config, 0, "evaluate", "after", "before", Panel({}, sides([1.0, 0.0], [2.0, 0.0])))
    assert (found["win_rate"], found["reward_delta"], found["reward_before"]) == (None, 0.5, 0.5)
    # As a judge: a win and a tie. Gold scores have nothing to do with it.
    judged = config.model_copy(update={"gold": "vader", "judges": [reward_term(model="judges.0")]})
    both = judge(judged, 0, "evaluate", "after", "before", Panel({"gold": golds, "judges.0": rewards}, rewards))
    assert (both["win_rate"], both["judge"], both["gold_delta"], both["reward_delta"]) == (0.75, "judges.0", 1.0, 0.5)
    assert [both["judges"][name]["samples"] for name in ("gold", "judges.0")] == [4, 2]
    assert [both["judges"]["judges.0"][name] for name in ("won", "lost", "tied")] == [1, 0, 1]
    # Without a reward nothing is said of one.
    alone = judge(judged, 0, "evaluate", "after", "before", Panel({"gold": golds}))
    assert (alone["judge"], alone["reward_delta"], alone["reward_before"]) == ("gold", None, None)
    with pytest.raises(RuntimeError, match=r"^evaluate: no prompt has a reward for both replies$"):
        judge(config, 0, "evaluate", "after", "before", Panel({}, sides([NAN, 1.0], [1.0, NAN])))
    with pytest.raises(RuntimeError, match=r"^evaluate: no prompt has a score of gold for both replies$"):
        judge(judged, 0, "evaluate", "after", "before", Panel({"gold": sides([NAN, 1.0], [1.0, NAN])}))
    replies = {
        side: PolicyReplies(Rollout(response_ids=Ragged.of([[1]] * 4)), [[0]] * 4, [text] * 4, [text] * 4, [0] * 4)
        for side, text in {"before": "a", "after": "b"}.items()
    }
    recorder: Any = FakeRecorder(tmp_path)
    panel = Panel({}, rewards)
    record_replies(tmp_path, recorder, "evaluation", "evaluate", found, ["p"] * 4, replies, panel, config)
    assert found["length_after"] == 1.0
    shown = json.loads((tmp_path / "samples.json").read_text())
    assert [row["reward_before"] for row in shown] == [1.0, None, 2.0, 0.0]
    # Nothing was lost: a win, a tie, and two pairs without both scores.
    assert json.loads((tmp_path / "lost.json").read_text()) == []


def test_each_tag_that_enough_prompts_have_gets_its_own_wins_and_scores() -> None:
    config = EvaluationConfig(bootstrap_samples=100, gold="vader", tag_column="topic")
    # Ten prompts about rain, of which one has no score, eight about rain and trains, seven about trains alone.
    topics: list[Any] = ["rain"] * 10 + [["rain", "trains"]] * 8 + ["trains"] * 7 + [None] * 3
    before = [0.0] * 28
    after = [NAN] + [1.0] * 9 + [-1.0] * 8 + [0.0] * 7 + [5.0] * 3
    scores = {"gold": sides(before, after)}
    tags = tagged_rows(config, {"topic": topics}, "evaluate")
    found = judge(config, 0, "evaluate", "after", "before", Panel(scores), tags=tags)["tags"]
    assert list(found) == ["rain", "trains"]
    rain, trains = found["rain"]["gold"], found["trains"]["gold"]
    assert [rain[name] for name in ("samples", "won", "lost", "tied", "win_rate")] == [17, 9, 8, 0, 9 / 17]
    assert (rain["delta"], rain["score_before"]) == (pytest.approx(1 / 17), 0.0)
    # Seven ties and eight losses.
    assert (trains["win_rate"], trains["delta"]) == (pytest.approx(3.5 / 15), pytest.approx(-8 / 15))
    assert trains["win_rate_ci95"][0] < 3.5 / 15 < trains["win_rate_ci95"][1] < 0.5
    with pytest.raises(
        ValueError, match=r"^evaluate\.tag_column: 'topic' is not allowed: the held-out prompts have kind$"
    ):
        tagged_rows(config, {"kind": topics}, "evaluate")
    without = EvaluationConfig(bootstrap_samples=100, gold="vader")
    assert tagged_rows(without, {"topic": topics}, "evaluate") is None
    assert "tags" not in judge(without, 0, "evaluate", "after", "before", Panel(scores))


def test_what_was_lost_is_chosen_from_all_prompts_the_largest_loss_first(tmp_path: Path) -> None:
    config = EvaluationConfig(bootstrap_samples=100, gold="vader", num_samples_shown=1)
    panel = Panel({"gold": sides([1.0, 0.5, 0.0, 2.0, 1.0], [1.0, 0.25, 3.0, -1.0, NAN])})
    replies = {
        side: PolicyReplies(Rollout(response_ids=Ragged.of([[1]] * 5)), [[0]] * 5, texts, texts, [0] * 5)
        for side, texts in {"before": list("abcde"), "after": list("vwxyz")}.items()
    }
    summary = judge(config, 0, "evaluate", "after", "before", panel)
    recorder: Any = FakeRecorder(tmp_path)
    record_replies(tmp_path, recorder, "evaluation", "evaluate", summary, list("01234"), replies, panel, config)
    lost = json.loads((tmp_path / "lost.json").read_text())
    assert [(row["prompt"], row["before"], row["after"]) for row in lost] == [("3", "d", "y"), ("1", "b", "w")]
    assert [(row["gold_before"], row["gold_after"]) for row in lost] == [(2.0, -1.0), (0.5, 0.25)]
    assert len(json.loads((tmp_path / "samples.json").read_text())) == 1
