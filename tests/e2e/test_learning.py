"""A policy learns what it is rewarded for, through the real command: with the sign turned round this fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import xray

LESSON = "examples.lessons.05_grpo_with_a_verifier:grpo_with_a_verifier"


@pytest.mark.long
def test_grpo_learns_a_verifiable_task(tmp_path: Path) -> None:
    """Demonstrations are right half of the time; 12 iterations of 256 replies take the accuracy to some 0.8."""
    output = str(tmp_path / "run")
    run = xray("run", LESSON, "--set", "iterations=12", "--output", output, "--json")
    evaluation = run.lifecycle["evaluation"]
    assert 0.35 < evaluation["reward_before"] < 0.6
    # Half of what it gains, by the interval's lower end; a policy that does not move has its interval around 0.
    assert evaluation["reward_delta_ci95"][0] > 0.15
