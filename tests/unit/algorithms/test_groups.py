"""Advantages of replies to one prompt against closed forms, and what must not change them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from xray_runtime.algorithms.groups import GroupBaseline, group_advantages, group_means, tied_groups

NAN = float("nan")
BASELINES: list[GroupBaseline] = ["grpo", "dr_grpo", "rloo"]


def of(rewards: list[float], baseline: GroupBaseline) -> list[float]:
    return group_advantages(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), baseline).tolist()


@pytest.mark.parametrize(
    ("baseline", "rewards", "expected"),
    [
        ("grpo", [1, 0, 0, 1], [0.8660254, -0.8660254, -0.8660254, 0.8660254]),
        ("grpo", [1, 2, 3, 6], [-0.9258201, -0.4629100, 0, 1.3887301]),
        ("grpo", [5, 1], [0.7071068, -0.7071068]),
        ("dr_grpo", [1, 2, 3, 6], [-2, -1, 0, 3]),
        ("rloo", [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("rloo", [1, 2, 3, 6], [-8 / 3, -4 / 3, 0, 4]),
        ("rloo", [5, 1], [4, -4]),
        # A score that failed is as if its reply was absent.
        ("rloo", [1, NAN, 0, 1], [0.5, 0, -1, 0.5]),
        ("dr_grpo", [NAN, NAN, 3], [0, 0, 0]),
    ],
)
def test_closed_forms(baseline: GroupBaseline, rewards: list[float], expected: list[float]) -> None:
    assert of([float(r) for r in rewards], baseline) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("baseline", BASELINES)
def test_advantages_of_equal_rewards_are_exactly_zero(baseline: GroupBaseline) -> None:
    # In float32 the mean of eight times 0.1 is not 0.1, and that difference over its deviation would be 1.
    assert of([0.1] * 8, baseline) == [0.0] * 8
    assert of([3.0], baseline) == [0.0]
    assert of([], baseline) == []


@pytest.mark.parametrize("baseline", BASELINES)
def test_groups_are_apart_and_in_any_order(baseline: GroupBaseline) -> None:
    rewards = torch.tensor([1.0, 7.0, 0.5, 2.0, 7.5, 0.25])
    groups = torch.tensor([0, 1, 2, 0, 1, 2])
    together = group_advantages(rewards, groups, baseline)
    for group in range(3):
        mine = groups == group
        alone = group_advantages(rewards[mine], torch.zeros(2, dtype=torch.int64), baseline)
        torch.testing.assert_close(together[mine], alone)
        assert together[mine].sum().abs() < 1e-12
    order = torch.tensor([5, 3, 0, 4, 1, 2])
    torch.testing.assert_close(group_advantages(rewards[order], groups[order], baseline), together[order])
    torch.testing.assert_close(group_advantages(rewards + 2.0, groups, baseline), together)
    scaled = group_advantages(4.0 * rewards, groups, baseline)
    torch.testing.assert_close(scaled, together if baseline == "grpo" else 4.0 * together)


def test_means_are_over_what_has_a_score() -> None:
    found = group_means(torch.tensor([1.0, 5.0, NAN, 4.0, NAN, NAN]), torch.tensor([0, 2, 0, 0, 1, 2]))
    assert found.tolist() == [2.5, 5.0, 2.5, 2.5, 0.0, 5.0]
    assert found.dtype == torch.float64
    assert group_means(torch.tensor([]), torch.tensor([], dtype=torch.int64)).tolist() == []


def test_tied_groups() -> None:
    rewards = torch.tensor([1.0, 1.0, 2.0, NAN, 3.0, 4.0, NAN, NAN])
    assert tied_groups(rewards, torch.arange(8) // 2).tolist() == [True, True, False, True]
    # What has no score is neither the highest nor the lowest.
    below = torch.tensor([-1.0, -1.0, NAN, 1.0, 1.0, NAN])
    assert tied_groups(below, torch.arange(6) // 3).tolist() == [True, True]


def test_rloo_is_the_true_gradient_in_expectation() -> None:
    """All groups of three replies of a policy over three tokens, each with its probability."""
    policy, worth, n = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([1.0, 0.0, 0.5]).double(), 3
    scores = torch.eye(3).double() - policy  # ∇ log π of each token

    def expected(baseline: GroupBaseline) -> Tensor:
        total = torch.zeros(3).double()
        for drawn in itertools.product(range(3), repeat=n):
            index = torch.tensor(drawn)
            advantages = group_advantages(worth[index], torch.zeros(n, dtype=torch.int64), baseline)
            total += policy[index].prod() * (advantages[:, None] * scores[index]).sum(0) / n
        return total

    true = (policy * worth) @ scores
    assert true.tolist() == pytest.approx([0.2, -0.18, -0.02])
    torch.testing.assert_close(expected("rloo"), true)
    torch.testing.assert_close(expected("dr_grpo"), true * (n - 1) / n)
