"""Several sources of reward as one number a reply. Shapes: B replies."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def overlong_penalty(lengths: torch.Tensor, max_tokens: int, buffer: int) -> torch.Tensor:
    """DAPO's soft punishment (Yu et al. 2025) of replies of `lengths` [B]: 0 up to `max_tokens` − `buffer`, then
    linearly to −1 at `max_tokens`."""
    return -((lengths - (max_tokens - buffer)) / buffer).clamp(0, 1)


def weighted_sum(
    scores: Mapping[str, torch.Tensor],
    weights: Mapping[str, float],
    moments: Mapping[str, tuple[float, float]] | None = None,
) -> torch.Tensor:
    """Σ weight · (score − mean) / deviation over the sources [B].

    Args:
        scores: source → its score of each reply [B].
        weights: source → weight.
        moments: source → (mean, deviation) to scale it by; a source that is not in it counts as it is.
    """
    moments = moments or {}
    total = torch.zeros_like(next(iter(scores.values())))
    for source, score in scores.items():
        mean, deviation = moments.get(source, (0.0, 1.0))
        total = total + weights[source] * (score - mean) / deviation
    return total
