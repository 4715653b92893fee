"""Sweeps of tests: a diagonal of a table at every change, the rest of it on request (`make test-long`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def sweep(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """(row, column) of every cell; each row and each column has a cell that is not long."""
    size = min(len(rows), len(columns))
    return [
        pytest.param(row, column, marks=() if (m - n) % size == 0 else pytest.mark.long)
        for m, row in enumerate(rows)
        for n, column in enumerate(columns)
    ]
