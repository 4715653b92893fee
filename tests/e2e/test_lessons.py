"""Every lesson runs to its end as it stands, and what it is to learn is learned; the loop of one file too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, environment, xray

LESSONS = sorted(path.stem for path in (ROOT / "examples" / "lessons").glob("[0-9]*.py"))
MEASURED = {
    "01_first_graph": ("perplexity", -1),
    "02_own_data": ("pass@1", 1),
    "06_tools": ("success", 1),
}
"""Lesson → what its two suites measure, and whether more of it is better; the others have an evaluation."""


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_and_learns(lesson: str, tmp_path: Path) -> None:
    name = f"examples.lessons.{lesson}:{lesson.partition('_')[2]}"
    outcome = xray("run", name, "--output", str(tmp_path / "run"), "--json", timeout=2300)
    assert outcome.code == 0, outcome.err
    if lesson not in MEASURED:
        assert outcome.lifecycle["evaluation"]["reward_delta_ci95"][0] > 0
        return
    metric, sign = MEASURED[lesson]
    table: dict[str, Any] = outcome.lifecycle["evaluations"]
    column = table["columns"].index(metric)
    before, after = (row["numbers"][column][0] for row in table["rows"])
    assert sign * (after - before) > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_standalone_loop_learns() -> None:
    command = [sys.executable, "examples/standalone_loop.py", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=800, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["after"] - found["before"] > 0.3, re.sub(r"\n+", "\n", done.stderr)[-2000:]
