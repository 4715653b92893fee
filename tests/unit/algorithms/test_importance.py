"""Weights for the rollout/training mismatch: literals, every mode, extremes, nothing valid."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from xray_runtime.algorithms.importance import importance_weights

# Ratios train / rollout: 1, 3, 1/2, and a masked 100.
TRAIN = torch.tensor([[0.0, math.log(3)], [math.log(0.5), math.log(100)]])
ROLLOUT = torch.zeros(2, 2)
MASK = torch.tensor([[1, 1], [1, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("truncate", [[1.0, 2.0], [0.5, 0.0]]), ("mask", [[1.0, 0.0], [0.5, 0.0]]), ("none", [[1.0, 1.0], [1.0, 0.0]])],
)
def test_modes_by_hand(mode: str, expected: list[list[float]]) -> None:
    weights, _ = importance_weights(TRAIN, ROLLOUT, MASK, mode=mode, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("mode", ["truncate", "mask", "none"])
def test_statistics_by_hand(mode: str) -> None:
    # |diff| = 0, ln 3 = 1.0986123, ln 2 = 0.6931472: mean 0.5972532, max 1.0986123; one of three beyond the cap.
    # Effective share of raw weights 1, 3, 0.5: 4.5^2 / (3 * (1 + 9 + 0.25)) = 20.25 / 30.75 = 0.6585366.
    _, stats = importance_weights(TRAIN, ROLLOUT, MASK, mode=mode, cap=2.0)
    assert stats == pytest.approx(
        {
            "mean_abs_diff": 0.5972532,
            "max_abs_diff": 1.0986123,
            "effective_sample_share": 0.6585366,
            "capped_share": 1 / 3,
        },
        abs=1e-6,
    )


def test_the_weight_is_train_over_rollout() -> None:
    # The trainer finds the token less likely than the generator did: its weight falls below 1.
    weights, _ = importance_weights(torch.tensor([-2.0]), torch.tensor([-1.0]), torch.ones(1), mode="truncate", cap=2.0)
    assert weights.item() == pytest.approx(0.3678794, abs=1e-6)  # e^-1


@given(seed=st.integers(0, 10_000), cap=st.floats(1.01, 10.0))
def test_bounds(seed: int, cap: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    train, rollout = 3 * torch.randn(2, 4, 5, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    for mode in ("truncate", "mask"):
        weights, stats = importance_weights(train, rollout, mask, mode=mode, cap=cap)
        for w, a, b, m in zip(*(t.flatten().tolist() for t in (weights, train, rollout, mask)), strict=True):
            raw = math.exp(max(-20.0, min(a - b, 20.0)))
            kept = min(raw, cap) if mode == "truncate" else (0.0 if raw > cap else raw)
            assert w == pytest.approx(kept if m else 0.0, rel=1e-9)
        assert 0.0 <= stats["effective_sample_share"] <= 1 + 1e-9
        assert 0.0 <= stats["capped_share"] <= 1.0


@pytest.mark.parametrize(("mode", "high"), [("truncate", 2.0), ("mask", 0.0), ("none", 1.0)])
def test_extreme_differences_stay_finite(mode: str, high: float) -> None:
    weights, stats = importance_weights(
        torch.tensor([[1000.0, -1000.0]]), torch.zeros(1, 2), torch.ones(1, 2), mode=mode, cap=2.0
    )
    low = 1.0 if mode == "none" else math.exp(-20)
    assert weights.tolist()[0] == pytest.approx([high, low], rel=1e-5)
    assert stats["max_abs_diff"] == 1000.0  # the statistic is not clamped: it is what fails a stale generator
    assert stats["capped_share"] == 0.5
    assert stats["effective_sample_share"] == pytest.approx(0.5)  # one of two carries everything


def test_equal_policies_weigh_one() -> None:
    logprobs = torch.tensor([[-1.0, -3.0, 0.0]])
    weights, stats = importance_weights(logprobs, logprobs, torch.ones(1, 3), mode="truncate", cap=2.0)
    assert weights.tolist() == [[1.0, 1.0, 1.0]]
    assert stats == {"mean_abs_diff": 0.0, "max_abs_diff": 0.0, "effective_sample_share": 1.0, "capped_share": 0.0}


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_nothing_valid(shape: tuple[int, int]) -> None:
    weights, stats = importance_weights(
        torch.ones(shape), torch.zeros(shape), torch.zeros(shape), mode="truncate", cap=2.0
    )
    assert not weights.any()
    assert weights.shape == shape
    assert set(stats.values()) == {0.0}


def test_one_weight_a_reply_is_the_geometric_mean() -> None:
    # Ratios 1.5, ½ and 3: their product is 2.25. The second row has one token, a masked one counts nothing.
    train = torch.tensor([[1.5, 0.5, 3.0], [4.0, 9.0, 9.0]]).log()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    weights, stats = importance_weights(train, torch.zeros(2, 3), mask, mode="truncate", cap=2.0, level="reply")
    torch.testing.assert_close(weights, torch.tensor([[1.3103707] * 3, [2.0, 0, 0]]))
    assert stats["capped_share"] == 0.25
    dropped, _ = importance_weights(train, torch.zeros(2, 3), mask, mode="mask", cap=2.0, level="reply")
    torch.testing.assert_close(dropped[1], torch.zeros(3))


def test_one_weight_a_reply_counts_its_valid_tokens() -> None:
    weights, stats = importance_weights(TRAIN, ROLLOUT, MASK, mode="truncate", cap=10.0, level="reply")
    # √3 for both tokens of the first; ½ for the second, whose other token is not there.
    torch.testing.assert_close(weights, torch.tensor([[math.sqrt(3), math.sqrt(3)], [0.5, 0.0]]))
    assert stats["capped_share"] == 0.0


def test_a_weight_at_the_cap_is_not_beyond_it() -> None:
    weights, stats = importance_weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), mode="mask", cap=1.0)
    assert weights.tolist() == [[1.0]]
    # One token is a whole sample of one.
    assert (stats["capped_share"], stats["effective_sample_share"]) == (0.0, 1.0)


def test_a_reply_of_equal_policies_weighs_one_where_it_is() -> None:
    weights, _ = importance_weights(ROLLOUT, ROLLOUT, MASK, mode="truncate", cap=2.0, level="reply")
    assert weights.tolist() == [[1.0, 1.0], [1.0, 0.0]]


def test_a_floor_counts_where_weights_are_masked() -> None:
    # 1, 3 and ½, of which 3 is beyond the cap and ½ below the floor.
    weights, stats = importance_weights(TRAIN, ROLLOUT, MASK, mode="mask", cap=2.0, floor=0.75)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert stats["capped_share"] == pytest.approx(2 / 3)
    weights, stats = importance_weights(TRAIN, ROLLOUT, MASK, mode="truncate", cap=2.0, floor=0.75)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0], [0.5, 0.0]]))
    assert stats["capped_share"] == pytest.approx(1 / 3)
    # At the floor it is not below.
    weights, stats = importance_weights(ROLLOUT, ROLLOUT, MASK, mode="mask", cap=2.0, floor=1.0)
    assert (weights.tolist(), stats["capped_share"]) == ([[1.0, 1.0], [1.0, 0.0]], 0.0)
