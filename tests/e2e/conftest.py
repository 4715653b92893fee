"""Running the real command and looking for what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
XRAY = Path(sys.executable).with_name("xray")


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def lifecycle(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lifecycle") / "run"


@pytest.fixture(scope="session")
def first(output: Path) -> Outcome:
    """An undisturbed lifecycle in `output`; tests go on in there, so it is kept in `undisturbed` too."""
    outcome = run_tiny(output)
    assert outcome.code == 0, outcome.err
    shutil.copytree(output, output.with_name("undisturbed"), symlinks=True)
    return outcome


def environment() -> dict[str, str]:
    """As a person's shell: nothing of an outer run, no servers to connect to."""
    hidden = ("PREFECT_", "RAY_", "MLFLOW_", "XRAY_")
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden)}


def xray(*arguments: str, timeout: float = 900, variables: Mapping[str, str] | None = None) -> Outcome:
    environ = environment() | dict(variables or {})
    done = subprocess.run([XRAY, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout)
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_tiny(output: Path, *overrides: str) -> Outcome:
    arguments = ["run", "configs/tiny.yaml", "--output", str(output), "--json"]
    return xray(*arguments, *(part for o in overrides for part in ("--set", o)))


def edges(output: Path) -> set[tuple[str, str]]:
    """(parent, child) of the arrows on Prefect's page, from the run's own database."""
    with contextlib.closing(sqlite3.connect(output / "prefect" / "prefect.db")) as database:
        rows = list(database.execute("select id, name, task_inputs from task_run"))
    names = {str(row[0]).replace("-", ""): row[1] for row in rows}
    return {
        (names[str(parent["id"]).replace("-", "")], child)
        for _, child, inputs in rows
        for parents in json.loads(inputs).values()
        for parent in parents
        if parent["input_type"] == "task_run"
    }
