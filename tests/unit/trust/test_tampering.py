"""Every fault that an intruder puts into an output directory is found and named; what is untouched is sound."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.commands import xray
from tests.unit.trust.synthetic import GRAPHS, Lifecycle
from tests.unit.trust.tampering import FAULTS, IN_MLFLOW, NOT_COVERED, ROWS, edit_json, sql
from xray_runtime.kernel.history.audit_check import meanings
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.trust.audit.checkpoints import Audit, audit
from xray_runtime.trust.audit.mlflow_schema import COMPARED, IGNORED, NEVER_WRITTEN


def audited(output: Path) -> Audit:
    return audit(open_lineage_store(output, None))


def codes(result: Audit) -> set[str]:
    return {finding.code for finding in result.findings if finding.is_broken}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_named(name: str, bare: Path, fresh: Callable[[], Path]) -> None:
    output = fresh() if name in IN_MLFLOW else bare
    change, expected = FAULTS[name]
    change(output)
    result = audited(output)
    found = {finding.code for finding in result.findings}
    assert found & set(expected.split())
    # What a note alone names leaves the audit sound.
    assert result.is_sound == all(meanings()[code].is_note for code in found)


@pytest.mark.parametrize(
    ("code", "statements"),
    [
        pytest.param(code, row, marks=pytest.mark.long if number else (), id=f"{code} {number}")
        for code, rows in ROWS.items()
        for number, row in enumerate(rows)
    ],
)
def test_every_row_written_past_mlflow_is_named(
    code: str, statements: tuple[str, ...], fresh: Callable[[], Path]
) -> None:
    output = fresh()
    sql(output, *statements)
    assert code in codes(audited(output))


@pytest.mark.parametrize("name", NOT_COVERED)
def test_changes_outside_the_audits_scope_are_no_findings(name: str, fresh: Callable[[], Path]) -> None:
    output = fresh()
    before = {finding.code for finding in audited(output).findings}
    NOT_COVERED[name](output)
    assert audited(output).is_sound
    assert {finding.code for finding in audited(output).findings} <= before


def test_an_untouched_lifecycle_is_sound_wherever_it_lies(untouched: Path, fresh: Callable[[], Path]) -> None:
    for output in (untouched, fresh()):
        result = audited(output)
        assert (codes(result), result.checkpoints) == (set(), 8)


@pytest.mark.parametrize(
    ("graph", "tracking"),
    [
        *((name, False) for name in GRAPHS),
        *(pytest.param(name, True, marks=() if name == "grpo" else pytest.mark.long) for name in GRAPHS),
    ],
)
def test_other_lifecycles_are_sound_too(graph: str, tracking: bool, tmp_path: Path) -> None:
    """With a second evaluation, and rebuilt after damage: nothing of it is a falsification."""
    lifecycle = Lifecycle(tmp_path / "run", tracking).whole(graph=graph)
    lifecycle.evaluate([f"question {i}" for i in range(52, 59)], lifecycle.policy)
    lifecycle.record()
    assert codes(audited(lifecycle.output)) == set()
    weights = lifecycle.done[lifecycle.policy].path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    Lifecycle(lifecycle.output, tracking).whole(graph=graph)
    assert codes(audited(lifecycle.output)) == set()


@pytest.mark.parametrize("first", [49, 55])
def test_an_evaluation_on_training_prompts_is_found_though_properly_signed(first: int, tmp_path: Path) -> None:
    asked = [f"question {i}" for i in range(first, first + 4)]
    lifecycle = Lifecycle(tmp_path / "run", tracking=False).whole(asked)
    found = codes(audited(lifecycle.output))
    assert ("evaluation-overlap" in found) == ("evaluation-foreign" in found) == (first < 50)


def test_every_table_of_mlflow_is_compared_or_left_out_for_a_reason(untouched: Path) -> None:
    with contextlib.closing(sqlite3.connect(untouched / "mlflow.db")) as database:
        tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
        columns = {table: {row[1] for row in database.execute(f"pragma table_info({table})")} for table in COMPARED}
    assert tables == COMPARED.keys() | IGNORED.keys() | NEVER_WRITTEN
    assert columns == {table: set(names.split()) for table, names in COMPARED.items()}
    assert all(IGNORED.values())


def test_only_a_head_that_was_kept_tells_of_an_older_state_put_back(fresh: Callable[[], Path]) -> None:
    """All of it together is consistent, and signed."""
    output = fresh()
    older = Path(shutil.copytree(output, output.parent / "older"))
    lifecycle = Lifecycle(output)
    lifecycle.add("late", "ppo", {"x": b"late"}, {})
    edit_json(output / "lifecycle.json", run_id=lifecycle.run_id, **lifecycle.facts())
    lifecycle.end()
    newer = audited(output)
    assert newer.is_sound
    # This process has the database open: the older content is put into the file that it reads.
    databases = sqlite3.connect(older / "mlflow.db"), sqlite3.connect(output / "mlflow.db")
    with contextlib.closing(databases[0]) as before, contextlib.closing(databases[1]) as now:
        before.backup(now)
    os.replace(output / "mlflow.db", older / "mlflow.db")
    shutil.rmtree(output)
    older.rename(output)
    assert audited(output).is_sound
    found = audit(open_lineage_store(output, None), expect=newer.log)
    assert [(f.code, f.detail) for f in found.findings if f.is_broken] == [
        ("log-shorter", "it has 11 entries and had 14 (--expect)")
    ]
    assert xray("audit", "--all", "--output", output, "--expect", newer.log).exit_code == 1
    assert xray("audit", "--all", "--output", output, "--expect", "7").exit_code == 2
