"""Disturbances of one lifecycle, one or two a stage: nothing is lost, nothing differs, nothing is left running. And
four in mid-episode, with an environment that never says the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.episodes import Journals, clock, lost_answers
from tests.chaos.harness import STAGES, TARGETS, Case, differences, draw, outcome, run
from tests.e2e.conftest import Outcome

SIX, TWELVE = 47, 2322
"""Seeds from which six draws have six targets, four of them killed; and the first from which twelve have every one."""


@pytest.fixture(scope="module")
def calm(first: Outcome, output: Path) -> dict[str, Any]:
    return outcome(output.with_name("undisturbed"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("seed", "num_blows", "num_targets"),
    [(SIX, 6, 6), pytest.param(TWELVE, 12, len(TARGETS), marks=pytest.mark.long)],
    ids=["six", "twelve"],
)
def test_nothing_is_lost(calm: dict[str, Any], tmp_path: Path, seed: int, num_blows: int, num_targets: int) -> None:
    cases = [draw(seed + i, (STAGES * 2)[i]) for i in range(num_blows)]
    assert len({case.target for case in cases}) == num_targets
    met = run(tmp_path / "storm", cases)
    log = (tmp_path / "storm.log").read_text()
    (tmp_path / "blows.txt").write_text("\n".join(map(str, met)))
    said = "\n".join([*map(str, met), log])
    assert differences(calm, outcome(tmp_path / "storm")) == [], said
    # Some processes heed SIGTERM without ending.
    assert sum(blow.hit for blow in met) >= num_blows * 2 // 3, said


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_no_answer_of_an_open_episode_is_lost(tmp_path: Path) -> None:
    """The short form of `tests.chaos.episodes`; in unit tests `stages/test_episodes.py` kills in mid-episode too."""
    journals, targets = Journals(), ("environment", "generator", "learner", "driver")
    cases = [Case(n, target, "kill", f"ppo-{1 + n // 2}", 1.0) for n, target in enumerate(targets)]
    met = run(tmp_path / "clock", cases, clock(tmp_path, journals))
    assert [blow.hit for blow in met] == [True] * 4, "\n".join(map(str, met))
    assert sum(map(len, journals.answers.values())) > 0
    assert lost_answers(tmp_path / "clock", journals) == []
