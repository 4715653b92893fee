"""Reasons to hold a cycle of feedback for a person: it is unlike the cycles before, or its judges disagree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from xray_runtime.methods.curate.config import CurateConfig
from xray_runtime.methods.curate.signals import RATINGS, Signal

Units = Mapping[tuple[str, ...], Sequence[Signal]]


def by_unit(signals: Iterable[Signal]) -> dict[tuple[str, ...], list[Signal]]:
    """Unit → its signals, both in order."""
    units: dict[tuple[str, ...], list[Signal]] = defaultdict(list)
    for signal in signals:
        units[signal.unit].append(signal)
    return units


def alpha_of(units: Units, kind: str) -> float | None:
    """Krippendorff's α of the units of a kind, `rating` or `verdict`."""
    return krippendorff_alpha([s.label for s in votes] for unit, votes in units.items() if unit[0] == kind)


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


def drift(signals: Sequence[Signal], config: CurateConfig) -> list[str]:
    """Why the last cycle is held for a person; the checks against cycles before need one."""
    last = max((signal.cycle for signal in signals), default=0)
    new, old = [s for s in signals if s.cycle == last], [s for s in signals if s.cycle != last]
    units = by_unit(new)
    shifts = [
        f"its judges' agreement on {kind}s is α = {alpha:.3f}; at least {config.min_alpha:g} (min_alpha)"
        for kind, alpha in ((kind, alpha_of(units, kind)) for kind in ("rating", "verdict"))
        if config.min_alpha is not None and alpha is not None and alpha < config.min_alpha
    ]
    cycles = len({signal.cycle for signal in old})
    if not cycles:
        return shifts
    ratio = len(new) / (len(old) / cycles)
    most = config.max_volume_ratio
    if most is not None and not 1 / most <= ratio <= most:
        shifts.append(
            f"it has {ratio:.2f} times the feedback of the cycles before; at most {most:g} (max_volume_ratio)"
        )
    (n, good), (m, before) = _good(new), _good(old)
    if config.max_good_change is not None and n and m:
        change, together = good / n - before / m, (good + before) / (n + m)
        error = (together * (1 - together) * (1 / n + 1 / m)) ** 0.5
        if abs(change) > config.max_good_change and abs(change) > 3 * error:
            shifts.append(
                f"{good / n:.0%} of its labels are good, {before / m:.0%} before; a change of at most "
                f"{config.max_good_change:g} (max_good_change)"
            )
    return shifts


def _good(signals: Iterable[Signal]) -> tuple[int, int]:
    """(ratings, good ones)."""
    labels = [signal.label for signal in signals if signal.label in RATINGS]
    return len(labels), labels.count("up")
