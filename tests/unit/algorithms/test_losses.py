"""Losses against literals, scalar float64 code, and the promise that no split of the batch changes the gradient."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from xray_runtime.algorithms.kl import KLEstimator
from xray_runtime.algorithms.losses import cispo_loss, gspo_loss, kl_loss, policy_loss, reply_sums, value_loss
from xray_runtime.algorithms.pairwise import pairwise_losses


def f64(x: object) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def policy_term(log_ratio: float, advantage: float, clip: float, dual: float | None) -> float:
    """One token's PPO loss by cases, not by min and max."""
    rho = math.exp(min(max(log_ratio, -20.0), 20.0))
    if advantage >= 0:
        return -advantage * rho if rho <= 1 + clip else -advantage * (1 + clip)
    if rho < 1 - clip:
        return -advantage * (1 - clip)
    return -advantage * (rho if dual is None or rho <= dual else dual)


def value_term(v: float, old: float, target: float, clip: float) -> float:
    near = old + clip if v > old + clip else old - clip if v < old - clip else v
    return max((v - target) ** 2, (near - target) ** 2) / 2


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "slope", "clipped", "dual"),
    [
        # slope: d loss / d logprob = -rho A where nothing is clipped, else 0.
        (1.0, 2.0, 3.0, -2.0, -2.0, 0, 0),
        (1.1, 2.0, 3.0, -2.2, -2.2, 0, 0),
        (1.5, 2.0, 3.0, -2.4, 0.0, 1, 0),  # clipped at 1.2
        (0.5, 2.0, 3.0, -1.0, -1.0, 0, 0),  # a good token became rarer: not clipped
        (0.5, -2.0, 3.0, 1.6, 0.0, 1, 0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0, 3.0, 0, 0),  # a bad token became likelier: not clipped
        (5.0, -2.0, 3.0, 6.0, 0.0, 0, 1),  # dual clip at c = 3
        (5.0, -2.0, None, 10.0, 10.0, 0, 0),
        (5.0, 0.0, 3.0, 0.0, 0.0, 0, 0),
    ],
)
def test_policy_loss_by_hand(
    ratio: float, advantage: float, dual_clip: float | None, loss: float, slope: float, clipped: int, dual: int
) -> None:
    logprobs = f64([math.log(ratio) - 1.0]).requires_grad_()
    got, stats = policy_loss(
        logprobs, f64([-1.0]), f64([advantage]), torch.ones(1), clip_range=0.2, dual_clip=dual_clip
    )
    got.backward()
    assert got.item() == pytest.approx(loss, abs=1e-9)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-9)
    assert (stats["clip_count"].item(), stats["dual_clip_count"].item()) == (clipped, dual)
    # k3 of old || new: e^(new - old) - 1 - (new - old)
    assert stats["approx_kl_sum"].item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-9)


def test_policy_loss_sums_over_valid_tokens_with_weights() -> None:
    # Ratios 1: loss -A w at valid tokens: -(1 * 0.5 + 3 * 2) = -6.5; the masked token's 100 counts nowhere.
    zeros = torch.zeros(1, 3)
    advantages, mask = torch.tensor([[1.0, 100.0, 3.0]]), torch.tensor([[1, 0, 1]])
    weights = torch.tensor([[0.5, 9.0, 2.0]])
    loss, _ = policy_loss(zeros, zeros, advantages, mask, clip_range=0.2, dual_clip=3.0, weights=weights)
    assert loss.item() == -6.5
    loss, _ = policy_loss(zeros, zeros, advantages, mask, clip_range=0.2, dual_clip=3.0)
    assert loss.item() == -4.0


def test_statistics_count_valid_tokens_only() -> None:
    # Four tokens with ratio e and A = 1 (clipped), two of them masked; two with A = -1 and ratio e^2 (dual-clipped).
    logprobs = torch.tensor([[1.0, 1.0, 1.0, 1.0, 2.0, 2.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0, 0, 1, 0]])
    _, stats = policy_loss(logprobs, torch.zeros(1, 6), advantages, mask, clip_range=0.2, dual_clip=3.0)
    # k3 sum: 2 (e - 2) + (e^2 - 3) = 1.4365637 + 4.3890561 = 5.8256198
    got = {name: value.item() for name, value in stats.items()}
    assert got == pytest.approx({"clip_count": 2, "dual_clip_count": 1, "approx_kl_sum": 5.8256198}, abs=1e-5)
    assert not any(value.requires_grad for value in stats.values())


