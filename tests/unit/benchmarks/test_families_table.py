"""The table of families: every family has a row, and the page is what was found."""

from __future__ import annotations

from pathlib import Path

from benchmarks.families import CELLS, RESULTS, page, read_results
from benchmarks.family_recipes import RECIPES, model_type
from xray_runtime.models.family import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "families-table.md"


def test_every_listed_type_has_a_row() -> None:
    """Models that read pictures have rows of pictures, which this table does not try."""
    families = [FAMILIES.get(name) for name in FAMILIES]
    listed = {kind for family in families if family.pictures is None for kind in family.model_types}
    assert listed <= {model_type(row) for row in RECIPES}
    assert len(RECIPES) >= 40


def test_the_page_is_made_of_the_results() -> None:
    results = read_results(RESULTS)
    assert PAGE.read_text(encoding="utf-8") == page(results)
    assert all(found.keys() == {*CELLS, "date"} for found in results.values())
