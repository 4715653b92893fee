"""Which reply of a group wins, which loses, and what neither does."""

from __future__ import annotations

import itertools
import math

import torch

from xray_runtime.algorithms.groups import NONE, best_of, tied, worst_of

NAN, INF = math.nan, math.inf


def test_by_hand() -> None:
    rewards = torch.tensor([[1.0, 5.0, 0.0], [2.0, 1.0, 2.0], [3.0, 3.0, 3.0], [-1.0, -2.0, -2.0]])
    assert best_of(rewards).tolist() == [1, 0, 0, 0]
    assert worst_of(rewards).tolist() == [2, 1, 0, 1]
    assert tied(rewards).tolist() == [False, False, True, False]


def test_a_score_that_failed_neither_wins_nor_loses() -> None:
    rewards = torch.tensor([[NAN, 1.0, 2.0], [0.0, NAN, NAN], [NAN, NAN, NAN], [INF, 1.0, -INF], [NAN, 4.0, 4.0]])
    assert best_of(rewards).tolist() == [2, 0, NONE, 1, 1]
    assert worst_of(rewards).tolist() == [1, 0, NONE, 1, 1]
    assert tied(rewards).tolist() == [False, True, True, True, True]


def test_the_order_of_groups_and_a_shift_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 97):
        assert best_of(rewards[list(order)]).tolist() == best_of(rewards)[list(order)].tolist()
    assert best_of(3 * rewards - 7).tolist() == best_of(rewards).tolist()
    assert worst_of(3 * rewards - 7).tolist() == worst_of(rewards).tolist()
