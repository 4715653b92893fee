"""Weighted mixture of sources, deterministic and independent of its length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Part(NamedTuple, Generic[T]):
    """A source of a mixture."""

    weight: float
    rows: Iterator[T]
    limit: int | None = None
    """Maximum number of rows."""


def mixed(parts: Sequence[Part[T]]) -> Iterator[tuple[int, T]]:
    """(index of the source, row): always from the source furthest behind its share, the first one at a tie.

    After n rows each source has its share, to within one row for up to three sources. A source at its limit leaves
    further rows to the others, by weight. An exhausted source ends the mixture, so that the shares stay as configured.
    """
    # Exact fractions: 0.1 is a tenth, without rounding.
    weights = [Fraction(str(part.weight)) for part in parts]
    behind, drawn = [Fraction(0)] * len(parts), [0] * len(parts)
    active = [n for n, part in enumerate(parts) if part.limit != 0]
    while active:
        for n in active:
            behind[n] += weights[n]
        chosen = max(active, key=lambda n: behind[n])
        behind[chosen] -= sum(weights[n] for n in active)
        row = next(parts[chosen].rows, None)
        if row is None:
            return
        yield chosen, row
        drawn[chosen] += 1
        if drawn[chosen] == parts[chosen].limit:
            active.remove(chosen)
