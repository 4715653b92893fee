"""Disturbances of one lifecycle, one or two a stage: nothing is lost, nothing differs, nothing is left running. And
four in mid-episode, with an environment that never says the same again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import in_flight
from tests.chaos.episodes import Journals, clock, lost_answers
from tests.chaos.harness import STAGES, TARGETS, Case, draw, nothing_is_lost, outcome, run
from tests.e2e.conftest import Outcome

TWELVE = 2322
"""The first seed from which twelve draws have every target."""


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_twelve_faults_lose_nothing(first: Outcome, output: Path, tmp_path: Path) -> None:
    """A chosen few are in `test_lifecycle`, beside the undisturbed lifecycle that they are held against."""
    cases = [draw(TWELVE + i, (STAGES * 2)[i]) for i in range(12)]
    assert {case.target for case in cases} == TARGETS.keys()
    nothing_is_lost(outcome(output.with_name("undisturbed")), tmp_path, cases)


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


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_replies_in_flight_keep_what_was_recorded(tmp_path: Path) -> None:
    """The short form of `tests.chaos.in_flight`: a kill of each process, and replays of the run that met them."""
    cases = [Case(n, target, "kill", in_flight.STAGE, 1.0) for n, target in enumerate(sorted(in_flight.VICTIMS))]
    hits, lost = in_flight.checked(tmp_path / "in-flight", cases)
    assert lost == []
    assert hits >= 3
