"""Algorithms of a user's own: the built-ins pass the checks that these must pass, and each mistake is named."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from xray_runtime.algorithms.checking import advantage_reads, check_advantages, check_loss, loss_reads
from xray_runtime.algorithms.estimators import ESTIMATORS, AdvantageInputs, _compared, estimate
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


def tried_rollouts() -> list[AdvantageInputs]:
    """What an estimator is tried on."""
    found: list[AdvantageInputs] = []
    check_advantages(lambda r: (found.append(r), r.scores)[1])
    return found


def tried_tokens() -> PolicyLossInputs:
    """What a loss is tried on."""
    found: list[PolicyLossInputs] = []
    check_loss(lambda t: (found.append(t), t.logprobs)[1], gradient=False)
    return found[0]


def test_estimators_are_tried_on_a_rollout_that_could_be() -> None:
    plain, padded, moved = tried_rollouts()
    lengths, groups = [4, 1, 3, 4, 2, 3, 3, 4], [0, 0, 1, 1, 2, 2, 3, 3]
    versions = [[(4 * row + place) % 3 for place in range(4)] for row in range(8)]
    # Tokens of an environment inside the first reply, which so has two turns.
    mask = [[place < n for place in range(4)] for n in lengths]
    assert mask[0].pop(1)
    mask[0].insert(1, False)
    assert plain.mask.tolist() == mask
    assert plain.turns.tolist() == [[0, 0, 1, 1]] + [[0] * 4] * 7
    assert (plain.groups.tolist(), plain.versions.tolist()) == (groups, versions)
    assert (plain.gamma, plain.gae_lambda, plain.bootstrap_values.tolist()) == (0.9, 0.8, [0.0] * 8)
    torch.testing.assert_close(plain.scores, plain.rewards.sum(1))
    logprobs = plain.old_logprobs, plain.rollout_logprobs, plain.ref_logprobs
    for of_tokens in (*logprobs, plain.rewards, plain.values):
        assert not of_tokens[~plain.mask].any()
        assert of_tokens[plain.mask].unique().numel() == 23
    assert all((x[plain.mask] < -0.5).all() for x in logprobs)
    assert (plain.sources.shape, plain.source_weights.shape) == ((8, 2), (2,))
    assert (plain.source_weights > 0).all()
    level, other = plain.column("level"), plain.column("other")
    assert len({*level.tolist(), *other.tolist()}) == 16
    of_replies = plain.scores, plain.bootstrap_values, plain.sources, plain.source_weights, level
    assert {x.dtype for x in (*logprobs, plain.rewards, plain.values, *of_replies)} == {torch.float64}
    assert {x.dtype for x in (plain.groups, plain.versions, plain.turns)} == {torch.int64}
    # The same in every call.
    again = tried_rollouts()[0]
    assert torch.equal(again.rewards, plain.rewards)
    assert torch.equal(again.column("level"), level)
    # Padded behind, and in another order, with all that belongs to a reply.
    assert padded.mask.shape == padded.rewards.shape == padded.rollout_logprobs.shape == padded.turns.shape
    assert torch.equal(padded.rollout_logprobs[:, :4], plain.rollout_logprobs)
    assert not padded.rollout_logprobs[:, 4:].any()
    assert torch.equal(padded.versions[:, :4], plain.versions)
    order = [3, 0, 6, 1, 7, 5, 2, 4]
    for name in ("scores", "groups", "versions", "sources", "turns", "ref_logprobs"):
        assert torch.equal(getattr(moved, name), getattr(plain, name)[order])
    assert torch.equal(moved.column("level"), level[order])
    assert torch.equal(moved.source_weights, plain.source_weights)


def test_losses_are_tried_on_tokens_that_could_be() -> None:
    tokens = tried_tokens()
    replies = [0] * 4 + [1] + [2] * 3 + [3] * 4 + [4] * 2 + [5] * 3 + [6] * 3 + [7] * 4
    assert tokens.replies is not None
    assert tokens.replies.tolist() == replies
    assert tokens.mask.tolist() == [1.0, 0.0] + [1.0] * 22
    assert tokens.groups.tolist() == [reply // 2 for reply in replies]
    places = [sum(other == reply for other in replies[:n]) for n, reply in enumerate(replies)]
    assert tokens.versions.tolist() == [(4 * reply + place) % 3 for reply, place in zip(replies, places, strict=True)]
    assert tokens.turns.tolist() == [0, 0, 1, 1] + [0] * 20
    assert (tokens.clip_range, tokens.clip_range_high, tokens.dual_clip) == (0.2, 0.25, 3.0)
    columns = tokens.logprobs, tokens.old_logprobs, tokens.rollout_logprobs, tokens.ref_logprobs
    assert all(bool((x < 0).all()) and x.unique().numel() == 24 for x in columns)
    # Ratios as in training.
    assert all(0.1 < float((x - tokens.old_logprobs).abs().max()) < 0.5 for x in (columns[0], *columns[2:]))
    level = tokens.column("level")
    assert level.tolist() == [tried_rollouts()[0].column("level")[reply] for reply in replies]
    assert {x.dtype for x in (*columns, tokens.advantages, tokens.mask, level)} == {torch.float64}
    assert {x.dtype for x in (tokens.groups, tokens.versions, tokens.turns)} == {torch.int64}
    assert torch.equal(tried_tokens().logprobs, tokens.logprobs)


def test_what_is_of_a_whole_reply_may_be_read_anywhere() -> None:
    """Also at a token that the policy did not choose; of its log-probabilities only the generator's own are not."""

    def last(tokens: PolicyLossInputs, x: Tensor) -> Tensor:
        assert tokens.replies is not None
        return x.new_zeros(8).scatter_reduce(0, tokens.replies, x, "amin")[tokens.replies]

    check_loss(lambda t: t.logprobs * last(t, t.versions.double()))
    with pytest.raises(ValueError, match=r"^loss: it depends on tokens that the policy did not choose"):
        check_loss(lambda t: t.logprobs + last(t, t.rollout_logprobs))