def test_value_loss_by_hand() -> None:
    # eps 0.2. v=1, old=0.9, R=2: inside, 1/2 * 1 = 0.5.  v=2, old=1, R=2: near 1.2, 1/2 * 0.64 = 0.32 (clipped).
    # v=3, old=1, R=0: near 1.2, max(9, 1.44) / 2 = 4.5.  The last is masked.
    values = f64([1.0, 2.0, 3.0, 50.0]).requires_grad_()
    loss, stats = value_loss(
        values, f64([0.9, 1.0, 1.0, 0.0]), f64([2.0, 2.0, 0.0, 0.0]), torch.tensor([1, 1, 1, 0]), clip_range=0.2
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 + 0.32 + 4.5)
    assert stats["value_clip_count"].item() == 1
    assert values.grad is not None
    # v - R where not clipped: -1, 3; 0 where clipped or masked.
    assert values.grad.tolist() == pytest.approx([-1.0, 0.0, 3.0, 0.0])


def test_pairwise_losses_by_hand() -> None:
    # Margins 1, -2, 0: -ln sigmoid = 0.3132617 + 2.1269280 + 0.6931472 = 3.1333369; one right, one tie: 1.5.
    chosen = f64([2.0, 0.0, 5.0]).requires_grad_()
    losses, correct = pairwise_losses(chosen, f64([1.0, 2.0, 5.0]))
    loss = losses.sum()
    assert loss.item() == pytest.approx(3.1333369, abs=1e-6)
    assert correct.item() == 1.5
    loss.backward()
    assert chosen.grad is not None
    # -sigmoid(-margin): -0.2689414, -0.8807971, -0.5
    assert chosen.grad.tolist() == pytest.approx([-0.2689414, -0.8807971, -0.5], abs=1e-6)


def test_pairwise_losses_of_extreme_margins() -> None:
    margin = torch.tensor([1000.0, -1000.0], requires_grad=True)
    losses, correct = pairwise_losses(margin, torch.zeros(2))
    loss = losses.sum()
    loss.backward()
    assert (loss.item(), correct.item()) == (1000.0, 1.0)
    assert margin.grad is not None
    assert margin.grad.tolist() == [0.0, -1.0]


