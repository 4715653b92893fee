"""A baseline for reward models that only uses lengths."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from xray_runtime.data.pairs import PreferenceExample


def length_baseline_accuracy(train: Iterable[PreferenceExample], heldout: Iterable[PreferenceExample]) -> float:
    """Held-out accuracy of the rule "longer is better" or "shorter is better", whichever fits `train`; ties half."""

    def longer_preferred(pairs: Iterable[PreferenceExample]) -> float:
        texts = (pair.texts for pair in pairs)
        gaps = np.fromiter((len(chosen.split()) - len(rejected.split()) for chosen, rejected in texts), np.int64)
        return float(((gaps > 0) + 0.5 * (gaps == 0)).mean()) if len(gaps) else 0.5

    accuracy = longer_preferred(heldout)
    return accuracy if longer_preferred(train) >= 0.5 else 1.0 - accuracy