@pytest.mark.parametrize("call", range(11))
def test_what_is_not_finite_is_named_in_every_call(call: int) -> None:
    """Of all tokens, of each of eight replies, with other tokens beside them, and of the gradient."""
    calls = iter(range(1000))

    def fails(tokens: PolicyLossInputs) -> Tensor:
        broken = next(calls) == call
        return torch.where(torch.arange(len(tokens.logprobs)) < broken, torch.inf, tokens.logprobs)

    said = "loss: mine returned 1 numbers that are not finite"
    said = said if call < 10 else rf"loss: the gradient of mine is not that of finite differences \({said}\)"
    with pytest.raises(ValueError, match=f"^{said}$"):
        check_loss(fails, "mine")


@pytest.mark.parametrize("call", range(3))
def test_advantages_that_are_not_finite_are_named_in_every_call(call: int) -> None:
    calls = iter(range(3))
    with pytest.raises(ValueError, match=r"^advantages: mine returned 23 numbers that are not finite$"):
        check_advantages(lambda r: r.scores / (next(calls) != call), "mine")


@pytest.mark.parametrize(("slope", "off"), [(1.0, 0.3), (1.0, 5e-4), (0.0, 5e-6)])
def test_a_gradient_that_is_a_little_off(slope: float, off: float) -> None:
    """By much less than 1, by less than a thousandth of it, and by less than 1e-5."""
    with pytest.raises(ValueError, match=r"^loss: the gradient of it is not that of finite differences"):
        check_loss(lambda t: slope * t.logprobs + off * t.logprobs.detach())


@pytest.mark.parametrize(("worth", "share"), [(1.0, 1e-6), (0.0, 1e-8)])
def test_advantages_that_depend_on_padding_a_little(worth: float, share: float) -> None:
    with pytest.raises(ValueError, match=r"^advantages: it depends on padding"):
        check_advantages(lambda r: torch.full_like(r.scores, worth) + share * r.mask.double().mean())


def test_reads_are_named() -> None:
    assert loss_reads(lambda t: t.rollout_log_ratio * t.column("level")) == {"rollout_logprobs", "column level"}
    assert advantage_reads(lambda r: r.scores * (r.versions * r.mask).sum(-1)) == {"versions"}


@pytest.mark.parametrize(
    ("baseline", "expected"), [("grpo", [0.7071068, 0.0, -0.7071068]), ("dr_grpo", [2, 0, -2]), ("rloo", [4, 0, -4])]
)
def test_built_in_estimators_compare_the_scores_of_a_group(baseline: Any, expected: list[float]) -> None:
    inputs = rollout([5.0, 9.0, 1.0], [0, 1, 0], [1, 3, 2])
    for estimator in (ESTIMATORS[baseline], _compared(baseline)):
        found = estimator(inputs)
        assert isinstance(found, Tensor)
        assert found.tolist() == pytest.approx(expected, abs=1e-7)


def test_advantages_are_of_the_type_of_the_values() -> None:
    advantages, returns = estimate(lambda r: r.scores.float(), rollout([0.5], [0], [2]), "mine")
    assert advantages.dtype == returns.dtype == torch.float64