@given(seed=st.integers(0, 100_000), clip=st.sampled_from([0.1, 0.2, 0.5]), dual=st.sampled_from([None, 1.5, 3.0]))
def test_losses_agree_with_scalar_code(seed: int, clip: float, dual: float | None) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 12)
    columns = {name: [rng.gauss(0, 1.5) for _ in range(n)] for name in ("new", "old", "advantage", "target")}
    mask, weights = [rng.randint(0, 1) for _ in range(n)], [rng.random() * 2 for _ in range(n)]
    new, old, advantage, target = columns.values()
    policy, _ = policy_loss(
        f64(new), f64(old), f64(advantage), torch.tensor(mask), clip_range=clip, dual_clip=dual, weights=f64(weights)
    )
    wanted = [
        m * w * policy_term(a - b, c, clip, dual)
        for m, w, a, b, c in zip(mask, weights, new, old, advantage, strict=True)
    ]
    assert policy.item() == pytest.approx(sum(wanted), rel=1e-9, abs=1e-9)
    value, _ = value_loss(f64(new), f64(old), f64(target), torch.tensor(mask), clip_range=clip)
    wanted = [m * value_term(a, b, c, clip) for m, a, b, c in zip(mask, new, old, target, strict=True)]
    assert value.item() == pytest.approx(sum(wanted), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("dual_clip", [3.0, None])
def test_extreme_log_ratios_stay_finite(log_ratio: float, advantage: float, dual_clip: float | None) -> None:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    loss, stats = policy_loss(
        logprobs, torch.zeros(1), torch.tensor([advantage]), torch.ones(1), clip_range=0.2, dual_clip=dual_clip
    )
    loss.backward()
    assert loss.item() == pytest.approx(policy_term(log_ratio, advantage, 0.2, dual_clip), rel=1e-6, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0
    assert all(math.isfinite(value.item()) for value in stats.values())


def test_an_empty_mask_costs_nothing() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    ones, mask = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    policy, policy_stats = policy_loss(x, ones, ones, mask, clip_range=0.2, dual_clip=3.0, weights=ones)
    value, value_stats = value_loss(x, ones, ones, mask, clip_range=0.2)
    (policy + value).backward()
    assert (policy.item(), value.item()) == (0.0, 0.0)
    assert x.grad is not None
    assert not x.grad.any()
    assert all(s.item() == 0.0 for s in (policy_stats | value_stats).values())
    losses, correct = pairwise_losses(torch.zeros(0), torch.zeros(0))
    loss = losses.sum()
    assert (loss.item(), correct.item()) == (0.0, 0.0)


def both_losses(theta: Tensor, rows: list[int], data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of both losses, valid tokens) of some rows of a model with two parameters."""
    features, old, advantages, returns = data[:, rows]
    policy, _ = policy_loss(theta[0] * features, old, advantages, mask[rows], clip_range=0.2, dual_clip=3.0)
    value, _ = value_loss(theta[1] * features, old, returns, mask[rows], clip_range=0.2)
    return policy + 0.5 * value, mask[rows].sum()


def gradient(theta: Tensor, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, theta)[0]


@given(seed=st.integers(0, 100_000), cuts=st.sets(st.integers(1, 5)))
def test_the_gradient_does_not_depend_on_the_micro_batches(seed: int, cuts: set[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(4, 6, 5, dtype=torch.float64, generator=generator)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    theta = torch.randn(2, dtype=torch.float64, generator=generator).requires_grad_()
    count = mask.sum().clamp(min=1)
    order = torch.randperm(6, generator=generator).tolist()
    edges = [0, *sorted(cuts), 6]
    whole = gradient(theta, both_losses(theta, list(range(6)), data, mask)[0] / count)
    split = sum(gradient(theta, both_losses(theta, order[a:b], data, mask)[0] / count) for a, b in pairwise(edges))
    torch.testing.assert_close(split, whole)


def test_means_of_each_micro_batch_do_depend_on_them() -> None:
    # Row 0 has one valid token of loss -4, row 1 three of loss 0: the mean over tokens is -1, of micro-batch means -2.
    zeros = torch.zeros(2, 3)
    advantages = torch.tensor([[4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])

    def loss(rows: list[int]) -> Tensor:
        return policy_loss(zeros[rows], zeros[rows], advantages[rows], mask[rows], clip_range=0.2, dual_clip=3.0)[0]

    assert (loss([0, 1]) / mask.sum()).item() == -1.0
    assert ((loss([0]) + loss([1])) / mask.sum()).item() == -1.0
    assert ((loss([0]) / mask[0].sum() + loss([1]) / mask[1].sum()) / 2).item() == -2.0


@given(seed=st.integers(0, 10_000), extra=st.integers(1, 4))
def test_padding_changes_nothing(seed: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, 2, 4, dtype=torch.float64, generator=generator)
    mask = torch.rand(2, 4, generator=generator) < 0.7

    def pad(x: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, extra), value=value)

    plain = policy_loss(new, old, advantages, mask, clip_range=0.2, dual_clip=3.0)
    padded = policy_loss(pad(new, 900), pad(old, -3), pad(advantages, 7), pad(mask, 0), clip_range=0.2, dual_clip=3.0)
    torch.testing.assert_close(padded, plain)
    plain_value = value_loss(new, old, advantages, mask, clip_range=0.2)
    torch.testing.assert_close(
        value_loss(pad(new, 900), pad(old, -3), pad(advantages, 7), pad(mask, 0), clip_range=0.2), plain_value
    )


def test_clip_higher_by_hand() -> None:
    logprobs = f64([math.log(x) for x in (1.25, 1.3, 0.7, 0.7, 5.0)]).requires_grad_()
    advantages = f64([1, 1, -1, 1, -1])
    losses = [
        policy_loss(
            logprobs[i : i + 1],
            f64([0.0]),
            advantages[i : i + 1],
            torch.ones(1),
            clip_range=0.2,
            clip_range_high=0.28,
            dual_clip=3.0,
        )[0]
        for i in range(5)
    ]
    assert torch.stack(losses).tolist() == pytest.approx([-1.25, -1.28, 0.8, -0.7, 3.0])
    assert torch.autograd.grad(torch.stack(losses).sum(), logprobs)[0].tolist() == pytest.approx([-1.25, 0, 0, -0.7, 0])


def test_gspo_by_hand() -> None:
    logprobs = f64([0.1, -0.2, 0.4]).requires_grad_()
    loss, _ = policy_loss(
        logprobs,
        f64([0, 0, 0]),
        f64([1, 1, 1]),
        torch.ones(3),
        clip_range=0.2,
        dual_clip=None,
        weights=f64([1 / 3] * 3),
        loss=gspo_loss,
        replies=torch.tensor([0, 0, 0]),
    )
    # The geometric mean of the ratios, once a reply: exp(0.1), and a third of it for each token.
    assert loss.item() == pytest.approx(-1.1051709)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-0.3683903] * 3)


def test_gspo_leaves_out_what_was_read_between_turns() -> None:
    """A token that is masked is in no mean and has no gradient, however unlikely it is: the values of before."""
    logprobs = f64([0.1, -9.0, -0.2, 0.4]).requires_grad_()
    loss, _ = policy_loss(
        logprobs,
        f64([0, 0, 0, 0]),
        f64([1, 1, 1, 1]),
        f64([1, 0, 1, 1]),
        clip_range=0.2,
        dual_clip=None,
        weights=f64([1 / 3] * 4),
        loss=gspo_loss,
        replies=torch.tensor([0, 0, 0, 0]),
    )
    assert loss.item() == pytest.approx(-1.1051709)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-0.3683903, 0, -0.3683903, -0.3683903])


def test_cispo_by_hand() -> None:
    old = f64([-1, -2, -0.5])
    logprobs = (old + f64([1.25, 0.5, 6.0]).log()).requires_grad_()
    loss, stats = policy_loss(
        logprobs,
        old,
        f64([1, 1, 1]),
        torch.ones(3),
        clip_range=0.2,
        clip_range_high=4.0,
        dual_clip=3.0,
        loss=cispo_loss,
    )
    weights = f64([1.25, 0.5, 5.0])
    assert loss.item() == pytest.approx(-(weights * logprobs.detach()).sum().item())
    # No token loses its gradient, the cut one neither.
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx((-weights).tolist())
    assert stats["clip_count"].item() == 1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("moved", [0.0, 0.3])
def test_the_kl_in_the_loss_has_the_gradient_of_the_kl(estimator: KLEstimator, moved: float) -> None:
    """Over both tokens of a policy (.75, .25) against (.5, .5), sampled by itself or by an older one."""
    logits = f64([math.log(3.0), 0.0]).requires_grad_()
    logprobs, reference = torch.log_softmax(logits, -1), f64([0.5, 0.5]).log()
    old = torch.log_softmax(logits.detach() + f64([moved, 0.0]), -1)
    expected = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)[0]
    assert expected[0].item() == pytest.approx(0.2059898, abs=1e-7)
    terms = kl_loss(logprobs, old, reference, estimator)
    got = torch.autograd.grad((old.exp() * terms).sum(), logits)[0]
    torch.testing.assert_close(got, expected)


def test_cispo_has_no_dual_clip() -> None:
    # 1.2 · 2 · 10 for a bad token, which PPO's dual clip would hold at 3 · 2.
    given = (f64([10.0]), f64([10.0 - math.log(5.0)]), f64([-2.0]), torch.ones(1))
    plain, _ = policy_loss(*given, loss=cispo_loss, clip_range=0.2, dual_clip=None)
    found, stats = policy_loss(*given, loss=cispo_loss, clip_range=0.2, dual_clip=3.0)
    assert (found.item(), stats["dual_clip_count"].item()) == (plain.item(), 0)


def test_cispo_clips_by_the_ratio_whatever_the_advantage() -> None:
    # Ratios 1.1 and 1.5 against 1.2.
    given = (f64([1.1, 1.5]).log(), f64([0.0, 0.0]), f64([-4.0, 0.25]), torch.ones(2))
    _, stats = policy_loss(*given, loss=cispo_loss, clip_range=0.2, dual_clip=None)
    assert stats["clip_count"].item() == 1


def test_sums_over_replies() -> None:
    x, valid = f64([1, 2, 4, 8, 16]), f64([1, 0, 1, 1, 0])
    assert reply_sums(x, torch.tensor([0, 0, 0, 1, 2]), valid).tolist() == [5, 5, 5, 8, 0]
    nothing = torch.tensor([], dtype=torch.int64)
    assert reply_sums(f64([]), nothing, f64([])).tolist() == []


def test_a_loss_that_is_not_one_of_each_token_is_named() -> None:
    given = f64([-1.0, -2.0])
    with pytest.raises(ValueError, match=r"^loss: it returned \[\]: it must return the loss of each token, \[2\]$"):
        policy_loss(given, given, given, given, clip_range=0.2, dual_clip=None, loss=lambda t: t.logprobs.sum())
    with pytest.raises(ValueError, match=r"^loss: it returned list: "):
        policy_loss(given, given, given, given, clip_range=0.2, dual_clip=None, loss=lambda t: t.logprobs.tolist())
