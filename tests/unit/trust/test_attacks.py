"""Every attack on what the nightly flow learns from is refused with a named finding, or bounded by a number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.live.cycles import ran
from tests.unit.trust.attacks import (
    ACCEPTED,
    BEFORE_A_CYCLE,
    HOURLY,
    ON_DISK,
    before_a_cycle,
    on_disk,
    poisonings,
    read_by_a_cycle,
    sent,
    two_segments,
)
from xray.flows.cycles import read_cycles
from xray_runtime.data.pairs import Example, Pairs
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.kinds.signed_files import SignedDirectories
from xray_runtime.kernel.graph.artifacts import Feedback
from xray_runtime.kernel.history.signed_files import LOG_EVERY
from xray_runtime.live.feedback.session import read_sessions
from xray_runtime.methods.curate import recorded_data
from xray_runtime.methods.curate.config import RecordedPromptsConfig
from xray_runtime.methods.curate.kind import RecordedPromptsInputs
from xray_runtime.trust import log
from xray_runtime.trust.audit.checks.comparisons import check_comparisons
from xray_runtime.trust.keys import trusted_keys


@pytest.mark.parametrize("name", ON_DISK)
def test_an_attack_on_the_store_is_named(name: str, tmp_path: Path) -> None:
    found = on_disk(name, two_segments(tmp_path / "run"), two_segments(tmp_path / "other"))
    assert found.came_of_it.startswith("refused: ")


@pytest.mark.parametrize("name", BEFORE_A_CYCLE)
def test_an_attack_before_a_cycle_is_named(name: str, tmp_path: Path) -> None:
    output = before_a_cycle(tmp_path / "run")
    read_sessions(output)
    read_cycles(output)
    found = read_by_a_cycle(name, output)
    assert found.came_of_it.startswith("refused: ")
    assert "\n" not in found.came_of_it


@pytest.mark.parametrize("name", [*(name for name in BEFORE_A_CYCLE if "cycle" not in name), "removed"])
def test_an_audit_finds_changed_verdicts(name: str, tmp_path: Path) -> None:
    output = before_a_cycle(tmp_path / "run")
    [session] = read_sessions(output)
    session.log()

    def found() -> list[str]:
        verifier = Verifier(trusted_keys(output))
        return [each.code for each in check_comparisons(output, log.view(output), verifier)]

    assert found() == []
    shutil.rmtree(session.directory) if name == "removed" else BEFORE_A_CYCLE[name](output)
    assert found() == ["comparison-broken"]


def test_the_log_names_every_25th_change(tmp_path: Path) -> None:
    output = before_a_cycle(tmp_path / "run")
    [session] = read_sessions(output)
    changes = 3
    for number in range(LOG_EVERY):
        session.judge(0, f"judge {number}", "1")
        changes += 1
        [logged] = log.view(output).state(SignedDirectories).values() if changes >= LOG_EVERY else [None]
        assert (logged and logged.changes) == (LOG_EVERY if changes >= LOG_EVERY else None)
    # Nothing is written where the log names it already.
    session.log()
    before = (output / "log.jsonl").read_bytes()
    session.log()
    assert (output / "log.jsonl").read_bytes() == before
    assert log.view(output).state(SignedDirectories)[f"feedback/{session.name}"].changes == changes


def test_hostile_feedback_is_refused_or_bounded(tmp_path: Path) -> None:
    found = dict(sent(tmp_path))
    assert ACCEPTED not in found.values()
    assert found["the same feedback sent three times"] == "bounded: kept 1 time"
    assert found[f"a flood by one user, {HOURLY} an hour allowed"] == f"bounded: {HOURLY} of 10 kept"
    assert found["30 invented users on one answer"].startswith("bounded: 19 kept")


def test_poison_is_bounded_and_would_not_be_without_the_rule() -> None:
    for found in poisonings():
        assert found.share <= found.most + 1e-9, found
        assert found.without > found.most or "near-copies" in found.attack, found


def test_a_flood_does_not_choose_the_prompts_that_candidates_are_judged_on(tmp_path: Path) -> None:
    rows = [
        {"id": f"{who} {n}", "asker": who, "prompt": [{"role": "user", "content": f"{who} asks {n}"}], "reply": "r"}
        for who, count in [*((f"person {p}", 8) for p in range(40)), ("eve", 3000)]
        for n in range(count)
    ]
    feedback = tmp_path / "feedback"
    feedback.mkdir()
    (feedback / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares = {}
    for most in (0.1, None):
        config = RecordedPromptsConfig(heldout_fraction=0.25, max_share=most)
        ran(
            recorded_data.prompts, config, RecordedPromptsInputs([Feedback(feedback)], []), tmp_path / f"prompts {most}"
        )
        asked = [one.prompt[0]["content"] for one in Pairs(tmp_path / f"prompts {most}" / "heldout.arrow", Example)]
        shares[most] = sum(text.startswith("eve") for text in asked) / len(asked)
    assert shares[None] > 0.8
    assert 0 < shares[0.1] <= 0.1
