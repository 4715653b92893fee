"""Every row of an output directory's MLflow is explained by a record, or a finding."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.mlflow_rows import ATTACKS, attack
from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.kernel.history.audit_check import read_log
from xray_runtime.kernel.history.graph import CheckpointGraph
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.trust.audit.mlflow_schema import COMPARED, IGNORED, NEVER_WRITTEN
from xray_runtime.trust.audit.tables import check_tables
from xray_runtime.trust.keys import trusted_keys
from xray_runtime.trust.signing import Verifier


@pytest.fixture(scope="module")
def known(untouched: Path) -> tuple[CheckpointGraph, LogView]:
    """Checkpoints and log, which no attack here changes."""
    view, _ = read_log(untouched, Verifier(trusted_keys(untouched)))
    return open_lineage_store(untouched, None).graph, view


def codes(output: Path, known: tuple[CheckpointGraph, LogView]) -> set[str]:
    return {finding.code for finding in check_tables(output / "mlflow.db", *known, output)}


def test_the_rows_of_a_lifecycle_are_explained(
    fresh: Callable[[], Path], known: tuple[CheckpointGraph, LogView]
) -> None:
    assert codes(fresh(), known) == set()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_row_that_nothing_explains_is_named(
    name: str, fresh: Callable[[], Path], known: tuple[CheckpointGraph, LogView]
) -> None:
    statements, code = ATTACKS[name]
    output = fresh()
    attack(output, statements)
    assert code in codes(output, known)


def test_every_table_of_mlflow_is_compared_or_left_out_for_a_reason(fresh: Callable[[], Path]) -> None:
    with contextlib.closing(sqlite3.connect(fresh() / "mlflow.db")) as database:
        tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
        columns = {table: {row[1] for row in database.execute(f"pragma table_info({table})")} for table in COMPARED}
    assert tables == COMPARED.keys() | IGNORED.keys() | NEVER_WRITTEN
    assert columns == {table: set(names.split()) for table, names in COMPARED.items()}
    assert all(IGNORED.values())
