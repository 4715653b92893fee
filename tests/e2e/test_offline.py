"""Graphs that learn without PPO: sampled pairs and DPO, the best of n and SFT, in rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import xray


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("example", "kinds"),
    [
        ("examples.online_dpo:online_dpo", ("preferences", "dpo")),
        ("examples.lessons.03_own_reward:own_reward", ("best_of_n", "sft")),
    ],
)
def test_each_round_learns_from_what_the_one_before_samples(
    example: str, kinds: tuple[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = ("run", example, "--output", str(output), "--json")
    outcome = xray(*run)
    assert outcome.code == 0, outcome.err
    stages = {stage["name"]: stage for stage in outcome.lifecycle["stages"]}
    assert [stage["kind"] for stage in stages.values()][3:-1] == [*kinds, *kinds]
    evaluation = outcome.lifecycle["evaluation"]
    # A third of the replies more pass than did; it was three quarters on the machine this was written on.
    assert evaluation["reward_delta_ci95"][0] > 0.3
    assert outcome.lifecycle["registered"]["name"] == f"{example.partition(':')[2].replace('_', '-')}-policy"
    assert xray("audit", "--all", "--output", str(output)).code == 0
    last = list(stages)[-2]
    drawn = xray("lineage", last, "--output", str(output))
    assert all(name in drawn.out for name in stages if name != "evaluate")
    again = xray(*run)
    assert all(stage["cached"] for stage in again.lifecycle["stages"])
