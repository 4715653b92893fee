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
    return float(1.0 - variance(returns - values) / total) if total != 0 else 0.0


def bootstrap_interval(x: Tensor, num_samples: int, seed: int) -> tuple[float, float, float]:
    """(mean, low, high) of `x` [n]: percentile bootstrap, 95% (Efron 1979), over resampled items."""
    return bootstrap_ratio(x, torch.ones_like(x), num_samples, seed)


def bootstrap_ratio(x: Tensor, y: Tensor, num_samples: int, seed: int) -> tuple[float, float, float]:
    """(ratio, low, high) of Σ`x` / Σ`y` [n] each: percentile bootstrap, 95%, over resampled pairs."""
    x, y = x.double(), y.double()
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(x), (num_samples, len(x)), generator=generator)
    ratios = x[index].sum(-1) / y[index].sum(-1)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(x.sum() / y.sum()), low, high


def pass_at_k(n: int, correct: Tensor, k: int) -> Tensor:
    """Unbiased estimate [P] float64 of the probability that one of `k` ≤ `n` samples of a problem is right, given that
    `correct` [P] of `n` samples are: 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, "Evaluating large language models
    trained on code"), as a product that no binomial overflows.

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


def variety(tokens: Tensor, lengths: Tensor, phrase: int) -> tuple[float, float]:
    """How varied B replies are: (mean over replies of distinct-2 within each (Li et al. 2016), 1 where one has no pairs
    of tokens; largest share of replies that hold the same `phrase` tokens in a row, 0 where none is so long). `tokens`
    [N] int64 are those of all replies in order, of `lengths` [B]."""
    count = len(lengths)
    reply = torch.repeat_interleave(torch.arange(count), lengths)
    pairs, of_pair = _runs(tokens, reply, 2)
    different = torch.bincount(torch.unique(pairs * count + of_pair) % count, minlength=count)
    within = torch.where(lengths > 1, different / (lengths - 1).clamp(min=1), 1.0)
    runs, of_run = _runs(tokens, reply, phrase)
    # Each reply counts once for a run that it holds.
    holders = torch.bincount(torch.unique(runs * count + of_run) // count)
    return float(within.double().mean()), float(holders.max() / count) if len(holders) else 0.0


def _runs(tokens: Tensor, reply: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(a number for each run of `length` tokens within a reply, the same for equal runs; which reply it is of)."""
    numbers = torch.zeros(max(len(tokens) - length + 1, 0), dtype=torch.int64)
    for offset in range(length):
        following = tokens[offset : offset + len(numbers)]
        numbers = torch.unique(numbers * (int(tokens.max()) + 1) + following, return_inverse=True)[1]
    inside = reply[: len(numbers)] == reply[length - 1 :]
    return numbers[inside], reply[: len(numbers)][inside]


def wilson_interval(mean: float, num: int) -> tuple[float, float]:
    """(low, high) of a share `mean` of `num` > 0 trials, 95% (Wilson 1927).

    Unlike a bootstrap's it has a width where all trials agree, so a handful can be told. Trials that count half make it
    wider than need be, never too narrow.
    """
    z2 = 1.959964**2
    centre = (mean + z2 / (2 * num)) / (1 + z2 / num)
    half = math.sqrt(z2 * (mean * (1 - mean) / num + z2 / (4 * num**2))) / (1 + z2 / num)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def trials_needed(mean: float, bound: float) -> int | None:
    """How many trials with a share `mean` it takes for `wilson_interval` to begin above `bound`; None: none are enough.

    The score test, which that interval inverts: (mean − bound) / √(bound (1 − bound) / num) > z.
    """
    if mean <= bound:
        return None
    return math.floor(1.959964**2 * bound * (1 - bound) / (mean - bound) ** 2) + 1
