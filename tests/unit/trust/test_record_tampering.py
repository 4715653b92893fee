"""Every falsification beside the checkpoints is named; what the docs say is not covered is not mistaken for one.

XRAY_TAMPER_CASES=500 runs two hundred.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.trust.commands import xray
from tests.unit.trust.record_tampering import NOT_COVERED, RECORD_CASES, edit_json
from tests.unit.trust.synthetic import Lifecycle
from xray_runtime.kernel.history.audit_check import meanings
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.trust.audit.checkpoints import audit

COUNT = 200 if int(os.environ.get("XRAY_TAMPER_CASES", "60")) >= 500 else len(RECORD_CASES)


@pytest.mark.parametrize("seed", range(COUNT))
def test_tampering_with_records_is_named(seed: int, fresh: Callable[[], Path]) -> None:
    output = fresh()
    name = list(RECORD_CASES)[seed % len(RECORD_CASES)]
    expected = RECORD_CASES[name](random.Random(seed), output)
    result = audit(open_lineage_store(output, None))
    found = {finding.code for finding in result.findings}
    assert found & expected, f"{name}: expected one of {expected}, found {found}"
    # What is named by a note alone leaves the audit sound.
    assert result.is_sound == all(meanings()[code].is_note for code in found), f"{name}: {found}"


@pytest.mark.parametrize("name", NOT_COVERED)
def test_changes_outside_the_audits_scope_are_no_findings(name: str, fresh: Callable[[], Path]) -> None:
    output = fresh()
    before = {finding.code for finding in audit(open_lineage_store(output, None)).findings}
    NOT_COVERED[name](random.Random(0), output)
    result = audit(open_lineage_store(output, None))
    assert result.is_sound
    assert {finding.code for finding in result.findings} <= before


def test_only_a_head_that_was_kept_tells_of_an_older_state_put_back(fresh: Callable[[], Path]) -> None:
    """All of it together is consistent, and signed."""
    output = fresh()
    older = Path(shutil.copytree(output, output.parent / "older"))
    lifecycle = Lifecycle(output)
    lifecycle.add("late", "ppo", {"x": b"late"}, {})
    edit_json(output / "lifecycle.json", run_id=lifecycle.run_id, **lifecycle.facts())
    lifecycle.end()
    newer = audit(open_lineage_store(output, None))
    assert newer.is_sound
    # This process has the database open: the older content is put into the file that it reads.
    with closing(sqlite3.connect(older / "mlflow.db")) as before, closing(sqlite3.connect(output / "mlflow.db")) as now:
        before.backup(now)
    (output / "mlflow.db").replace(older / "mlflow.db")
    shutil.rmtree(output)
    older.rename(output)
    assert audit(open_lineage_store(output, None)).is_sound
    found = audit(open_lineage_store(output, None), expect=newer.log)
    assert [(f.code, f.detail) for f in found.findings if f.is_broken] == [
        ("log-shorter", "it has 11 entries and had 14 (--expect)")
    ]
    assert xray("audit", "--all", "--output", output, "--expect", newer.log).exit_code == 1
    assert xray("audit", "--all", "--output", output, "--expect", "7").exit_code == 2
