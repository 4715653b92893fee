"""Several sources of reward as one number a reply, and the moments to scale it by. Shapes: B replies.

A score that failed is NaN, and so is the reward of its row: callers leave such rows out, as if they were
absent. A source that does not apply to a row is another thing: it contributes nothing there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xray_runtime.kernel.errors import NonFiniteError


@dataclass(frozen=True)
class SourceScores:
    """The sources' scores of a batch of replies."""

    values: Mapping[str, Tensor]
    """Source → its raw score of each reply [B] float32; NaN where it has none."""
    applies: Mapping[str, Tensor]
    """Source → whether it applies to each reply [B] bool."""
    disagreements: Mapping[str, Tensor] = field(default_factory=dict)
    """Source that is an ensemble → the deviation of its members' scores of each reply [B]."""
    failures: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    """Source that may fail → why it has no score of each reply [B]; None where it has one, or does not apply."""

    refused: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    """Source that runs code → whether the code of each reply used what the sandbox refuses [B]."""
    num_replies: int = 0
    """B, where there is no source."""

    def failed(self, source: str) -> Tensor:
        """True for each reply whose score by `source` failed [B] bool."""
        return self.applies[source] & self.values[source].isnan()


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """DAPO's soft punishment (Yu et al. 2025) of replies of `lengths` [B]: 0 up to `max_tokens` − `buffer`, then
    linearly to −1 at `max_tokens`."""
    return -((lengths - (max_tokens - buffer)) / buffer).clamp(0, 1)


def lowest_where_cut(rewards: Tensor, ended: Tensor) -> Tensor:
    """Rewards [B] in which a reply that was cut off gets at most the lowest reward of one that `ended` [B] bool; if
    none ended, all get the lowest."""
    finished = rewards[ended] if ended.any() else rewards
    return torch.where(ended, rewards, rewards.clamp(max=float(finished.min())))


def weighted_sum(
    scores: SourceScores, weights: Mapping[str, float], moments: Mapping[str, tuple[float, float]] | None = None
) -> Tensor:
    """Σ weight · (score − mean) / deviation over the sources that apply [B].

    NaN where one of them has no score, and where none applies. A source of weight 0 does not count at all; where none
    counts, all are 0.

    Args:
        weights: source → weight.
        moments: source → (mean, deviation) to scale it by; a source that is not in it counts as it is.
    """
    moments = moments or {}
    first = next(iter(scores.values.values()), torch.zeros(scores.num_replies))
    if not any(weights.values()):
        return torch.zeros_like(first)
    total, any_applies = torch.zeros_like(first), torch.zeros_like(first, dtype=torch.bool)
    for source, score in scores.values.items():
        if weights[source] == 0.0:
            continue
        mean, deviation = moments.get(source, (0.0, 1.0))
        applies = scores.applies[source]
        total = total + torch.where(applies, weights[source] * (score - mean) / deviation, 0.0)
        any_applies = any_applies | applies
    return torch.where(any_applies, total, torch.nan)


@dataclass(frozen=True)
class ModelScores:
    """The scores of a reward model, or of several together."""

    values: Tensor
    """[B] float32."""
    mean: float = 0.0
    std: float = 1.0
    """Mean and deviation of its scores of held-out replies."""
    disagreement: Tensor | None = None
    """The deviation of an ensemble's members [B]."""


def ensemble(members: Sequence[ModelScores], uncertainty: float) -> ModelScores:
    """Mean − `uncertainty` · variance over the standardized scores of an ensemble's members: uncertainty-weighted
    optimization (Coste et al. 2023, "Reward model ensembles help mitigate overoptimization"), with the population's
    variance."""
    each = torch.stack([(of.values - of.mean) / of.std for of in members])
    values = each.mean(0) - uncertainty * each.var(0, correction=0)
    return ModelScores(values, disagreement=each.std(0, correction=0))


def statistics(scores: SourceScores) -> dict[str, dict[str, float]]:
    """Source → `mean`, `std` (population), `min` and `max` of its scores, where it has any, how many `failed`; of an
    ensemble the members' mean `disagreement`; and how many replies' code used what the sandbox has `refused`."""
    found: dict[str, dict[str, float]] = {}
    for source, values in scores.values.items():
        there = values[scores.applies[source] & ~values.isnan()].double()
        numbers = {"failed": float(scores.failed(source).sum())}
        if len(there):
            numbers |= {"mean": float(there.mean()), "std": float(there.std(correction=0))}
            numbers |= {"min": float(there.min()), "max": float(there.max())}
        if source in scores.disagreements:
            numbers["disagreement"] = float(scores.disagreements[source].double().mean())
        if source in scores.refused:
            numbers["refused"] = float(sum(scores.refused[source]))
        found[source] = numbers
    return found


@dataclass
class MovingMeans:
    """The moving mean of each seat's scores, 0 at first; its state is saved with the stage."""

    means: dict[str, float] = field(default_factory=dict)

    def take(self, scores: Tensor, seats: Sequence[str], decay: float = 0.95) -> Tensor:
        """m of each score's seat [B] from before these scores, which m then takes in: m ← decay m + (1 − decay) r, once
        a score, each with the mean of its seat's scores in place of its own."""
        before = torch.tensor([self.means.get(seat, 0.0) for seat in seats], dtype=torch.float64)
        for seat in sorted(set(seats)):
            of_seat = scores.double()[torch.tensor([name == seat for name in seats])]
            kept = decay ** len(of_seat)
            self.means[seat] = kept * self.means.get(seat, 0.0) + (1 - kept) * float(of_seat.mean())
        return before


@dataclass
class RunningMoments:
    """Mean and population deviation of all batches so far (Chan, Golub & LeVeque 1979); the three fields are the whole
    state."""

    count: int = 0
    mean: float = 0.0
    sum_squares: float = 0.0
    """Σ (x − mean)²."""

    def update(self, batch: Sequence[float]) -> None:
        """Add a batch. Raises NonFiniteError: one NaN would stay in the moments for good."""
        if not batch:
            return
        if not all(map(math.isfinite, batch)):
            raise NonFiniteError("a reward in the running moments is not finite")
        n = len(batch)
        batch_mean = math.fsum(batch) / n
        batch_squares = math.fsum((x - batch_mean) ** 2 for x in batch)
        delta = batch_mean - self.mean
        total = self.count + n
        self.sum_squares += batch_squares + delta * delta * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    @property
    def std(self) -> float:
        """Population deviation; 1 before there are two different values, so that dividing by it is safe."""
        variance = self.sum_squares / self.count if self.count else 0.0
        return math.sqrt(variance) or 1.0
