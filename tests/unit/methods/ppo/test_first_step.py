"""The first step of an update computes the policy's log-probabilities where nothing before it needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.methods.ppo.loop import REPLIES, World, attempt, plain
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.methods.common.inputs import PPOInputs
from xray_runtime.methods.ppo import step_scores
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.rollouts import PROBE_ROWS
from xray_runtime.rewards.config import reward_term

GRPO: dict[str, Any] = {
    "method": "grpo",
    "prompts_per_iteration": 2,
    "samples_per_prompt": 2,
    "iterations": 3,
    "max_mismatch": 0.1,
    "kl": {"place": "loss", "coef": 0.1, "target": 2.0, "horizon": 8.0, "controller": "adaptive"},
}


def scored_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_scores, "applies", lambda config: False)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("minibatch", "scored"), [(4, 0), (2, 2)])
def test_the_first_step_computes_what_the_policy_did_not_score(
    inputs: PPOInputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minibatch: int,
    scored: int,
    epochs: int,
    lag: int,
) -> None:
    """The same ledger, to the byte, the same metrics and later steps as where all replies are scored beforehand."""
    fields = GRPO | {"minibatch_size": minibatch, "epochs": epochs, "lag": lag, "importance_level": "reply"}

    def run(name: str) -> tuple[World, list[dict[str, float]], list[bytes]]:
        world = World(surer_by=0.1, generator_off_by=0.03)
        points = attempt(inputs, tmp_path / name, world, **fields).points
        lasting = [{k: v for k, v in p.items() if not k.startswith(("speed/", "seconds/"))} for p in points]
        return world, lasting, [path.read_bytes() for path in sorted((tmp_path / name / "ledger").iterdir())]

    world, points, ledger = run("step")
    scored_beforehand(monkeypatch)
    before, expected, expected_ledger = run("before")
    assert points == expected
    assert ledger == expected_ledger
    probe = PROBE_ROWS * lag
    assert before.scored["policy"] == 3 * (REPLIES + probe)
    assert world.scored["policy"] == 3 * (scored + probe)
    firsts = range(0, len(world.batches), epochs * REPLIES // minibatch)
    for number, (ours, theirs) in enumerate(zip(world.batches, before.batches, strict=True)):
        columns, wanted = plain(ours)[1], plain(theirs)[1]
        if number in firsts:
            assert set(wanted) - set(columns) == {"old_logprobs", "weights"}
            assert "rollout_logprobs" in columns
            del wanted["old_logprobs"], wanted["weights"], columns["rollout_logprobs"]
        np.testing.assert_equal(columns, wanted)


def test_rows_that_move_to_a_later_minibatch_are_scored_after_all(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply without a reward moves others: each step still learns from the same rows and numbers."""

    def half(prompts: list[str], replies: list[str]) -> list[float | None]:
        return [None if number in (0, 3, 4) else number % 3 for number in range(len(replies))]

    fields = GRPO | {"prompts_per_iteration": 4, "minibatch_size": 2, "max_failed": 0.5, "reward_scaling": "none"}
    fields |= {"rewards": [reward_term(function="half", retries=0)], "functions": {"half": half}}

    def run(name: str) -> tuple[World, list[dict[str, Any]]]:
        world = World(surer_by=0.1, generator_off_by=0.03)
        attempt(inputs, tmp_path / name, world, **fields)
        shards = [read_shard(shard_path(tmp_path / name / "ledger", number)) for number in range(3)]
        return world, [row for shard in shards for row in shard.table.to_pylist()]

    world, rows = run("step")
    scored_beforehand(monkeypatch)
    before, expected = run("before")
    assert len(world.batches) == len(before.batches) == 3 * 4
    for ours, theirs in zip(world.batches, before.batches, strict=True):
        np.testing.assert_equal(ours[1].id, theirs[1].id)
    for row, wanted in zip(rows, expected, strict=True):
        assert row["weights"] == wanted["weights"]
        assert row["logprobs"] in (wanted["logprobs"], [] if row["reward"] is None else wanted["logprobs"])


def test_a_generator_that_computes_another_policy_fails_after_the_first_step(inputs: PPOInputs, tmp_path: Path) -> None:
    world = World(generator_off_by=0.2)
    with pytest.raises(RuntimeError, match=r"differ by 0.2 nats per token"):
        attempt(inputs, tmp_path / "out", world, **GRPO | {"minibatch_size": 4})
    assert world.calls.count("policy train") == 1
    assert "policy score" not in world.calls


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"method": "grpo"}, True),
        ({"method": "dapo"}, True),
        ({"method": "rloo"}, False),  # its KL is in the reward
        ({"method": "rloo", "kl": {"coef": 0.0}}, True),
        ({"method": "ppo", "kl": {"place": "loss"}}, False),  # values come from the same pass
        ({"method": "ppo", "kl": {"place": "loss"}, "critic": "separate"}, True),
        ({"method": "grpo", "trainable_layers": 1}, False),  # the reference is a branch of it
    ],
)
def test_when_the_policy_need_not_score(fields: dict[str, Any], expected: bool) -> None:
    assert step_scores.applies(PPOConfig(**fields)) is expected
