"""Every row of the table of families, on real engines: what the page says of it still holds. A minute each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.families import RESULTS, RUNTIME, FamilyRow, read_results, run_row
from benchmarks.family_recipes import RECIPES
from benchmarks.local_models import LocalModels


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalModels]:
    with contextlib.closing(LocalModels(RUNTIME, tmp_path_factory.mktemp("logs"))) as opened:
        yield opened


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_a_row_is_what_the_page_says(models: LocalModels, tmp_path: Path, name: str) -> None:
    row = FamilyRow(name, tmp_path, models)
    run_row(row)
    expected = read_results(RESULTS)[name]
    assert _plain(row.results) == _plain({cell: text for cell, text in expected.items() if cell != "date"})


def _plain(results: dict[str, str]) -> dict[str, str]:
    """Without measured differences, whose last digits depend on the processor."""
    return {cell: re.sub(r"differ (\S+ )*by \S+ nats", "differ", text) for cell, text in results.items()}
