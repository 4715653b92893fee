"""What a reward model has to beat: a rule that only looks at lengths."""

from __future__ import annotations

from collections.abc import Sequence

from xray_runtime.data.pairs import PreferenceExample


def length_baseline_accuracy(train: Sequence[PreferenceExample], heldout: Sequence[PreferenceExample]) -> float:
    """Held-out accuracy of the rule "longer is better" or "shorter is better", whichever fits `train`; ties half."""

    def longer_preferred(pairs: Sequence[PreferenceExample]) -> float:
        gaps = [len(p.chosen.split()) - len(p.rejected.split()) for p in pairs]
        return sum(1.0 if g > 0 else 0.5 if g == 0 else 0.0 for g in gaps) / len(gaps) if gaps else 0.5

    accuracy = longer_preferred(heldout)
    return accuracy if longer_preferred(train) >= 0.5 else 1.0 - accuracy
