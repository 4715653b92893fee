"""Every lesson runs to its end as it stands, and what it is to learn is learned; the loop of one file too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, environment, xray

LESSONS = sorted(path.stem for path in (ROOT / "examples" / "lessons").glob("[0-9]*.py"))
MEASURED = {
    "01_first_graph": ("perplexity", "fresh_base", "sft", -1),
    "02_own_data": ("pass_at_1", "fresh_base", "sft", 1),
    "06_tools": ("success", "sft", "ppo", 1),
}
"""Lesson → what its suites measure, of the policy before and the one after, and whether more or less of it is better;
the others have an evaluation."""


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
    metric, before, after, sign = MEASURED[lesson]
    table: dict[str, Any] = outcome.lifecycle["evaluations"]
    column = table["columns"].index(metric)
    found = {row["policy"]: row["numbers"][column] for row in table["rows"]}
    (_, low, high), (_, low_after, high_after) = found[before], found[after]
    assert low_after > high if sign > 0 else high_after < low


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_standalone_loop_learns() -> None:
    command = [sys.executable, "examples/standalone_loop.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=800, check=True)
    last = re.search(r"([\d.]+) → ([\d.]+) \(\d+ s\)", done.stdout.splitlines()[-1])
    assert last is not None
    assert float(last[2]) - float(last[1]) > 0.3
