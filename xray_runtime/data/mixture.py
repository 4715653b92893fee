"""Sources drawn from by weight, the same way every time and at every length."""

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
    """Rows that are drawn at most."""


def mixed(parts: Sequence[Part[T]]) -> Iterator[tuple[int, T]]:
    """(number of the source, row): each time of the source that is furthest behind its share, the first of equals.

    Of n rows a source has its share, to within one for up to three sources. One that reached its limit leaves the rest
    to the others, by their weights; one that has no more rows ends the mixture, so that what was read has the shares
    that were asked for.
    """
    # Exact, so that no rounding decides; 0.1 is a tenth.
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
