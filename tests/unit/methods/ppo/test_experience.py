"""From scores to what an update needs, on one rollout small enough to compute by hand.

    row 0  ended after 2 tokens      logp − ref = ½, −1        values 1, 2         score 2
    row 1  cut off after 3 tokens    logp − ref = 0, 1, −1     values 0, 1, −1, final value 4     score 5

With γ = λ = ½ and a penalty of ½ a nat every number below is a dyadic fraction, exact in float32.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.unit.methods.ppo.parts import Columns, typed
from xray_runtime.algorithms.rewards import RunningMoments, SourceScores
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.findings import policy_findings
from xray_runtime.methods.ppo.config import KLConfig, PPOStageConfig
from xray_runtime.methods.ppo.experience import Experience, build_experience, scaled_rewards
from xray_runtime.methods.ppo.metrics import reward_metrics

NAN = float("nan")
STATISTICS = ("mean", "std", "min", "max", "failed")
KL_COEF = 0.5
PLAIN: dict[str, Any] = {
    "gamma": 0.5,
    "gae_lambda": 0.5,
    "whiten_advantages": False,
    "reward_scaling": "none",
    "reward_clip": None,
}
LENGTHS = (2, 3)
SCORES = (2.0, 5.0)
BOOTSTRAPPED = [[-0.125, 0.5], [0.21875, -1.125, 3.5]]
"""Advantages: A₁ = 2.5 − 2 = 0.5, A₀ = (−0.25 + 2/2 − 1) + 0.5/4 = −0.125 of row 0, its rewards being −0.25 and 2 + ½;
A₂ = (0.5 + 4/2 + 1) = 3.5, A₁ = (−0.5 − 1/2 − 1) + 3.5/4 = −1.125, A₀ = (0 + 1/2 − 0) − 1.125/4 = 0.21875 of row 1."""


def f32(x: Any) -> np.ndarray:
    return np.array(x, dtype=np.float32)


def ragged(rows: Any) -> Ragged:
    return Ragged.of(rows, np.float32)


def inputs(**changes: Any) -> tuple[Columns, Columns, Columns]:
    """(rows, rollout, scores)."""
    rows = {
        "input_ids": Ragged.of([[5, 6, 7], [5, 8, 9, 10]]),
        "prompt_lengths": np.array([1, 1]),
        "id": np.arange(2),
    }
    rollout = {"rollout_logprobs": ragged([[-1, -2], [-1, -1, -1]]), "ended": np.array([True, False])}
    scores = {
        "logprobs": ragged([[-1, -2], [-1, -1, -1]]),
        "ref_logprobs": ragged([[-1.5, -1], [-1, -2, 0]]),
        "values": ragged([[1, 2], [0, 1, -1]]),
        "final_values": f32([9, 4]),
    }
    for part in (rollout, scores):
        part |= {name: value for name, value in changes.items() if name in part}
    return rows, rollout, scores


def column(experience: Experience, name: str) -> list[list[float]]:
    return [row.tolist() for row in experience.rows.columns()[name]]


def build(rewards: Sequence[float] = SCORES, data: Any = None, **options: Any) -> Experience:
    config = PPOStageConfig(**(PLAIN | options))
    return build_experience(config, *typed(*(data or inputs())), torch.tensor(rewards), KL_COEF)


class Sources:
    """As `RewardSources`: a reward model whose scores have mean 1 and deviation 2, and a function that counts half."""

    weights: ClassVar = {"rewards.0": 1.0, "mine:f": 0.5}
    moments: ClassVar = {"rewards.0": (1.0, 2.0)}

    def scaled(self, scores: SourceScores) -> torch.Tensor:
        # Written out: (m − 1) / 2 + f / 2.
        return (scores.values["rewards.0"] - 1.0) / 2.0 + scores.values["mine:f"] / 2.0


SOURCES: Any = Sources()


def scores(model: Sequence[float] = SCORES, function: Sequence[float] = (0.0, 0.0)) -> SourceScores:
    everywhere = torch.ones(len(model), dtype=torch.bool)
    values = {"rewards.0": torch.tensor(model), "mine:f": torch.tensor(function)}
    return SourceScores(values, dict.fromkeys(values, everywhere))


def scaled(sources: SourceScores, moments: RunningMoments | None = None, **options: Any) -> list[float]:
    config = PPOStageConfig(**(PLAIN | options))
    return scaled_rewards(config, SOURCES, sources, moments or RunningMoments()).tolist()


def test_a_cut_reply_is_bootstrapped_and_earns_no_score() -> None:
    experience = build(truncated="bootstrap")
    assert column(experience, "advantages") == BOOTSTRAPPED
    # Returns are advantages plus values.
    assert column(experience, "returns") == [[0.875, 2.5], [0.21875, -0.125, 2.5]]
    assert experience.num_tokens == 5
    # The final value of a reply that ended (9) is worth nothing: nothing comes after it.
    nothing_after = build(truncated="bootstrap", data=inputs(final_values=f32([-3, 4])))
    assert column(nothing_after, "advantages") == BOOTSTRAPPED
    # Nor is the score of one that did not.
    assert column(build(rewards=[2.0, -100.0], truncated="bootstrap"), "advantages") == BOOTSTRAPPED


def test_a_cut_reply_is_penalized_and_has_no_future() -> None:
    experience = build(truncated="penalize", truncation_penalty=1.0)
    # Row 1: last reward 0.5 + 5 − 1 = 4.5. A₂ = 4.5 + 1 = 5.5, A₁ = −2 + 5.5/4 = −0.625, A₀ = 0.5 − 0.625/4 = 0.34375.
    assert column(experience, "advantages") == [BOOTSTRAPPED[0], [0.34375, -0.625, 5.5]]
    assert column(experience, "returns") == [[0.875, 2.5], [0.34375, 0.375, 4.5]]
    assert experience.metrics["reward/mean"] == 3.0  # (2 + 4) / 2
    # Its final value counts nothing here.
    same = build(truncated="penalize", data=inputs(final_values=f32([9, -60])))
    assert column(same, "advantages") == column(experience, "advantages")


def test_a_cut_reply_has_no_more_than_the_worst_that_ended() -> None:
    # Row 0 ended with 2; row 1 was cut, with 5 and with 1.
    assert build(rewards=[2.0, 5.0]).metrics["reward/mean"] == 2.0
    assert build(rewards=[2.0, 1.0]).metrics["reward/mean"] == 1.5
    # None ended: there is nothing to tell them apart by.
    cut = inputs(ended=np.array([False, False]))
    assert build(rewards=[2.0, 5.0], data=cut).metrics["reward/mean"] == 2.0


def test_the_score_falls_on_the_last_token_and_the_penalty_on_each() -> None:
    """γ = λ = 1 without a critic: an advantage is what is still to come."""
    data = inputs(values=ragged([[0, 0], [0, 0, 0]]), ended=np.array([True, True]))
    experience = build(data=data, gamma=1.0, gae_lambda=1.0)
    # Row 0: rewards −0.25, 2.5. Row 1: 0, −0.5, 5.5.
    assert column(experience, "advantages") == [[2.25, 2.5], [5.0, 5.0, 5.5]]


@pytest.mark.parametrize(
    ("estimator", "penalty"),
    # r = ½: k1 = r, k2 = r²/2, k3 = e^−½ − 1 + ½ = 0.1065307
    [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065307)],
)
def test_each_estimator_penalizes_in_its_way(estimator: Any, penalty: float) -> None:
    experience = build(kl=KLConfig(estimator=estimator), gae_lambda=0.0)
    # λ = 0 is TD: A₀ = −½ · penalty + γ · 2 − 1 = −½ · penalty.
    assert column(experience, "advantages")[0][0] == pytest.approx(-0.5 * penalty, abs=1e-6)
    # What is reported does not depend on what is penalized.
    assert experience.metrics["kl/reference_k1"] == build().metrics["kl/reference_k1"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Scores 2 and 5; by the reward model's mean 1 and deviation 2; by their own mean 3.5 and deviation 1.5.
        ({"reward_scaling": "none"}, [2.0, 5.0]),
        ({"reward_scaling": "none", "reward_clip": 3.0}, [2.0, 3.0]),
        ({"reward_scaling": "reward_model"}, [0.5, 2.0]),
        ({"reward_scaling": "reward_model", "reward_clip": 1.5}, [0.5, 1.5]),
        ({"reward_scaling": "running"}, [-1.0, 1.0]),
        ({"reward_scaling": "running", "reward_clip": 0.25}, [-0.25, 0.25]),
    ],
)
def test_scaling_and_clipping(options: dict[str, Any], expected: list[float]) -> None:
    assert scaled(scores(), **options) == expected


def test_sources_are_weighed_before_anything_else() -> None:
    both = scores(function=[4.0, -2.0])
    # 2 + 4/2 and 5 − 2/2: 4 and 4. By the reward model's own scale, 0.5 + 2 and 2 − 1.
    assert scaled(both, reward_scaling="none") == [4.0, 4.0]
    assert scaled(both, reward_scaling="reward_model") == [2.5, 1.0]


def test_running_moments_remember_earlier_rollouts() -> None:
    moments = RunningMoments()
    scaled(scores(), moments, reward_scaling="running")
    assert (moments.count, moments.mean, moments.std) == (2, 3.5, 1.5)
    second = scaled(scores([8.0, 9.0]), moments, reward_scaling="running")
    # Over 2, 5, 8, 9: mean 6, variance (16 + 1 + 4 + 9) / 4 = 7.5. Now (8 − 6) and (9 − 6) over its root.
    assert (moments.count, moments.mean, moments.std**2) == (4, 6.0, pytest.approx(7.5))
    assert second == pytest.approx([2.0 / math.sqrt(7.5), 3.0 / math.sqrt(7.5)])
    # Other ways of scaling leave the moments alone.
    scaled(scores(), moments, reward_scaling="none")
    scaled(scores(), moments, reward_scaling="reward_model")
    assert moments.count == 4


def test_the_penalty_of_a_cut_comes_after_the_clip() -> None:
    """It must not be clipped away."""
    clipped = scaled(scores(), reward_scaling="none", reward_clip=3.0)
    experience = build(clipped, truncated="penalize", truncation_penalty=4.0)
    # Rewards 2 and 3 − 4. A of a last token = reward − penalty − value: + 0.5 − 2 in row 0, + 0.5 + 1 in row 1.
    assert column(experience, "advantages")[0][1] == 2.0 + 0.5 - 2.0
    assert column(experience, "advantages")[1][2] == -1.0 + 0.5 + 1.0
    assert experience.metrics["reward/mean"] == 0.5
    assert experience.metrics["reward/std"] == 1.5


def test_each_source_is_reported_raw() -> None:
    assert reward_metrics(SOURCES, scores(function=[4.0, -2.0])) == {
        "reward/raw": 4.0,
        "reward/failed": 0.0,
        **{f"reward/source/rewards.0/{k}": v for k, v in zip(STATISTICS, (3.5, 1.5, 2.0, 5.0, 0.0), strict=True)},
        # MLflow takes no colon in the name of a metric.
        **{f"reward/source/mine.f/{k}": v for k, v in zip(STATISTICS, (1.0, 3.0, -2.0, 4.0, 0.0), strict=True)},
    }
    # Of those that failed nothing is averaged; where all did there is nothing to report but that.
    lost = reward_metrics(SOURCES, scores([NAN, 5.0], [NAN, NAN]))
    assert lost["reward/failed"] == 2.0
    assert [lost[f"reward/source/rewards.0/{k}"] for k in STATISTICS] == [5.0, 0.0, 5.0, 5.0, 1.0]
    assert lost["reward/source/mine.f/failed"] == 2.0
    assert "reward/source/mine.f/mean" not in lost


def test_moments_are_of_the_replies_that_have_a_reward() -> None:
    moments, absent = RunningMoments(), RunningMoments()
    found = scaled(scores([2.0, NAN, 5.0], [0.0] * 3), moments, reward_scaling="running")
    assert [found[0], found[2]] == scaled(scores(), absent, reward_scaling="running") == [-1.0, 1.0]
    assert math.isnan(found[1])
    assert (moments, moments.count) == (absent, 2)


@pytest.mark.parametrize("advantages", ["gae", "rloo", "grpo", "dr_grpo", "reinforce++"])
@pytest.mark.parametrize("whiten", [True, False])
def test_a_reply_without_a_reward_is_as_if_it_was_absent(advantages: Any, whiten: bool) -> None:
    """Two groups of three, of each of which one reply has no reward, are two groups of two."""
    fields: dict[str, Any] = {"advantages": advantages, "whiten_advantages": whiten, "truncated": "penalize"}
    fields |= {"prompts_per_iteration": 2, "minibatch_size": 2, "overlong_buffer": 2}
    lengths, rewards, left = [2, 4, 3, 1, 2, 3], [1.0, NAN, 0.5, NAN, -2.0, 0.75], [0, 2, 4, 5]
    tokens = [[0.1 * (i + j) for j in range(n)] for i, n in enumerate(lengths)]

    def data(index: list[int]) -> tuple[Columns, Columns, Columns]:
        one = ragged([tokens[i] for i in index])
        rows = {
            "input_ids": Ragged.of([list(range(lengths[i] + 1)) for i in index]),
            "prompt_lengths": np.ones(len(index), np.int64),
            "id": np.array(index),
        }
        rollout = {"rollout_logprobs": one, "ended": np.array([i % 2 == 0 for i in index])}
        off = [Ragged(one.values * f32(scale), one.offsets) for scale in (0.9, 0.8, 0.7)]
        scored = dict(zip(("logprobs", "ref_logprobs", "values"), off, strict=True))
        return rows, rollout, scored | {"final_values": np.zeros(len(index), np.float32)}

    found = build(rewards, data(list(range(6))), samples_per_prompt=3, **fields)
    absent = build([rewards[i] for i in left], data(left), samples_per_prompt=2, **fields)
    assert found.rows.id.tolist() == left
    assert (found.num_tokens, found.metrics) == (absent.num_tokens, absent.metrics)
    for name in ("advantages", "weights", "old_logprobs"):
        np.testing.assert_array_equal(found.rows.columns()[name].values, absent.rows.columns()[name].values)
    assert found.rows.advantages.values.any()
    assert all(
        np.isfinite(column.values).all() for name, column in found.rows.columns().items() if isinstance(column, Ragged)
    )


def test_one_of_four_failed() -> None:
    # Of [1, NaN, 0, 1] RLOO leaves ½, −1, ½: each score minus the mean of the two others.
    one = ragged([[-1.0]] * 4)
    rows = {"input_ids": Ragged.of([[5, 6]] * 4), "prompt_lengths": np.ones(4, np.int64), "id": np.arange(4)}
    data = (
        rows,
        {"rollout_logprobs": one, "ended": np.ones(4, bool)},
        {"logprobs": one, "ref_logprobs": one},
    )
    experience = build(
        [1.0, NAN, 0.0, 1.0], data, advantages="rloo", samples_per_prompt=4, truncated="penalize", max_new_tokens=2
    )
    assert column(experience, "advantages") == [[0.5], [-1.0], [0.5]]
    assert experience.rows.id.tolist() == [0, 2, 3]
    # Of a whole group nothing is left: it is no group.
    lost = build([NAN, NAN, 0.0, 1.0], data, advantages="rloo", samples_per_prompt=2, truncated="penalize")
    assert column(lost, "advantages") == [[-1.0], [1.0]]
    assert lost.metrics["rollout/tied_groups"] == 0.0


def test_whitening_is_over_the_valid_tokens_of_the_whole_rollout() -> None:
    tokens = [a for row in BOOTSTRAPPED for a in row]
    mean, deviation = statistics.fmean(tokens), statistics.pstdev(tokens)
    experience = build(whiten_advantages=True)
    assert experience.rows.advantages.values.tolist() == pytest.approx(
        [(a - mean) / deviation for a in tokens], abs=1e-6
    )
    assert experience.rows.advantages.lengths.tolist() == list(LENGTHS)
    # Returns are what the critic learns from: they stay in units of reward.
    assert column(experience, "returns") == column(build(), "returns")


@pytest.mark.parametrize(
    ("correction", "weights"),
    [("truncate", [2, 1, 1, 1, 1]), ("mask", [0, 1, 1, 1, 1]), ("none", [1, 1, 1, 1, 1])],
)
def test_the_generators_other_kernels_are_made_up_for(correction: Any, weights: list[float]) -> None:
    # The trainer thinks the first token 4 times as likely as the generator did; the cap is 2.
    data = inputs(rollout_logprobs=ragged([[-1 - math.log(4), -2], [-1, -1, -1]]))
    experience = build(data=data, importance_correction=correction, importance_cap=2.0)
    assert experience.rows.weights.values.tolist() == pytest.approx(weights, abs=1e-6)
    metrics = experience.metrics
    assert metrics["rollout/mismatch"] == pytest.approx(math.log(4) / 5, abs=1e-6)
    assert metrics["rollout/mismatch_max"] == pytest.approx(math.log(4), abs=1e-6)
    # (4 + 1 + 1 + 1 + 1)² / (5 · (16 + 4)) = 64 / 100
    assert metrics["rollout/effective_sample_share"] == pytest.approx(0.64, abs=1e-6)
    assert metrics["rollout/capped_share"] == pytest.approx(0.2)
    # Old log-probabilities are the trainer's own: the ratio of the update starts at 1.
    assert column(experience, "old_logprobs") == [[-1, -2], [-1, -1, -1]]


def test_a_whole_reply_can_have_one_weight() -> None:
    # As above; of two tokens, 4 times and equally likely, the mean is √4.
    data = inputs(rollout_logprobs=ragged([[-1 - math.log(4), -2], [-1, -1, -1]]))
    experience = build(data=data, importance_level="reply", importance_cap=3.0)
    assert experience.rows.weights.values.tolist() == pytest.approx([2, 2, 1, 1, 1], abs=1e-6)


def test_metrics_by_hand() -> None:
    metrics = build(truncated="bootstrap").metrics
    expected = {
        "reward/mean": 1.0,  # 2 and, cut off, 0
        "reward/std": 1.0,
        "kl/reference_k1": -0.25,  # replies of ½ − 1 and 0 + 1 − 1
        # e^−r − 1 + r: 0.1065307 + 0.7182818 and 0 + 0.3678794 + 0.7182818
        "kl/reference_k3": (0.8248125 + 1.0861612) / 2,
        "value/mean": 0.6,  # (1 + 2 + 0 + 1 − 1) / 5
        "value/return": 1.19375,  # (0.875 + 2.5 + 0.21875 − 0.125 + 2.5) / 5
        # 1 − Var(A) / Var(R), A as above
        "value/explained_variance": 1
        - statistics.pvariance([-0.125, 0.5, 0.21875, -1.125, 3.5])
        / statistics.pvariance([0.875, 2.5, 0.21875, -0.125, 2.5]),
        "rollout/length": 2.5,
        "rollout/truncated": 0.5,
        "rollout/mismatch": 0.0,
        "rollout/mismatch_max": 0.0,
        "rollout/effective_sample_share": 1.0,
        "rollout/capped_share": 0.0,
    }
    assert metrics == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("whiten", [True, False])
def test_neither_longer_replies_beside_it_nor_the_order_of_rows_shows(whiten: bool) -> None:
    plain = build(whiten_advantages=whiten)
    swapped = build(
        SCORES[::-1], data=[{n: x[np.array([1, 0])] for n, x in p.items()} for p in inputs()], whiten_advantages=whiten
    )
    for name in ("advantages", "returns", "weights"):
        for row, expected in zip(column(swapped, name)[::-1], column(plain, name), strict=True):
            assert row == pytest.approx(expected, abs=1e-6)
    assert swapped.metrics == pytest.approx(plain.metrics, abs=1e-6)


def test_objects_of_the_store_are_only_read() -> None:
    data = inputs()
    experience = build(data=data)
    for part, untouched in zip(data, inputs(), strict=True):
        for name, found in part.items():
            expected = untouched[name]
            if isinstance(found, Ragged):
                np.testing.assert_array_equal(found.offsets, expected.offsets)
                found, expected = found.values, expected.values
            np.testing.assert_array_equal(found, expected)
    given = data[0]
    assert all(experience.rows.columns()[name] is given[name] for name in given)
    made = {name: column for name, column in experience.rows.columns().items() if name not in given}
    assert set(made) == {"old_logprobs", "values", "advantages", "returns", "weights"}
    assert all(c.values.dtype == np.float32 and tuple(c.lengths) == LENGTHS for c in made.values())


def without_critic(**options: Any) -> Experience:
    """Of the replies above, both to one prompt."""
    rows, rollout, scored = inputs()
    scored = {name: column for name, column in scored.items() if "value" not in name}
    fields = {"samples_per_prompt": 2, "truncated": "penalize", "truncation_penalty": 1.0} | options
    return build(data=(rows, rollout, scored), **fields)


def test_replies_to_one_prompt_are_compared() -> None:
    # Scores 2 and 5 − 1. The KL of whole replies is ½ − 1 = −½ and 0 nats, half of which is charged: 2.25 against 4.
    in_reward = without_critic(advantages="rloo")
    assert column(in_reward, "advantages") == [[-1.75] * 2, [1.75] * 3]
    assert not {"values", "returns", "ref_logprobs"} & set(in_reward.rows.columns())
    assert not any(name.startswith("value/") for name in in_reward.metrics)
    assert in_reward.metrics["rollout/tied_groups"] == 0.0
    in_loss = without_critic(advantages="dr_grpo", kl=KLConfig(place="loss"))
    assert column(in_loss, "advantages") == [[-1.0] * 2, [1.0] * 3]
    assert column(in_loss, "ref_logprobs") == [[-1.5, -1], [-1, -2, 0]]
    tied = without_critic(rewards=[2.0, 3.0], advantages="grpo", kl=KLConfig(place="loss"))
    assert column(tied, "advantages") == [[0.0] * 2, [0.0] * 3]
    assert tied.metrics["rollout/tied_groups"] == 1.0


@pytest.mark.parametrize("reward", [0.1, 0.7, -2.7, 100.3])
def test_equal_rewards_do_not_deviate(reward: float) -> None:
    """As the summary must notice: in float32 their mean is another number than they are."""
    assert torch.full((8,), reward).std(correction=0) > 0.0
    one = ragged([[-1.0]] * 8)
    rows = {"input_ids": Ragged.of([[5, 6]] * 8), "prompt_lengths": np.ones(8, np.int64), "id": np.arange(8)}
    rollout, scored = {"rollout_logprobs": one, "ended": np.ones(8, bool)}, {"logprobs": one, "ref_logprobs": one}
    fields = {"advantages": "reinforce++", "whiten_advantages": True, "max_new_tokens": 2, "prompts_per_iteration": 8}
    experience = build([reward] * 8, (rows, rollout, scored), minibatch_size=8, **fields)
    assert experience.metrics["reward/std"] == 0.0
    assert not experience.rows.advantages.values.any()
    series = {name: [(0, value)] for name, value in experience.metrics.items()}
    assert policy_findings(series) == ["every reply had the same reward, so the policy could not learn"]


def test_equal_replies_have_one_penalty() -> None:
    """Their log-probabilities differ in the last bits by what they were computed with."""
    near = float(np.nextafter(np.float32(-0.7), np.float32(0)))
    rows = {"input_ids": Ragged.of([[5, 6]] * 3), "prompt_lengths": np.ones(3, np.int64), "id": np.arange(3)}
    rollout = {"rollout_logprobs": ragged([[-1.0]] * 3), "ended": np.ones(3, bool)}
    scored = {"logprobs": ragged([[-0.7], [near], [-0.7]]), "ref_logprobs": ragged([[-1.0]] * 3)}
    fields: dict[str, Any] = {"advantages": "grpo", "samples_per_prompt": 3, "minibatch_size": 3}
    experience = build([1.0] * 3, (rows, rollout, scored), prompts_per_iteration=2, **fields)
    assert column(experience, "advantages") == [[0.0]] * 3


def test_reinforce_takes_what_is_still_to_come() -> None:
    # Rewards: −¼, 2 + ½ of row 0; 0, −½, 4 + ½ of row 1, the KL in them. Nothing is discounted.
    plain = without_critic(advantages="reinforce++", gamma=1.0, samples_per_prompt=1)
    assert column(plain, "advantages") == [[2.25, 2.5], [4.0, 4.0, 4.5]]
    white = without_critic(advantages="reinforce++", gamma=1.0, samples_per_prompt=1, whiten_advantages=True)
    flat = [x for row in column(white, "advantages") for x in row]
    assert statistics.fmean(flat) == pytest.approx(0.0, abs=1e-6)
    assert statistics.pstdev(flat) == pytest.approx(1.0, abs=1e-6)


def test_each_turn_of_an_episode_has_its_own_reward() -> None:
    """Turns gave row 0 nothing and 2, row 1 the 1 and 2 at its ends; what it read in between is no token of its own."""
    rows, rollout, scored = inputs(ended=np.array([True, True]))
    rollout["response_mask"] = Ragged.of([[True, True], [True, False, True]], np.bool_)
    rollout["turn_rewards"] = ragged([[0, 2], [1, 0, 2]])
    fields: dict[str, Any] = {"advantages": "reinforce++", "gamma": 1.0, "kl": KLConfig(place="loss")}
    experience = build(data=(rows, rollout, scored), truncated="penalize", **fields)
    # Row 1 scored 5: the 2 that no turn gave come with its last token. An advantage is what is still to come.
    assert column(experience, "advantages") == [[2.0, 2.0], [5.0, 0.0, 4.0]]
    assert experience.num_tokens == 4
    assert experience.metrics["rollout/length"] == 2.0
    assert experience.metrics["reward/mean"] == 3.5
    assert column(experience, "response_mask") == [[True, True], [True, False, True]]


def of_method(method: Any, rewards: list[float], lengths: list[int], k1: Any = 0.0, **fields: Any) -> list[list[float]]:
    """Advantages of replies of so many tokens, each k1 nats a token from the reference."""
    off = np.broadcast_to(f32(k1), sum(lengths))
    logprobs = Ragged(np.full(sum(lengths), -2.0, np.float32), np.cumsum([0, *lengths]))
    rows = {
        "input_ids": Ragged.of([range(n + 1) for n in lengths]),
        "prompt_lengths": np.ones(len(lengths), np.int64),
        "id": np.arange(len(lengths)),
    }
    scored = {"logprobs": logprobs, "ref_logprobs": Ragged(logprobs.values - off, logprobs.offsets)}
    fields |= {"method": method, "reward_scaling": "none", "minibatch_size": 1, "max_new_tokens": 4}
    config = PPOStageConfig(**({"prompts_per_iteration": 2} | fields))
    rollout = {"rollout_logprobs": logprobs, "ended": np.ones(len(lengths), bool)}
    experience = build_experience(config, *typed(rows, rollout, scored), torch.tensor(rewards), 0.1)
    return column(experience, "advantages")


def test_reinforce_pp_in_closed_form() -> None:
    # 1 − 0.1 · (0.2 − 0.1 + 0.4), then of what is left of the KL: 0.3 and 0.4.
    [plain] = of_method("reinforce++", [1.0], [3], [0.2, -0.1, 0.4], whiten_advantages=False)
    assert plain == pytest.approx([0.95, 0.97, 0.96], abs=1e-6)
    # Tokens 1, 00, 000, 11: mean 3/8, deviation √(15/64); a long reply counts by its tokens.
    white = of_method("reinforce++", [1.0, 0.0, 0.0, 1.0], [1, 2, 3, 2])
    high, low = 1.2909944, -0.7745967
    for found, expected in zip(white, ([high], [low] * 2, [low] * 3, [high] * 2), strict=True):
        assert found == pytest.approx(expected, abs=1e-6)


def test_reinforce_pp_with_a_baseline_in_closed_form() -> None:
    fields = {"samples_per_prompt": 2}
    # Tokens ½½ −½−½ 00 00: mean 0, deviation √⅛. A group that ties stays at 0 where lengths are equal …
    even = of_method("reinforce++_baseline", [1.0, 0.0, 0.0, 0.0], [2] * 4, **fields)
    assert [row[0] for row in even] == pytest.approx([2**0.5, -(2**0.5), 0.0, 0.0], abs=1e-6)
    # … and is whitened with the others where they are not: ½ three times, −½ once, 0 four times: mean ⅛, deviation
    # √(7/64).
    uneven = of_method("reinforce++_baseline", [1.0, 0.0, 0.0, 0.0], [3, 1, 2, 2], **fields)
    assert [row[0] for row in uneven] == pytest.approx([1.1338934, -1.8898224, -0.3779645, -0.3779645], abs=1e-6)
    # All groups tie: nothing.
    assert of_method("reinforce++_baseline", [0.7, 0.7, 0.1, 0.1], [3, 1, 2, 2], **fields) == [
        [0.0] * n for n in (3, 1, 2, 2)
    ]


def test_long_replies_pay_for_their_last_tokens() -> None:
    # Of at most 4 tokens the last 2 cost up to 1: 2 tokens nothing, 3 tokens ½.
    fields: dict[str, Any] = {"overlong_buffer": 2, "max_new_tokens": 4, "kl": KLConfig(place="loss")}
    experience = without_critic(advantages="dr_grpo", **fields)
    assert column(experience, "advantages") == [[-0.75] * 2, [0.75] * 3]
