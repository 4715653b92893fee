"""The lifecycle of `configs/lora.yaml`, whose generator computes the policy's adapter beside frozen weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.harness import Case, Lifecycle, nothing_is_lost, outcome, run
from tests.e2e.conftest import xray

SHORT = (
    "sft.steps=40",
    "ppo.stages.0.iterations=4",
    "ppo.stages.0.prompts_per_iteration=4",
    "ppo.stages.0.minibatch_size=32",
)
LORA = Lifecycle(config="configs/lora.yaml", overrides=SHORT)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_it_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    """After a killed command and a killed policy; the audit finds nothing, and a replay computes the same."""
    run(tmp_path / "calm", [], LORA)
    cases = [Case(0, "supervisor", "kill", "ppo-1", 1.0), Case(1, "learner", "kill", "ppo-1", 0.5)]
    nothing_is_lost(outcome(tmp_path / "calm"), tmp_path, cases, LORA)
    output = ("--output", str(tmp_path / "faults"))
    audit = xray("audit", "--all", *output)
    assert audit.code == 0, audit.err
    replay = xray("replay", "ppo-1", *output, "--json")
    assert replay.code == 0, replay.err
    assert json.loads(replay.out)["same"] is True
