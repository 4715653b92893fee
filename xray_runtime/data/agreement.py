"""Agreement of people who judge the same things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


def krippendorff_alpha(units: Iterable[Sequence[Hashable]]) -> float | None:
    """Krippendorff's α for nominal values: 1 − observed / expected disagreement (Krippendorff 2011, section C).

    Args:
        units: the values that the judges of each unit gave; units with fewer than two are not pairable.

    Returns:
        1: the judges agree; 0: as by chance; None: fewer than two different values were given, so chance is undefined.
    """
    totals, total, disagreeing = Counter[Hashable](), 0, 0.0
    for values in units:
        size = len(values)
        if size < 2:
            continue
        counts = Counter(values)
        totals += counts
        total += size
        disagreeing += (size * size - sum(n * n for n in counts.values())) / (size - 1)
    expected = total * total - sum(n * n for n in totals.values())
    return 1.0 - (total - 1) * disagreeing / expected if expected else None
