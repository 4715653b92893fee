"""KL estimators against literals and the exact divergence; the controllers against Ziegler et al.'s rule."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from xray_runtime.algorithms.kl import (
    LOG_RATIO_BOUND,
    KLController,
    clamp_log_ratio,
    kl_estimate,
    kl_summary,
    make_kl_controller,
)
from xray_runtime.methods.ppo.config import KLConfig

LOGPROBS = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
REFERENCE = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
# r = logp - ref = 0.5, -1.0, 0.0
BY_HAND = {
    "k1": [0.5, -1.0, 0.0],
    "k2": [0.125, 0.5, 0.0],  # 0.25 / 2, 1 / 2
    "k3": [0.1065307, 0.7182818, 0.0],  # e^-0.5 - 1 + 0.5, e^1 - 1 - 1
}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_by_hand(estimator: str) -> None:
    expected = torch.tensor(BY_HAND[estimator], dtype=torch.float64)
    torch.testing.assert_close(kl_estimate(LOGPROBS, REFERENCE, estimator), expected, rtol=0, atol=1e-7)


@given(seed=st.integers(0, 10_000))
def test_k1_and_k3_are_unbiased_for_policy_to_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.softmax(torch.randn(2, 6, dtype=torch.float64, generator=generator), -1)
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for estimator in ("k1", "k3"):
        # The expectation under the policy, taken exactly rather than by samples.
        assert (p * kl_estimate(p.log(), q.log(), estimator)).sum().item() == pytest.approx(exact, abs=1e-12)


def test_the_direction_matters() -> None:
    # KL(p || q) = 0.5 ln(0.5/0.9) + 0.5 ln(0.5/0.1) = 0.5108256; KL(q || p) = 0.3680642.
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    for estimator in ("k1", "k3"):
        assert (p * kl_estimate(p.log(), q.log(), estimator)).sum().item() == pytest.approx(0.5108256, abs=1e-6)
        assert (q * kl_estimate(q.log(), p.log(), estimator)).sum().item() == pytest.approx(0.3680642, abs=1e-6)


def test_k2_approaches_the_divergence_for_close_policies() -> None:
    p = torch.tensor([0.3, 0.7], dtype=torch.float64)
    q = torch.tensor([0.301, 0.699], dtype=torch.float64)
    exact = 0.3 * math.log(0.3 / 0.301) + 0.7 * math.log(0.7 / 0.699)
    assert (p * kl_estimate(p.log(), q.log(), "k2")).sum().item() == pytest.approx(exact, rel=1e-2)


@given(st.floats(-2000, 2000))
def test_extreme_log_ratios_are_bounded(r: float) -> None:
    a, b = torch.tensor([r], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    c = max(min(r, 20.0), -20.0)
    assert kl_estimate(a, b, "k1").item() == pytest.approx(c)
    assert kl_estimate(a, b, "k2").item() == pytest.approx(c * c / 2)
    assert kl_estimate(a, b, "k3").item() == pytest.approx(math.expm1(-c) + c, rel=1e-9, abs=1e-12)
    assert kl_estimate(a, b, "k3").item() >= 0


def test_extremes_in_float32() -> None:
    r = torch.tensor([1000.0, -1000.0])
    assert clamp_log_ratio(r).tolist() == [20.0, -20.0]
    assert LOG_RATIO_BOUND == 20.0
    assert kl_estimate(r, torch.zeros(2), "k3").tolist() == pytest.approx([19.0, math.exp(20) - 21], rel=1e-6)


def test_fixed_controller_keeps_its_weight() -> None:
    controller = make_kl_controller(KLConfig(controller="fixed", coef=0.3))
    controller.update(1e9, 1000)
    assert controller.coef == 0.3


@pytest.mark.parametrize(
    ("kl", "replies", "expected"),
    [
        (4.4, 100, 0.1 * 1.01),  # error 0.1, 0.1 * 100 / 1000 = 0.01
        (3.6, 100, 0.1 * 0.99),
        (4.0, 100, 0.1),  # on target
        (400.0, 100, 0.1 * 1.02),  # error clipped to 0.2
        (-400.0, 100, 0.1 * 0.98),  # k1's mean may be negative: clipped to -0.2
        (400.0, 0, 0.1),
    ],
)
def test_adaptive_controller_by_hand(kl: float, replies: int, expected: float) -> None:
    controller = KLController(0.1, target=4.0, horizon=1000.0)
    controller.update(kl, replies)
    assert controller.coef == pytest.approx(expected, rel=1e-12)


def test_adaptive_controller_remembers_only_its_weight() -> None:
    first = KLController(0.1, target=4.0, horizon=100.0)
    for kl in (10.0, 1.0, 4.2):
        first.update(kl, 10)
    resumed = KLController(first.coef, target=4.0, horizon=100.0)
    first.update(5.0, 10)
    resumed.update(5.0, 10)
    assert resumed == first
    # 1.02 * 0.98 * 1.005 (error 0.05 * 0.1) * 1.02
    assert first.coef == pytest.approx(0.1 * 1.02 * 0.98 * 1.005 * 1.02, rel=1e-12)


def test_the_adaptive_controller_of_a_config() -> None:
    config = KLConfig(controller="adaptive", coef=0.3, target=5.0, horizon=70.0)
    assert make_kl_controller(config) == KLController(0.3, 5.0, 70.0)


def test_summary_is_a_mean_over_replies_of_sums() -> None:
    # r = [[1, 1, masked], [2, masked, masked], no tokens]: k1 = (1 + 1 + 2) / 2 replies = 2.
    # k3: e^-1 - 1 + 1 = 0.3678794 twice, e^-2 - 1 + 2 = 1.1353353: 1.8710941 / 2 = 0.9355471.
    logprobs = torch.tensor([[1.0, 1.0, 50.0], [2.0, 50.0, 50.0], [50.0, 50.0, 50.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    summary = kl_summary(logprobs, torch.zeros(3, 3), mask)
    assert summary == pytest.approx({"k1": 2.0, "k3": 0.9355471}, abs=1e-6)
    # One reply of two tokens.
    alone = kl_summary(logprobs[:2], torch.zeros(2, 3), mask[:2] & torch.tensor([[True], [False]]))
    assert alone == pytest.approx({"k1": 2.0, "k3": 0.7357589}, abs=1e-6)


def test_summary_of_nothing_is_zero() -> None:
    empty = torch.zeros(2, 3, dtype=torch.bool)
    assert kl_summary(torch.ones(2, 3), torch.zeros(2, 3), empty) == {"k1": 0.0, "k3": 0.0}
