"""Statistics that evaluation and logging report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from xray_runtime.algorithms.advantages import masked_mean


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns) over valid tokens; 0 when returns do not vary."""

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)).square(), mask)

    total = variance(returns)
    return float(1.0 - variance(returns - values) / total) if total > 0 else 0.0


def bootstrap_interval(x: Tensor, num_samples: int, seed: int) -> tuple[float, float, float]:
    """(mean, low, high) of `x` [n]: percentile bootstrap, 95% (Efron 1979), over resampled items."""
    x = x.double()
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(x), (num_samples, len(x)), generator=generator)
    means = x[index].mean(-1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(x.mean()), low, high


def bootstrap_ratio(x: Tensor, y: Tensor, num_samples: int, seed: int) -> tuple[float, float, float]:
    """(ratio, low, high) of Σ`x` / Σ`y` [n] each: percentile bootstrap, 95%, over resampled pairs."""
    x, y = x.double(), y.double()
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(x), (num_samples, len(x)), generator=generator)
    ratios = x[index].sum(-1) / y[index].sum(-1)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(x.sum() / y.sum()), low, high


def pass_at_k(n: int, correct: Tensor, k: int) -> Tensor:
    """Of `n` samples of each problem `correct` [P] are right: the unbiased estimate [P] float64 of the probability that
    one of `k` ≤ `n` is, 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, "Evaluating large language models trained on
    code"), as a product that no binomial overflows.

    Raises:
        ValueError: `k` is not between 1 and `n`.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} must be from 1 to n = {n}")
    # ∏ (n − c − i) / (n − i) over i < k: none of the k is right; 0 as soon as fewer than k are wrong.
    i = torch.arange(k, dtype=torch.float64)
    wrong = n - correct.double()[:, None]
    return 1.0 - ((wrong - i).clamp(min=0) / (n - i)).prod(-1)


def wins(a: Tensor, b: Tensor) -> Tensor:
    """1 where `a` beats `b`, 0 where it loses, ½ at a tie."""
    return (a > b).double() + 0.5 * (a == b).double()


def distinct_n(replies: Sequence[Sequence[int]], n: int) -> float:
    """Share of distinct n-grams among all n-grams of all replies (Li et al. 2016); 0 when there are none."""
    grams = [tuple(reply[i : i + n]) for reply in replies for i in range(len(reply) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def wilson_interval(mean: float, num: int) -> tuple[float, float]:
    """(low, high) of a share `mean` of `num` > 0 trials, 95% (Wilson 1927).

    Unlike a bootstrap's it has a width where all trials agree, so a handful can be told. Trials that count half make it
    wider than need be, never too narrow.
    """
    z2 = 1.959964**2
    centre = (mean + z2 / (2 * num)) / (1 + z2 / num)
    half = math.sqrt(z2 * (mean * (1 - mean) / num + z2 / (4 * num**2))) / (1 + z2 / num)
    return max(centre - half, 0.0), min(centre + half, 1.0)
