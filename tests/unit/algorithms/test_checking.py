"""Algorithms of a user's own: the built-ins pass the checks that these must pass, and each mistake is named."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from xray_runtime.algorithms.checking import check_advantages, check_loss
from xray_runtime.algorithms.estimators import ESTIMATORS, AdvantageInputs, estimate
from xray_runtime.algorithms.losses import POLICY_LOSSES, PolicyLossInputs, TokenLoss, policy_loss

max_rl = importlib.import_module("examples.lessons.04_own_algorithm").max_rl


def rollout(scores: list[float], groups: list[int], lengths: list[int]) -> AdvantageInputs:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    worth = torch.tensor(scores, dtype=torch.float64)
    rewards = nothing.clone()
    rewards[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = worth
    return AdvantageInputs(worth, rewards, mask, torch.tensor(groups), nothing, nothing[:, 0], 1.0, 1.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_built_in_estimators_pass(name: str) -> None:
    check_advantages(ESTIMATORS[name], name)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_built_in_losses_pass(name: str) -> None:
    # CISPO's weight has no gradient by design.
    check_loss(POLICY_LOSSES[name], name, gradient=name != "cispo")


def test_a_stopped_gradient_differs_from_finite_differences() -> None:
    with pytest.raises(ValueError, match="the gradient of cispo is not that of finite differences"):
        check_loss(POLICY_LOSSES["cispo"], "cispo")


def test_max_rl_against_its_formula() -> None:
    check_advantages(max_rl, "max_rl")
    # μ = ¼: 1 → (1 − ¼) / ¼ = 3, 0 → −1. Nothing solved: 0. All solved: (1 − 1) / 1 = 0.
    scores = [1, 0, 0, 0] + [0] * 4 + [1] * 4
    found = max_rl(rollout([float(s) for s in scores], [0] * 4 + [1] * 4 + [2] * 4, [1] * 12))
    assert found.tolist() == [3.0, -1.0, -1.0, -1.0] + [0.0] * 8


def test_max_rl_weighs_a_rare_success_more_than_grpo_does() -> None:
    rare = rollout([1.0] + [0.0] * 7 + [1.0] * 7 + [0.0], [0] * 8 + [1] * 8, [1] * 16)
    ours, grpo = max_rl(rare), ESTIMATORS["grpo"](rare)
    assert isinstance(grpo, Tensor)
    # Both succeed: in a group of μ = ⅛ MaxRL gives 7, in one of ⅞ it gives 1/7; GRPO's ratio is √7 to 1/√7.
    assert float(ours[0] / ours[8]) == pytest.approx(49.0)
    assert float(grpo[0] / grpo[8]) == pytest.approx(7.0)


def test_advantages_of_replies_count_for_their_tokens() -> None:
    advantages, returns = estimate(lambda r: r.scores, rollout([2.0, 3.0], [0, 1], [1, 2]), "mine")
    assert advantages.tolist() == returns.tolist() == [[2.0, 0.0], [3.0, 3.0]]


def test_a_pair_is_advantages_and_returns() -> None:
    advantages, returns = estimate(lambda r: (r.rewards, 2 * r.rewards), rollout([2.0], [0], [2]), "mine")
    assert (advantages.tolist(), returns.tolist()) == ([[0.0, 2.0]], [[0.0, 4.0]])


def wrong_advantages(found: Any) -> Callable[[AdvantageInputs], Any]:
    return lambda rollout: found


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (lambda r: r.scores[:3], r"mine returned \[3\]: it must return a tensor \[8\] or \[8, 4\]"),
        (lambda r: r.scores.tolist(), "mine returned list"),
        (wrong_advantages(None), "mine returned NoneType"),
        (lambda r: (r.scores, r.scores, r.scores), "a pair of them"),
        (lambda r: r.scores / 0, "mine returned 23 numbers that are not finite"),
        (lambda r: r.scores - r.rewards.mean(), "depends on padding"),
        (lambda r: r.scores - r.scores[0], "depends on the order of the replies"),
        (lambda r: r.scores.cumsum(0), "depends on the order of the replies"),
    ],
)
def test_wrong_advantages_are_named(estimator: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_advantages(estimator, "mine")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda t: (t.advantages * t.logprobs).sum(), r"mine returned \[\]: it must return the loss of each token"),
        (lambda t: t.logprobs / 0, "not finite"),
        (lambda t: -(t.advantages - t.advantages.mean()) * t.logprobs, "couples tokens of two replies"),
        (lambda t: -t.advantages * t.logprobs.cumsum(0), "couples tokens of two replies"),
        (lambda t: -t.advantages * t.logprobs.detach() * t.logprobs, "is not that of finite differences"),
    ],
)
def test_wrong_losses_are_named(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss(loss, "mine")


def test_a_loss_must_not_read_what_the_policy_did_not_choose() -> None:
    def mean_of_reply(tokens: PolicyLossInputs) -> Tensor:
        assert tokens.replies is not None
        size = int(tokens.replies.max()) + 1
        sums = tokens.logprobs.new_zeros(size).index_add(0, tokens.replies, tokens.logprobs)
        return -tokens.advantages * sums[tokens.replies]

    with pytest.raises(ValueError, match="depends on tokens that the policy did not choose"):
        check_loss(mean_of_reply, "mine")
    check_loss(lambda t: mean_of_reply(replace(t, logprobs=t.logprobs * t.mask)), "mine")


def test_a_function_trains_as_the_built_in_it_copies() -> None:
    def reinforce(tokens: PolicyLossInputs) -> Tensor:
        return -tokens.log_ratio.exp() * tokens.advantages

    given = [torch.tensor(row, dtype=torch.float64) for row in ([-1.0, -2.0], [-1.1, -1.9], [1.0, -1.0], [1.0, 1.0])]
    ours, stats = policy_loss(*given, clip_range=0.2, dual_clip=None, loss=reinforce)
    # −e^{0.1} + e^{−0.1}, and none is clipped.
    assert float(ours) == pytest.approx(-0.20033350003968784, abs=1e-12)
    assert float(stats["clip_count"]) == float(stats["dual_clip_count"]) == 0.0
    counted, stats = policy_loss(
        *given, clip_range=0.2, dual_clip=None, loss=lambda t: TokenLoss(reinforce(t), t.logprobs < -1.5)
    )
    assert (float(counted), float(stats["clip_count"])) == (float(ours), 1.0)
