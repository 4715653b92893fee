"""Games of several seats: real worker processes, models in this process."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.message_texts import Messages
from tests.unit.methods.ppo import sample_environments
from tests.unit.methods.ppo.loop import logprob, plain
from tests.unit.methods.ppo.played_environments import HERE, Policy, played
from xray_runtime.agents.environments.answer_checks import as_start, as_step
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.methods.common.environment_protocol import Start, Step
from xray_runtime.methods.common.sampling.episode import games_of_rows
from xray_runtime.methods.evaluate.config import EvaluateConfig
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.config_checks import check_champion
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards.journal import Journal
from xray_runtime.trust.replay_answers import restore_recorded

SEATS = ["left", "right"]
FIELDS: dict[str, Any] = {
    "method": "rae",
    "prompts_per_iteration": 2,
    "samples_per_prompt": 2,
    "minibatch_size": 4,
    "iterations": 3,
    "importance_correction": "none",
    "limits": {"seats": SEATS},
}


def ledger(directory: Path, number: int) -> Any:
    return read_shard(shard_path(directory / "ledger", number)).table


def advantages(table: Any) -> list[set[float]]:
    masks = table["response_mask"].to_pylist()
    rows = zip(table["advantages"].to_pylist(), masks, strict=True)
    return [{round(a, 6) for a, is_own in zip(*row, strict=True) if is_own} for row in rows]


def test_rows_of_a_prompt_and_seat_follow_one_another() -> None:
    assert games_of_rows(4, 2, 2) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert games_of_rows(4, 2, 1) == [0, 1, 2, 3]


def test_each_seat_has_its_own_row(inputs: PPOInputs, tmp_path: Path) -> None:
    world, recorder = played(inputs, tmp_path / "out", "Duel", **FIELDS)
    tokenizer, table = world.tokenizer, ledger(tmp_path / "out", 0)  # type: ignore[attr-defined]
    assert table["row"].to_pylist() == list(range(8))
    assert table["seat"].to_pylist() == ["left", "left", "right", "right"] * 2
    prompts = table["prompt"].to_pylist()
    assert prompts[:4] == prompts[:1] * 4 != prompts[4:] == prompts[4:5] * 4
    assert table["turns"].to_pylist() == [2, 2, 1, 1] * 2
    for seat, ids, mask, begun in zip(
        *(table[name].to_pylist() for name in ("seat", "reply_ids", "response_mask", "prompt_ids")), strict=True
    ):
        assert f"you are {seat}" in tokenizer.decode(begun)
        own = tokenizer.decode([i for i, is_own in zip(ids, mask, strict=True) if is_own])
        assert own.count("an") == (2 if seat == "left" else 1)
        # What the other said is no text of this row; left reads the environment's words alone.
        read = tokenizer.decode([i for i, is_own in zip(ids, mask, strict=True) if not is_own])
        assert ("right moved" in read) == (seat == "left")
        assert mask[-1]
    # Left: 1 for its last turn. Right: ¼ for its move, and −1 on the same turn, its last.
    assert table["reward"].to_pylist() == [1.0, 1.0, -0.75, -0.75] * 2
    for rewards, seat in zip(table["turn_rewards"].to_pylist(), table["seat"].to_pylist(), strict=True):
        assert rewards[-1] == {"left": 1.0, "right": -0.75}[seat]
        assert sum(rewards) == rewards[-1]
    found = json.loads(table["answers"].to_pylist()[0])
    assert [(answer.get("seat"), answer.get("reply")) for answer in found] == [
        (None, None),
        ("left", "an"),
        ("right", "an"),
        ("left", "an"),
    ]
    first = recorder.points[0]
    assert (first["rollout/seat/left"], first["rollout/seat/right"]) == (1.0, -0.75)
    # A turn of a game has a seed of its own.
    assert len(set(world.seeds)) == 3 * 4 * 3


def test_rae_measures_a_seat_by_its_own_past(inputs: PPOInputs, tmp_path: Path) -> None:
    whole, first = played(inputs, tmp_path / "whole", "Duel", **FIELDS)
    kept = 0.95**4  # four games of equal rewards: b = (1 − .95⁴) r, and then .95⁴ b + (1 − .95⁴) r
    expected = [1.0, 1.0 - (1 - kept), 1.0 - (1 - kept**2)]
    for number, of_left in enumerate(expected):
        table = ledger(tmp_path / "whole", number)
        assert (
            advantages(table)
            == [{round(of_left, 6)}] * 2
            + [{round(-0.75 * of_left, 6)}] * 2
            + [{round(of_left, 6)}] * 2
            + [{round(-0.75 * of_left, 6)}] * 2
        )
    # An attempt that goes on has the means.
    resumed, _ = played(inputs, tmp_path / "resumed", "Duel", newest=first.snapshots[-1], **FIELDS)
    np.testing.assert_equal([plain(b) for b in resumed.batches], [plain(b) for b in whole.batches][-2:])
    shards = [shard_path(tmp_path / name / "ledger", 2).read_bytes() for name in ("whole", "resumed")]
    assert shards[0] == shards[1]


def test_a_replay_asks_no_environment(inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, scratch = tmp_path / "steps", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv(sample_environments.STEPS, str(steps))
    first, _ = played(inputs, tmp_path / "first", "Duel", **FIELDS)
    steps.unlink()
    given = {name: value for name, value in FIELDS.items() if name != "limits"}
    config = PPOConfig(environment={"path": f"{HERE}:Duel", "seats": SEATS}, rewards=[], **given)
    load_tokenizer(inputs.policy.path).save_pretrained(tmp_path / "first")
    assert restore_recorded(tmp_path / "first", config, 2, Journal(scratch)) == ["environment"]
    again, _ = played(inputs, tmp_path / "again", "Duel", kept=scratch, **FIELDS)
    assert not steps.exists()
    np.testing.assert_equal([plain(b) for b in again.batches], [plain(b) for b in first.batches])
    assert ledger(tmp_path / "again", 2).equals(ledger(tmp_path / "first", 2))


def test_a_seat_that_is_not_there_fails_its_game(inputs: PPOInputs, tmp_path: Path, message_texts: Messages) -> None:
    with message_texts.raises(RuntimeError):
        played(inputs, tmp_path / "out", "Stranger", **FIELDS | {"max_failed": 0.5})


def test_a_seat_without_a_turn_has_no_reward(inputs: PPOInputs, tmp_path: Path, message_texts: Messages) -> None:
    played(inputs, tmp_path / "out", "Solo", **FIELDS | {"max_failed": 0.5, "iterations": 1})
    table = ledger(tmp_path / "out", 0)
    assert table["reward"].to_pylist() == [1.0, 1.0, None, None] * 2
    assert table["turns"].to_pylist() == [1, 1, 0, 0] * 2
    message_texts.check(table["failure/environment"].to_pylist()[2])


class Sides(Policy):
    """The champion says "na"."""

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        found = super()._generate(rows, sampling, version)
        if self.role == "generator":
            return found
        assert (self.role, version) == ("champion", 0)
        turned = Ragged.of([ids[1], ids[0], ids[2]] for ids in found.response_ids)
        return found.with_columns(response_ids=turned, rollout_logprobs=Ragged(logprob(turned.values), turned.offsets))


def test_a_champion_plays_seats_and_learns_nothing(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, scratch = tmp_path / "steps", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv(sample_environments.STEPS, str(steps))
    against = dataclasses.replace(inputs, champion=inputs.policy)
    seats = {"seats": SEATS, "champion_seats": ["left"]}
    fields = FIELDS | {"limits": seats, "minibatch_size": 4, "model": Sides}
    world, recorder = played(against, tmp_path / "out", "Duel", **fields)
    table = ledger(tmp_path / "out", 0)
    assert table["seat"].to_pylist() == ["right"] * 4
    assert table["reward"].to_pylist() == [-0.75] * 4
    assert [len(rows.id) for _, rows, _, _ in world.batches] == [4] * 3
    found = json.loads(table["answers"].to_pylist()[0])
    assert [(answer["seat"], answer["reply"]) for answer in found[1:]] == [
        ("left", "na"),
        ("right", "an"),
        ("left", "na"),
    ]
    assert "rollout/seat/left" not in recorder.points[0]
    # A replay has what both said.
    steps.unlink()
    given = {name: value for name, value in FIELDS.items() if name != "limits"}
    config = PPOConfig(environment={"path": f"{HERE}:Duel", **seats}, rewards=[], **given)
    load_tokenizer(inputs.policy.path).save_pretrained(tmp_path / "out")
    assert restore_recorded(tmp_path / "out", config, 2, Journal(scratch)) == ["environment"]
    played(against, tmp_path / "again", "Duel", kept=scratch, **fields)
    assert not steps.exists()
    assert ledger(tmp_path / "again", 2).equals(ledger(tmp_path / "out", 2))


@pytest.mark.parametrize("champion", [True, False])
def test_a_champion_has_seats(champion: bool, message_texts: Messages) -> None:
    fields: dict[str, Any] = {"environment": {"path": "a:b", "seats": SEATS}}
    if not champion:
        fields["environment"] |= {"champion_seats": ["left"]}
    config = validate_as(PPOConfig, {"rewards": []} | fields)
    with message_texts.raises(ValueError):
        check_champion(config, {"champion": None} if champion else {})


@pytest.mark.parametrize(
    "fields",
    [
        {"environment": {"path": "a:b", "seats": ["one"]}},
        {"environment": {"path": "a:b", "seats": SEATS, "champion_seats": ["above"]}},
        {"environment": {"path": "a:b", "seats": SEATS, "champion_seats": SEATS}},
        {"environment": {"path": "a:b", "seats": ["one", "one"]}},
        {"environment": {"path": "a:b", "seats": ["one", "t w o"]}},
        {"environment": {"path": "a:b", "seats": SEATS}, "resample_rounds": 1, "samples_per_prompt": 2},
        {"environment": {"path": "a:b", "seats": SEATS}, "validation": {"every": 1}},
        {"environment": {"path": "a:b", "seats": SEATS}, "in_flight_updates": True, "lag": 1},
        {"environment": {"path": "a:b", "seats": SEATS}, "prompts_per_iteration": 2, "minibatch_size": 8},
    ],
    ids=["one", "stranger", "all", "twice", "name", "resample_rounds", "validation", "in_flight", "minibatch"],
)
def test_what_games_of_several_do_not_allow(fields: dict[str, Any], message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        validate_as(PPOConfig, {"rewards": []} | fields)


def test_other_kinds_of_stage_play_one_seat(message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        validate_as(EvaluateConfig, {"environment": {"path": "a:b", "seats": SEATS}})


@pytest.mark.parametrize(
    "answer",
    [Start(seat=3), Step(seat=None), Step(rewards=[1]), Step(rewards={"a": math.nan}), Step(rewards={1: 1.0})],  # type: ignore[arg-type, dict-item]
    ids=["start", "seat", "list", "nan", "name"],
)
def test_bad_seats_of_an_answer(answer: Any, message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        as_start(answer) if isinstance(answer, Start) else as_step(answer)
