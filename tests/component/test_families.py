"""A few rows of the table of families, on real engines: what the page says of them still holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.families import RESULTS, Row, read_results, run_row
from tests.component.models import RUN_ID


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "mamba2", "deepseek_v3"])
def test_a_row_is_what_the_page_says(cluster: None, tmp_path: Path, name: str) -> None:
    row = Row(name, tmp_path, RUN_ID)
    run_row(row)
    expected = read_results(RESULTS)[name]
    assert row.results == {cell: text for cell, text in expected.items() if cell != "date"}
