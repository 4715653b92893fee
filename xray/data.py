"""Readers and writers of data on disk, for your own stage kinds. Imports no torch."""

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

__all__ = ["HELDOUT", "TRAIN", "VALIDATION", "Example", "Pairs", "PairsWriter", "PreferenceExample", "write_pairs"]
