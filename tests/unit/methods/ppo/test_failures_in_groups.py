"""A group of eight of which seven fail: failures do not vote in its baseline, whatever was to score it.

A peer once took 1,172 of 1,280 failed episodes as rewards of 0 (NeMo-RL #4061). The one reply that is left would have
an advantage of 2.4748737 over seven zeros: μ = ⅛, σ² = (⅞² + 7 · ⅛²) / 7 = ⅛, (1 − ⅛) / √⅛. Alone, it teaches nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.methods.ppo import played_agents, played_environments, sample_environments
from tests.unit.methods.ppo.loop import World
from tests.unit.methods.ppo.parts import Columns, typed
from tests.unit.methods.ppo.recorder import FakeRecorder
from tests.unit.methods.ppo.sources import sources
from xray_runtime.algorithms.rewards import weighted_sum
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.experience import Experience, build_experience
from xray_runtime.methods.ppo.functions import RowFacts
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.rewards.config import reward_term
from xray_runtime.rewards.verifier_config import RegexVerifier

LEFT, OTHERS = 2.4748737, -0.3535534
"""Advantages of the one right reply of eight, and of the others."""
GROUPS: dict[str, Any] = {"prompts_per_iteration": 2, "samples_per_prompt": 8, "minibatch_size": 16}
ONE_RIGHT = ["right", *["wrong"] * 7]


def experience(rewards: torch.Tensor, **fields: Any) -> Experience:
    """That of replies of one token to two prompts, all of whose log-probabilities are −1."""
    given: dict[str, Any] = GROUPS | {"method": "grpo", "max_new_tokens": 4, "reward_scaling": "none"} | fields
    ones = Ragged.of([[-1.0]] * 16, np.float32)
    rows = TextBatch.of([[5, 9]] * 8 + [[5, 8]] * 8, [[number] for number in range(10, 26)]).columns()
    rollout: Columns = {"rollout_logprobs": ones, "ended": np.ones(16, bool)}
    scores: Columns = {"logprobs": ones, "ref_logprobs": ones}
    config, facts = PPOStageConfig(**given), RowFacts(sources={"f": rewards}, weights={"f": 1.0})
    parts = typed(rows | {"id": np.arange(16)}, rollout, scores)
    return build_experience(config, *parts, rewards, 0.0, facts=facts)


def by_a_function() -> torch.Tensor:
    """Rewards of a group of which a function scores one reply, and of one in which it scores all."""

    def judge(prompts: list[str], replies: list[str]) -> list[float | None]:
        return [None if reply == "lost" else float(reply == "right") for reply in replies]

    found = sources(reward_term(function="judge"), judge=judge)
    return rewards_of(found, ["right", *["lost"] * 7, *ONE_RIGHT], {})


def by_a_verifier() -> torch.Tensor:
    """The same of a verifier, which cannot score a row without its column."""
    found = sources(reward_term(verifier=RegexVerifier(pattern="right|wrong", column="answer")))
    answers = ["right", *[None] * 7, *["right"] * 8]
    return rewards_of(found, ONE_RIGHT * 2, {"answer": answers})


def rewards_of(found: Any, replies: list[str], columns: dict[str, list[Any]]) -> torch.Tensor:
    prompts = [[{"role": "user", "content": "p"}]] * len(replies)
    return weighted_sum(found.scores([], replies=replies, prompts=prompts, columns=columns), found.weights)


@pytest.mark.parametrize("rewards", [by_a_function, by_a_verifier])
@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", "dppo_tv", "sapo", "icepop"])
def test_failed_scores_do_not_vote(rewards: Any, method: str) -> None:
    given = rewards()
    assert given.isnan().tolist() == [False, *[True] * 7, *[False] * 8]
    made = experience(given, method=method, resample_rounds=0, overlong_buffer=None)
    assert made.rows.id.tolist() == [0, *range(8, 16)]
    assert made.rows.advantages.values == pytest.approx([0.0, LEFT, *[OTHERS] * 7], abs=1e-6)
    # Had they voted, the first would be as the right one of the other group.
    voted = experience(given.nan_to_num(nan=0.0), method=method, resample_rounds=0, overlong_buffer=None)
    assert voted.rows.advantages.values == pytest.approx([LEFT, *[OTHERS] * 7] * 2, abs=1e-6)


def test_what_is_left_of_a_group_is_compared_by_itself() -> None:
    # Five of eight fail: [1, 0, 1] has μ = ⅔ and σ = .5773503.
    rewards = torch.tensor([1.0, 0.0, 1.0, *[math.nan] * 5, 1.0, *[0.0] * 7])
    made = experience(rewards)
    assert made.rows.advantages.values[:3] == pytest.approx([0.5773503, -1.1547005, 0.5773503], abs=1e-6)
    rloo = experience(rewards, method="rloo", samples_per_prompt=8, kl={"coef": 0.0})
    assert rloo.rows.advantages.values[:3] == pytest.approx([0.5, -1.0, 0.5])
    decoupled = experience(rewards, method="gdpo", whiten_advantages=False)
    assert decoupled.rows.advantages.values == pytest.approx(made.rows.advantages.values)


def learned(out: Path, world: World, recorder: FakeRecorder) -> None:
    """Seven of the first group's episodes have no reward, and the update had neither them nor their zeros."""
    table = read_shard(shard_path(out / "ledger", 0)).table
    failed = [reward is None for reward in table["reward"].to_pylist()]
    assert sum(failed) == recorder.points[0]["reward/failed"] == 7
    assert [trained == 0 for trained in table["times_trained"].to_pylist()] == failed
    [(_, rows, *_)] = world.batches
    assert len(rows) == len(failed) - 7


def test_failed_episodes_of_an_environment_do_not_vote(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of eight by itself: what is left of it teaches nothing."""
    monkeypatch.setenv(sample_environments.CLAIMED, str(tmp_path))
    fields = GROUPS | {"advantages": "grpo", "max_failed": 0.5, "epochs": 1, "kl": {"coef": 0.0}}
    out = tmp_path / "out"
    world, recorder = played_environments.played(inputs, out, "SevenOfEightFail", **fields)
    learned(out, world, recorder)
    [(_, rows, *_)] = world.batches
    # The rewards of all that ended are equal: 1.5.
    assert recorder.points[0]["reward/mean"] == 1.5
    assert not rows.advantages.values.any()


def test_failed_episodes_of_agents_do_not_vote(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine of sixteen are left, with rewards of 1 and 0 by turns."""
    monkeypatch.setenv(sample_environments.CLAIMED, str(tmp_path))
    fields = GROUPS | {"advantages": "dr_grpo", "max_failed": 0.5, "epochs": 1}
    out = tmp_path / "out"
    world, recorder, table = played_agents.played(inputs, out, "seven_of_eight_fail", **fields)
    learned(out, world, recorder)
    rewards = np.array([np.nan if reward is None else reward for reward in table["reward"].to_pylist()])
    expected = np.concatenate([group - np.nanmean(group) for group in (rewards[:8], rewards[8:])])
    rows = [row[0] if len(row) else np.nan for row in table["advantages"].to_pylist()]
    assert rows == pytest.approx(expected.tolist(), abs=1e-6, nan_ok=True)
