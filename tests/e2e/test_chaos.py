"""Twelve random disturbances, seeded: nothing is lost, nothing differs, nothing is left running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.harness import STAGES, differences, draw, outcome, run
from tests.e2e.conftest import Outcome

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def calm(first: Outcome, output: Path) -> dict[str, Any]:
    return outcome(output)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("storm", [0, 1])
def test_nothing_is_lost(calm: dict[str, Any], storm: int, tmp_path: Path) -> None:
    cases = [draw(100 + storm * len(STAGES) + i, stage) for i, stage in enumerate(STAGES)]
    met = run(tmp_path / "storm", cases)
    log = (tmp_path / "storm.log").read_text()
    assert differences(calm, outcome(tmp_path / "storm")) == [], "\n".join([*met, log])
