"""What evaluation reports: literals, known distributions, empty input."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import pytest
import torch

from xray_runtime.algorithms.statistics import (
    bootstrap_interval,
    bootstrap_ratio,
    distinct_n,
    explained_variance,
    pass_at_k,
    trials_needed,
    variety,
    wilson_interval,
    wins,
)


def test_explained_variance_by_hand() -> None:
    # Returns 1, 2, 3, 6: mean 3, variance 14 / 4. Errors R - V = 0, 0, 1, 1: variance 1 / 4. 1 - 1 / 14 = 0.9285714.
    returns = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    values = torch.tensor([[1.0, 2.0], [2.0, 5.0]])
    assert explained_variance(values, returns, torch.ones(2, 2)) == pytest.approx(0.9285714, abs=1e-6)


def test_explained_variance_closed_forms() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 4.0, 999.0]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 3.0, returns, mask) == pytest.approx(1.0, abs=1e-6)  # a bias is not variance
    assert explained_variance(torch.full((1, 4), 2.0), returns, mask) == pytest.approx(0.0, abs=1e-6)
    # V = -R doubles the error: 1 - Var(2R) / Var(R) = -3.
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0, abs=1e-5)


def test_explained_variance_without_variance_is_zero() -> None:
    values = torch.tensor([[1.0, 2.0]])
    assert explained_variance(values, torch.full((1, 2), 0.5), torch.ones(1, 2)) == 0.0
    assert explained_variance(values, values, torch.zeros(1, 2)) == 0.0
    assert explained_variance(values, values, torch.tensor([[1, 0]])) == 0.0


def test_bootstrap_interval_of_a_coin() -> None:
    # 100 of 400: the mean's deviation is sqrt(0.25 * 0.75 / 400) = 0.0216506; 1.96 of it is 0.0424.
    x = torch.cat([torch.ones(100), torch.zeros(300)])
    mean, low, high = bootstrap_interval(x, 4000, seed=0)
    assert mean == 0.25
    assert low == pytest.approx(0.25 - 0.0424, abs=0.005)
    assert high == pytest.approx(0.25 + 0.0424, abs=0.005)


def test_bootstrap_interval_follows_its_seed() -> None:
    x = torch.arange(20.0)
    assert bootstrap_interval(x, 200, seed=1) == bootstrap_interval(x, 200, seed=1)
    assert bootstrap_interval(x, 200, seed=1) != bootstrap_interval(x, 200, seed=2)


def test_bootstrap_interval_of_a_constant() -> None:
    assert bootstrap_interval(torch.full((7,), 0.5), 100, seed=0) == (0.5, 0.5, 0.5)
    assert bootstrap_interval(torch.tensor([3.0]), 100, seed=0) == (3.0, 3.0, 3.0)


def test_wins() -> None:
    assert wins(torch.tensor([2.0, 1.0, 5.0]), torch.tensor([1.0, 2.0, 5.0])).tolist() == [1.0, 0.0, 0.5]


def test_distinct_n_by_hand() -> None:
    # Bigrams: 12, 21, 12 and 12: 2 distinct of 4. Unigrams: 1, 2, 1, 2, 1, 2: 2 of 6.
    replies = [[1, 2, 1, 2], [1, 2]]
    assert distinct_n(replies, 2) == 0.5
    assert distinct_n(replies, 1) == pytest.approx(1 / 3)
    assert distinct_n([[1, 2, 3]], 2) == 1.0


def test_distinct_n_never_crosses_replies_and_may_be_empty() -> None:
    assert distinct_n([[1], [2], []], 2) == 0.0
    assert distinct_n([], 1) == 0.0


def varied(*replies: list[int]) -> tuple[float, float]:
    lengths = torch.tensor([len(reply) for reply in replies])
    return variety(torch.tensor([token for reply in replies for token in reply], dtype=torch.int64), lengths, 3)


def test_variety_of_replies() -> None:
    # (1,1),(1,1),(1,1): one of three pairs differs; (1,2),(2,3),(3,4): all; one token repeats nothing. 1 1 1, 1 2 3 and
    # 2 3 4 stand in one reply of three each.
    assert varied([1, 1, 1, 1], [1, 2, 3, 4], [5]) == pytest.approx(((1 / 3 + 1 + 1) / 3, 1 / 3))
    # 1 2 3 stands in two of three, however often; 3 9 8 and 3 1 2 are no runs, their tokens being of two replies.
    assert varied([1, 2, 3, 9, 1, 2, 3], [8, 1, 2, 3], [1, 2, 4])[1] == pytest.approx(2 / 3)
    assert varied([7], [7], []) == (1.0, 0.0)
    # Against counting by hand in Python.
    draws = torch.Generator().manual_seed(0)
    replies = [torch.randint(0, 3, (length,), generator=draws).tolist() for length in (0, 1, 2, 9, 14, 30)]
    pairs = [len({*itertools.pairwise(r)}) / (len(r) - 1) if len(r) > 1 else 1.0 for r in replies]
    held = [{*zip(r, r[1:], r[2:], strict=False)} for r in replies]
    most = max(sum(run in runs for runs in held) for run in set.union(*held))
    assert varied(*replies) == pytest.approx((sum(pairs) / 6, most / 6))


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    # Of 5 samples 2 are right: 10 pairs, 3 of them without a right one; 10 triples, 1 of them.
    right = torch.tensor([0, 2, 5])
    assert pass_at_k(5, right, 1).tolist() == pytest.approx([0.0, 0.4, 1.0], abs=1e-15)
    assert pass_at_k(5, right, 2).tolist() == pytest.approx([0.0, 0.7, 1.0], abs=1e-15)
    assert pass_at_k(5, right, 3).tolist() == pytest.approx([0.0, 0.9, 1.0], abs=1e-15)
    # Counted out, and where a binomial has 300 digits.
    for n, c, k in ((7, 3, 4), (6, 1, 5), (9, 9, 2), (8, 4, 8)):
        subsets = list(itertools.combinations(range(n), k))
        share = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
        assert float(pass_at_k(n, torch.tensor([c]), k)) == pytest.approx(share, abs=1e-12)
    exact = 1 - Fraction(math.comb(1990, 500), math.comb(2000, 500))
    assert float(pass_at_k(2000, torch.tensor([10]), 500)) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """Over all outcomes of n tries that succeed with p each, its mean is 1 − (1 − p)^k."""
    n, p = 6, 0.3
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        estimates = pass_at_k(n, torch.arange(n + 1), k).tolist()
        mean = sum(w * e for w, e in zip(weights, estimates, strict=True))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
        # What takes the share of right ones to the power instead is not.
        wrong = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
        assert (k == 1) == (wrong == pytest.approx(mean, abs=1e-6))


@pytest.mark.parametrize("k", [0, 4])
def test_more_tries_than_samples_say_nothing(k: int) -> None:
    with pytest.raises(ValueError, match=f"k = {k} must be from 1 to n = 3"):
        pass_at_k(3, torch.tensor([1]), k)


def test_the_interval_of_a_ratio() -> None:
    x, y = torch.tensor([2.0, 6.0]), torch.tensor([1.0, 3.0])
    # Each row's ratio is 2, and so is that of every resample.
    assert bootstrap_ratio(x, y, 100, 0) == (2.0, 2.0, 2.0)
    ratio, low, high = bootstrap_ratio(torch.tensor([1.0, 9.0]), torch.tensor([1.0, 3.0]), 2000, 0)
    # 10 / 4; of the resamples a quarter each are 1 / 1 and 9 / 3.
    assert (ratio, low, high) == (2.5, 1.0, 3.0)
    # Over ones it is the mean, with the same resamples; another seed has others.
    numbers = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert bootstrap_ratio(numbers, torch.ones(5), 200, 3) == pytest.approx(bootstrap_interval(numbers, 200, 3))
    assert bootstrap_interval(numbers, 200, 3) != bootstrap_interval(numbers, 200, 4)


def test_wilson_interval() -> None:
    # Of n successes in n trials the lower end is n / (n + z²): 10 / 13.8415 with z = 1.96.
    assert wilson_interval(1.0, 10) == (pytest.approx(0.72247, abs=1e-5), pytest.approx(1.0))
    assert wilson_interval(0.0, 10) == (pytest.approx(0.0), pytest.approx(1 - 0.72247, abs=1e-5))
    # 5 of 10: ½ ± z √(0.025 + z²/400) / (1 + z²/10) = ½ ± 1.96 · 0.18602 / 1.38415.
    assert wilson_interval(0.5, 10) == (pytest.approx(0.23659, abs=1e-4), pytest.approx(0.76341, abs=1e-4))


@pytest.mark.parametrize(("mean", "bound"), [(0.6, 0.5), (0.51, 0.5), (0.9, 0.5), (0.45, 0.4), (1.0, 0.99)])
def test_trials_needed_are_the_first_whose_interval_begins_above_the_bound(mean: float, bound: float) -> None:
    needed = trials_needed(mean, bound)
    assert needed is not None
    # An independent implementation of the interval, on fractional successes.
    low = proportion_low(mean, needed)
    assert low > bound
    assert needed == 1 or proportion_low(mean, needed - 1) <= bound


def proportion_low(mean: float, num: int) -> float:
    """The root p < mean of |mean - p| = z sqrt(p (1 - p) / num), by bisection."""
    z = statistics.NormalDist().inv_cdf(0.975)
    below, above = 0.0, mean
    for _ in range(200):
        middle = (below + above) / 2
        if mean - middle > z * math.sqrt(middle * (1 - middle) / num):
            below = middle
        else:
            above = middle
    return below


def test_no_number_of_trials_shows_what_is_not_so() -> None:
    assert trials_needed(0.5, 0.5) is None
    assert trials_needed(0.3, 0.5) is None
    # 1.96² / 4 / 0.1² = 96.04
    assert trials_needed(0.6, 0.5) == 97
