"""The lifecycle of `configs/long.yaml`, whose models share the tokens of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.harness import Case, Lifecycle, nothing_is_lost, outcome, run
from tests.e2e.conftest import xray

LONG = Lifecycle(config="configs/long.yaml")


@pytest.mark.long
def test_it_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    """After a killed command, and after a lost rank of the policy; the audit finds nothing."""
    run(tmp_path / "calm", [], LONG)
    cases = [Case(0, "supervisor", "kill", "sft", 1.0), Case(1, "learner", "kill", "ppo-1", 1.0)]
    nothing_is_lost(outcome(tmp_path / "calm"), tmp_path, cases, LONG)
    audit = xray("audit", "--all", "--output", str(tmp_path / "faults"))
    assert audit.code == 0, audit.err
