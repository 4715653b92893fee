"""The command's manners: bad input and failures; `test_lifecycle` interrupts and kills it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import xray
from tests.message_texts import Messages


@pytest.mark.long  # it starts a run; what needs none is in `tests/unit/cli`
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, message_texts: Messages) -> None:
    """Found by the run's own process on its Ray."""
    bad = ["configs/tiny.yaml", "--set", "runtime.cpus_per_workhorse=1000"]
    outcome = xray("run", *bad, "--output", str(tmp_path / "run"), timeout=60)
    assert outcome.code == 2
    message_texts.check(outcome.err.strip())
    assert not (tmp_path / "run").exists()


def test_a_failed_stage_says_why_and_exits_with_1(tmp_path: Path) -> None:
    broken = ["--set", "data.min_chars=59"]
    outcome = xray("run", "configs/tiny.yaml", *broken, "--output", str(tmp_path), timeout=300)
    assert outcome.code == 1
    assert "data:" in outcome.err
    assert "pairs are left of 3386" in outcome.err
    assert "Traceback" not in outcome.err
    assert '"status": "failed"' in (tmp_path / "lifecycle.json").read_text()
