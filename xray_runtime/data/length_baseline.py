"""A baseline for reward models that only uses lengths."""

from __future__ import annotations

from collections.abc import Iterable

from xray_runtime.data.pairs import PreferenceExample


def length_baseline_accuracy(train: Iterable[PreferenceExample], heldout: Iterable[PreferenceExample]) -> float:
    """Held-out accuracy of the rule "longer is better" or "shorter is better", whichever fits `train`; ties half."""

    def longer_preferred(pairs: Iterable[PreferenceExample]) -> float:
        right, count = 0.0, 0
        for pair in pairs:
            chosen, rejected = pair.texts
            gap = len(chosen.split()) - len(rejected.split())
            count += 1
            right += 1.0 if gap > 0 else 0.5 if gap == 0 else 0.0
        return right / count if count else 0.5

    accuracy = longer_preferred(heldout)
    return accuracy if longer_preferred(train) >= 0.5 else 1.0 - accuracy
