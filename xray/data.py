"""Data on disk as stages read and write it: for stage kinds of your own. Imports no torch."""

from __future__ import annotations

from xray_runtime.data.pairs import (
    HELDOUT,
    TRAIN,
    VALIDATION,
    Example,
    Pairs,
    PairsWriter,
    PreferenceExample,
    write_pairs,
)

__all__ = [
    "HELDOUT",
    "TRAIN",
    "VALIDATION",
    "Example",
    "Pairs",
    "PairsWriter",
    "PreferenceExample",
    "write_pairs",
]
