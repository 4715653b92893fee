"""Statistics of human verdicts."""

from __future__ import annotations

import pytest

from xray_runtime.algorithms.verdicts import SHARES, mean_share, outcomes


def test_each_prompt_counts_once_however_many_judge_it() -> None:
    rate, (low, high) = mean_share([[1.0], [1.0, 0.0, 0.5], [0.0, 0.0], [1.0, 0.5]])
    assert rate == pytest.approx((1.0 + 0.5 + 0.0 + 0.75) / 4)
    # Wilson: z = 1.9599640, n = 4, p = .5625: (p + z²/8 ± z √(p (1 − p)/4 + z²/64)) / (1 + z²/4).
    assert (low, high) == (pytest.approx(0.1833183, abs=1e-6), pytest.approx(0.8804454, abs=1e-6))


def test_prompts_are_won_lost_or_tied() -> None:
    assert outcomes([1.0, 0.51, 0.5, 0.49, 0.0, 0.0]) == {"won": 2, "lost": 3, "tied": 1}
    assert outcomes(iter([])) == {"won": 0, "lost": 0, "tied": 0}


def test_a_tie_and_two_bad_replies_are_one_half() -> None:
    assert SHARES == {"a": 1.0, "b": 0.0, "tie": 0.5, "bad": 0.5}
