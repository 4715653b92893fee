"""A policy learns to think rightly before it answers, through the real command, with each family's template."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import xray


@pytest.mark.long
@pytest.mark.parametrize("template", ["qwen3", "chatml", "r1, special think tokens"])
def test_grpo_learns_by_the_reasoning(tmp_path: Path, template: str) -> None:
    """The right thought and the right answer come half of the time each, and each is worth 1."""
    output = str(tmp_path / "run")
    flow = "tests.e2e.thinking:thinking"
    run = xray("run", flow, "--set", f"template={template}", "--output", output, "--json")
    assert run.code == 0, run.err
    evaluation = run.lifecycle["evaluation"]
    # As a person: a half for each; a reward that never found the reasoning, or the answer behind it, would be below 1.
    assert 0.5 < evaluation["reward_before"] < 1.5
    assert evaluation["reward_delta_ci95"][0] > 0.1
    assert evaluation["reasoning_length_after"] > 2
    assert xray("audit", "--all", "--output", output).code == 0
