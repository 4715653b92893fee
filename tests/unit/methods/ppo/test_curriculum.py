"""Prompts drawn by success, by a column, by a user's weights; the loop of `loop.py` runs with each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.unit.methods.ppo.loop import World, attempt, plain
from xray_runtime.data.batching import Cursor
from xray_runtime.data.ledger import iterations, read_shard, shard_path
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.curriculum import PromptOrder, PromptStatistics
from xray_runtime.methods.ppo.curriculum_config import CurriculumConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.rewards.config import reward_term

GROUPS: dict[str, Any] = {
    "prompts_per_iteration": 2,
    "samples_per_prompt": 2,
    "minibatch_size": 2,
    "advantages": "rloo",
    "reward_scaling": "none",
}


class Prompts:
    """Prompts of which each has a number in the column `level`."""

    def __init__(self, levels: list[Any]) -> None:
        self.levels, self.rows = levels, np.arange(len(levels)) + 100

    def __len__(self) -> int:
        return len(self.levels)

    def columns(self, indices: Any) -> dict[str, list[Any]]:
        return {"level": [self.levels[i] for i in indices]}


def order(levels: list[Any], weights: Any = None, **fields: Any) -> PromptOrder:
    prompts: Any = Prompts(levels)
    return PromptOrder(CurriculumConfig(**fields), prompts, Cursor(len(levels), seed=3), weights)


def record(prompts: PromptOrder, rewards: dict[int, list[float]]) -> None:
    numbers = [prompt for prompt, group in rewards.items() for _ in group]
    prompts.record(np.array(numbers), np.array([reward for group in rewards.values() for reward in group]))


def test_solved_and_hopeless_prompts_rest() -> None:
    drawn = order([0] * 4, by="success", rest=2)
    first = drawn.take(4)
    assert sorted(first.prompts) == [0, 1, 2, 3]
    assert first.reasons == ["new"] * 4
    # 0: all solved; 1: none; 2: one of two; 3: the only reply with a reward did not solve it.
    record(drawn, {0: [1.0, 2.0], 1: [0.0, 0.99], 2: [1.0, 0.0], 3: [0.0, np.nan]})
    assert drawn.metrics() == {"curriculum/seen": 1.0, "curriculum/success": 0.375, "curriculum/resting": 0.75}
    # Two epochs of prompt 2 alone, then all again.
    assert drawn.take(2).prompts == [2, 2]
    third = drawn.take(4)
    assert sorted(third.prompts) == [0, 1, 2, 3]
    assert third.repeated(2).reasons is not None
    reasons = dict(zip(third.prompts, third.reasons or [], strict=True))
    assert reasons == {0: "100% solved it", 1: "0% solved it", 2: "50% solved it", 3: "0% solved it"}


def test_a_group_without_any_reward_is_not_counted() -> None:
    drawn = order([0, 0], by="success")
    record(drawn, {0: [np.nan, np.nan], 1: [1.0, 0.0]})
    assert drawn.metrics()["curriculum/seen"] == 0.5
    assert set(drawn.take(2).reasons or []) == {"new", "50% solved it"}


def test_a_column_orders_each_epoch() -> None:
    levels = [3, 1.5, 2, 1.5, 0]
    drawn = order(levels, by="column", column="level")
    first = drawn.take(5)
    assert [levels[prompt] for prompt in first.prompts] == sorted(levels)
    assert first.reasons == ["level 0", "level 1.5", "level 1.5", "level 2", "level 3"]
    assert drawn.take(2).prompts == first.prompts[:2]


@pytest.mark.parametrize("level", [None, "hard", True, float("nan")])
def test_each_prompt_needs_a_number_in_the_column(level: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^curriculum\.column = 'level': row 101 has .*, which is not a finite number$"
    ):
        order([1, level], by="column", column="level")


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match=r"^curriculum: the dataset has no column 'depth'; it has level$"):
        order([1, 2], by="column", column="depth")


def test_prompts_are_drawn_in_proportion_to_weights() -> None:
    """One of four prompts has weight 0, one has as much as the two others together; 4,000 draws of one prompt."""
    seen: list[PromptStatistics] = []

    def weights(known: PromptStatistics) -> list[float]:
        seen.append(known)
        return [float(level) for level in known.column("level")]

    drawn = order([0, 1, 1, 2], weights, by="mine:weights")
    counts = np.bincount([drawn.take(1).prompts[0] for _ in range(4000)], minlength=4)
    assert counts[0] == 0
    # Three standard deviations of a share of 4,000 draws are below 0.024.
    np.testing.assert_allclose(counts[1:] / 4000, [0.25, 0.25, 0.5], atol=0.024)
    assert drawn.take(3).reasons is not None
    record(drawn, {3: [0.5, 1.5]})
    drawn.take(1)
    assert seen[-1].draws.tolist() == [0, 0, 0, 1]
    assert seen[-1].success[3] == 0.5
    assert seen[-1].reward[3] == 1.0
    assert np.isnan(seen[-1].reward[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0], r"returned shape \(1,\), must be \(2,\): a weight for each prompt"),
        ([1.0, np.nan], "returned a weight that is negative or not finite"),
        ([1.0, -1.0], "returned a weight that is negative or not finite"),
        ([0.0, 0.0], "returned 0 weights above 0, must be at least 1"),
        (["much", 1.0], "returned something else than numbers: could not convert string to float: .*"),
        (None, r"returned shape \(\), must be \(2,\): a weight for each prompt"),
    ],
)
def test_weights_are_tried_before_anything_is_computed(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^curriculum: mine:weights {message}$"):
        order([0, 0], lambda known: given, by="mine:weights")


@pytest.mark.parametrize(
    "fields",
    [
        {"by": "luck"},
        {"by": "column"},
        {"by": "success", "column": "level"},
        {"by": "column", "column": "level", "rest": 2},
        {"by": "success", "easy": 0.2, "hard": 0.2},
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CurriculumConfig(**fields)


def test_success_needs_groups_and_rewards_in_order() -> None:
    rewards = [reward_term(model="rewards.0")]
    with pytest.raises(ValidationError, match="samples_per_prompt = 1 must be at least 2 with curriculum"):
        PPOConfig(rewards=rewards, curriculum=CurriculumConfig(by="success"))


def later_solved(prompts: list[str], replies: list[str]) -> list[float]:
    """Solved or not by prompt and reply alone."""
    return [float((len(prompt) + ord(reply[0])) % 2) for prompt, reply in zip(prompts, replies, strict=True)]


def easy_first(known: PromptStatistics) -> np.ndarray:
    return np.where(np.isnan(known.success), 1.0, 0.1 + known.success)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("by", ["success", "easy_first:easy_first"])
def test_a_resumed_stage_draws_the_same_prompts(inputs: PPOInputs, tmp_path: Path, by: str, lag: int) -> None:
    functions = {"solved": later_solved, "easy_first:easy_first": easy_first}
    fields = GROUPS | {"iterations": 6, "lag": lag, "curriculum": CurriculumConfig(by=by)}
    fields["rewards"] = [reward_term(function="solved")]
    whole, resumed = World(surer_by=0.1), World(surer_by=0.1)
    first = attempt(inputs, tmp_path / "whole", whole, functions=functions, **fields)
    newest = first.snapshots[2]
    attempt(inputs, tmp_path / "resumed", resumed, functions=functions, newest=newest, **fields)
    # An iteration is two minibatches.
    after = 2 * newest.step
    np.testing.assert_equal(list(map(plain, resumed.batches)), list(map(plain, whole.batches[after:])))
    ledgers = [tmp_path / name / "ledger" for name in ("whole", "resumed")]
    assert iterations(ledgers[0]) == iterations(ledgers[1]) == list(range(6))
    for number in range(6):
        one, other = (shard_path(ledger, number).read_bytes() for ledger in ledgers)
        assert one == other
    table = read_shard(shard_path(ledgers[0], 5)).table
    assert len(set(table["drawn"].to_pylist())) <= 2
    assert all(table["drawn"].to_pylist())
    assert {"curriculum/seen", "curriculum/success"} <= set(first.points[5])


def test_replies_that_were_replaced_count_too(inputs: PPOInputs, tmp_path: Path) -> None:
    """All replies tie in the first round, and rest; other prompts are drawn."""
    fields = GROUPS | {"iterations": 1, "resample_rounds": 1, "curriculum": CurriculumConfig(by="success")}
    fields["rewards"] = [reward_term(function="never")]
    functions = {"never": lambda prompts, replies: [0.0] * len(replies)}
    recorder = attempt(inputs, tmp_path / "out", World(), functions=functions, **fields)
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    assert recorder.points[0]["curriculum/resting"] > 0
    assert len(table) == 8
    drawn = dict(zip(table["prompt"].to_pylist(), table["round"].to_pylist(), strict=True))
    assert len(drawn) == 4
