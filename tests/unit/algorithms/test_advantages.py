"""Reward placement, GAE and whitening against literals, closed forms and a plain-Python implementation."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from xray_runtime.algorithms.advantages import gae, masked_mean, place_rewards, whiten


def gae_by_loops(
    rewards: list[float], values: list[float], bootstrap: float, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Σ_k (γλ)^k δ_{t+k}, straight from the definition, over tokens that are all valid."""
    after = [*values, bootstrap][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    advantages = [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def compacted(row: list[float], mask: list[int]) -> list[float]:
    return [x for x, m in zip(row, mask, strict=True) if m]


def f64(x: object) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def test_rewards_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    penalties = f64([[0.1, 0.2, 0.3, 9.0]] * 4)
    rewards = place_rewards(f64([1.0, 2.0, 3.0, 4.0]), penalties, mask)
    expected = [
        [-0.1, -0.2, 0.7, 0.0],  # 1.0 - 0.3 on the last valid token
        [-0.1, 0.0, 1.7, 0.0],  # a hole stays 0
        [0.0, 0.0, 0.0, 0.0],  # no tokens: no reward
        [-0.1, -0.2, -0.3, -5.0],  # 4.0 - 9.0 in the last column
    ]
    torch.testing.assert_close(rewards, f64(expected))


def test_placing_rewards_leaves_its_arguments_alone() -> None:
    scores, penalties, mask = torch.ones(1), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    place_rewards(scores, penalties, mask)
    assert (scores.tolist(), penalties.tolist()) == ([1.0], [[1.0, 1.0]])


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5. Ended: bootstrap 0.
    # t=2: delta = 1 - 0.4 = 0.6, A = 0.6;  t=1: delta = 0.5 * 0.4 - 0.2 = 0, A = 0.25 * 0.6 = 0.15;
    # t=0: delta = 0.1 + 0.5 * 0.2 - 0.6 = -0.4, A = -0.4 + 0.25 * 0.15 = -0.3625.
    # Cut off with V = 0.8: t=2: 1 + 0.4 - 0.4 = 1.0;  t=1: 0.25;  t=0: -0.4 + 0.0625 = -0.3375.
    values = f64([[0.6, 0.2, 0.4]] * 2)
    rewards = f64([[0.1, 0.0, 1.0]] * 2)
    advantages, returns = gae(rewards, values, torch.ones(2, 3), f64([0.0, 0.8]), gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, f64([[-0.3625, 0.15, 0.6], [-0.3375, 0.25, 1.0]]))
    torch.testing.assert_close(returns, f64([[0.2375, 0.35, 1.0], [0.2625, 0.45, 1.4]]))


def test_masked_tokens_in_the_middle_carry_value_and_advantage_across() -> None:
    # gamma 1, lambda 0.95, V = 0.5 at valid tokens, reward 1 at the end. Compacted: only the last delta, 0.5, is not 0,
    # so A = 0.5 * 0.95^k: 0.5, 0.475, 0.45125, 0.4286875.
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    rewards = f64([[0, 0, 0, 0, 0, 1.0]])
    for hole in (0.0, 0.5, 1e6, -3.0):  # what stands at masked tokens does not matter
        values = f64([[0.5, 0.5, hole, hole, 0.5, 0.5]])
        advantages, returns = gae(rewards + ~mask * hole, values, mask, f64([0.0]), gamma=1.0, lam=0.95)
        torch.testing.assert_close(advantages, f64([[0.4286875, 0.45125, 0, 0, 0.475, 0.5]]))
        torch.testing.assert_close(returns, f64([[0.9286875, 0.95125, 0, 0, 0.975, 1.0]]))


def test_recursion_without_the_carry_gives_another_number() -> None:
    # The habit of zeroing values at masked tokens and recursing through them: 0.3406 in place of 0.4287.
    values, rewards = [0.5, 0.5, 0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    wrong, _ = gae_by_loops(rewards, values, 0.0, 1.0, 0.95)
    assert wrong[0] == pytest.approx(0.3406, abs=5e-5)


def test_lambda_one_is_monte_carlo() -> None:
    # Returns are discounted sums of rewards: gamma 0.9, rewards 1, 2, 3, then 0.9^3 of the bootstrap.
    # R_0 = 1 + 1.8 + 2.43 = 5.23, R_1 = 2 + 2.7 = 4.7, R_2 = 3; with bootstrap 10: + 7.29, 8.1, 9.
    values = f64([[0.3, -2.0, 5.0]] * 2)
    advantages, returns = gae(f64([[1.0, 2.0, 3.0]] * 2), values, torch.ones(2, 3), f64([0, 10.0]), gamma=0.9, lam=1.0)
    torch.testing.assert_close(returns, f64([[5.23, 4.7, 3.0], [12.52, 12.8, 12.0]]))
    torch.testing.assert_close(advantages, returns - values)


def test_lambda_zero_is_one_step_td() -> None:
    # R_t = r_t + gamma V_{t+1}: 1 + 0.9 * -2 = -0.8, 2 + 0.9 * 5 = 6.5, 3 + 0.9 * 10 = 12.
    advantages, returns = gae(
        f64([[1.0, 2.0, 3.0]]), f64([[0.3, -2.0, 5.0]]), torch.ones(1, 3), f64([10.0]), gamma=0.9, lam=0.0
    )
    torch.testing.assert_close(returns, f64([[-0.8, 6.5, 12.0]]))
    torch.testing.assert_close(advantages, f64([[-1.1, 8.5, 7.0]]))


@given(
    seed=st.integers(0, 100_000), gamma=st.sampled_from([1.0, 0.97, 0.0]), lam=st.sampled_from([1.0, 0.95, 0.3, 0.0])
)
def test_gae_agrees_with_the_definition_over_compacted_tokens(seed: int, gamma: float, lam: float) -> None:
    rng = random.Random(seed)
    rows, width = rng.randint(1, 4), rng.randint(1, 9)
    mask = [[rng.randint(0, 1) for _ in range(width)] for _ in range(rows)]
    rewards, values = ([[rng.gauss(0, 2) for _ in range(width)] for _ in range(rows)] for _ in range(2))
    bootstrap = [rng.gauss(0, 2) for _ in range(rows)]
    advantages, returns = gae(f64(rewards), f64(values), torch.tensor(mask), f64(bootstrap), gamma=gamma, lam=lam)
    for b in range(rows):
        wanted = gae_by_loops(compacted(rewards[b], mask[b]), compacted(values[b], mask[b]), bootstrap[b], gamma, lam)
        assert compacted(advantages[b].tolist(), mask[b]) == pytest.approx(wanted[0], abs=1e-10)
        assert compacted(returns[b].tolist(), mask[b]) == pytest.approx(wanted[1], abs=1e-10)
    hidden = torch.tensor(mask) == 0
    assert not advantages[hidden].any()
    assert not returns[hidden].any()


def test_gae_float32_over_a_long_reply() -> None:
    rng = random.Random(7)
    rewards, values = ([rng.gauss(0, 1) for _ in range(512)] for _ in range(2))
    wanted, _ = gae_by_loops(rewards, values, 0.5, 1.0, 0.95)
    advantages, _ = gae(
        torch.tensor([rewards]), torch.tensor([values]), torch.ones(1, 512), torch.tensor([0.5]), gamma=1.0, lam=0.95
    )
    torch.testing.assert_close(advantages[0].double(), f64(wanted), rtol=1e-5, atol=1e-5)


def test_gae_of_nothing() -> None:
    advantages, returns = gae(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3), torch.ones(2), gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [[0.0] * 3] * 2
    advantages, _ = gae(torch.ones(2, 0), torch.ones(2, 0), torch.ones(2, 0), torch.ones(2), gamma=1.0, lam=1.0)
    assert advantages.shape == (2, 0)


def test_masked_mean() -> None:
    x = torch.tensor([[1.0, 5.0], [100.0, 3.0]])
    assert masked_mean(x, torch.tensor([[1, 1], [0, 1]])).item() == 3.0  # (1 + 5 + 3) / 3
    assert masked_mean(x, torch.tensor([[True, True], [False, True]])).item() == 3.0
    assert masked_mean(x, torch.zeros(2, 2)).item() == 0.0


def test_whiten_by_hand() -> None:
    # Valid: 1, 3, 8: mean 4, population variance (9 + 1 + 16) / 3 = 26 / 3, deviation 2.943920.
    x = torch.tensor([[1.0, 3.0, 70.0], [8.0, -9.0, 5.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = torch.tensor([[-1.0190493, -0.3396831, 0.0], [1.3587324, 0.0, 0.0]])
    torch.testing.assert_close(whiten(x, mask), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(whiten(x, mask, shift_mean=False), expected + 4.0 * mask, rtol=0, atol=1e-5)


@given(seed=st.integers(0, 10_000), shift=st.floats(-50, 50), scale=st.floats(0.1, 50))
def test_whitening_forgets_shift_and_scale(seed: int, shift: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    mask[0, :2] = True
    white = whiten(x, mask)
    torch.testing.assert_close(whiten(scale * x + shift, mask), white, rtol=0, atol=1e-5)
    count = int(mask.sum())
    kept = white[mask].tolist()
    assert sum(kept) / count == pytest.approx(0, abs=1e-9)
    assert math.sqrt(sum(v * v for v in kept) / count) == pytest.approx(1, abs=1e-5)
    assert not white[~mask].any()


def test_whitening_is_over_the_whole_batch() -> None:
    x, mask = torch.tensor([[1.0, 2.0], [10.0, 20.0]]), torch.ones(2, 2)
    by_row = torch.cat([whiten(x[:1], mask[:1]), whiten(x[1:], mask[1:])])
    assert (whiten(x, mask) - by_row).abs().max() > 0.5
    torch.testing.assert_close(by_row, torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]))


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.zeros(2, 3)])
# Of 0.25 the mean is exact; in float32 that of six times 0.7 is another number.
@pytest.mark.parametrize("value", [0.25, 0.7, 100.3])
def test_whitening_a_constant_or_nothing(mask: Tensor, value: float) -> None:
    x = torch.full((2, 3), value)
    assert whiten(x, mask).tolist() == [[0.0] * 3] * 2
    assert whiten(x, mask, shift_mean=False).tolist() == (x * mask).tolist()


def test_whitening_rewards_that_are_all_the_same_teaches_nothing() -> None:
    """64 replies of 16 tokens: the mean of so many times 100.3 is off by 1e-5, a tenth of √eps."""
    x, mask = torch.full((64, 16), 100.3), torch.ones(64, 16)
    mask[3, 7:], x[3, 7:] = 0.0, -7.0
    assert masked_mean(x, mask) != x[0, 0]
    assert not whiten(x, mask).any()
    # Nor does a single token.
    assert whiten(torch.tensor([[3.3, 7.0]]), torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]


@given(seed=st.integers(0, 10_000), extra=st.integers(1, 5))
def test_padding_changes_nothing(seed: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=generator) < 0.8
    final = torch.randn(3, generator=generator, dtype=torch.float64)

    def pad(x: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, extra), value=value)

    plain = gae(rewards, values, mask, final, gamma=0.9, lam=0.8)
    padded = gae(pad(rewards, 77.0), pad(values, -55.0), pad(mask, False), final, gamma=0.9, lam=0.8)
    for a, b in zip(plain, padded, strict=True):
        torch.testing.assert_close(pad(a, 0.0), b)
    torch.testing.assert_close(pad(whiten(plain[0], mask), 0.0), whiten(pad(plain[0], 99.0), pad(mask, False)))
    scores = torch.randn(3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        pad(place_rewards(scores, rewards, mask), 0.0), place_rewards(scores, pad(rewards, 3.0), pad(mask, False))
    )


def test_a_reply_of_one_token_has_its_reward_there() -> None:
    mask = torch.tensor([[1, 0], [0, 0]])
    rewards = place_rewards(torch.tensor([2.0, 3.0]), torch.full((2, 2), 0.5), mask)
    assert rewards.tolist() == [[1.5, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(("lam", "is_good"), [(1.0, True), (0.95, False)])
def test_the_first_tokens_of_a_success_are_good_ones_only_at_lambda_1(lam: float, is_good: bool) -> None:
    """60 tokens of a success and of a failure, under a critic that says 0: below 1 the first are far below the mean."""
    rewards = torch.zeros(2, 60, dtype=torch.float64)
    rewards[0, -1] = 1.0
    mask = torch.ones(2, 60, dtype=torch.bool)
    advantages, _ = gae(
        rewards, torch.zeros_like(rewards), mask, torch.zeros(2, dtype=torch.float64), gamma=1.0, lam=lam
    )
    assert float(advantages[0, 0]) == pytest.approx(lam**59)
    assert (float(whiten(advantages, mask)[0, 0]) > 0) == is_good
