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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.e2e.exposure import Exposure, exposure_of
from tests.grouping import GroupScheduling
from tests.waiting import wait_until

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


MEASURED = "measured"
"""The property in which a test keeps what it measured."""
LONGEST = ("test_lifecycle.py", "test_studio.py", "test_faults_lose_nothing_and_leave_nothing_running")
"""Groups that begin first: tests of a file, and a lifecycle of its own, which ends like that of the first file."""


def group_of(file: str, function: str) -> str:
    return function if function in LONGEST else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        group = group_of(item.path.name, getattr(item, "originalname", ""))
        return LONGEST.index(group) if group in LONGEST else len(LONGEST)

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests measured, also where they passed: times of pages, what axe found, clicks."""
    passed = terminalreporter.getreports("passed")
    lines = [f"{r.nodeid}: {text}" for r in passed for name, text in r.user_properties if name == MEASURED]
    if lines:
        terminalreporter.section("measured")
        terminalreporter.write("\n".join(lines) + "\n")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log, group_of)


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of `first`, for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "lifecycle"
    folder.mkdir(exist_ok=True)
    return folder / "run"


@pytest.fixture(scope="session")
def watched(output: Path) -> tuple[Outcome, Exposure]:
    """An undisturbed lifecycle in `output`, and who could reach its processes while it trained. The first worker that
    wants it runs it; tests go on in there, so it is kept in `undisturbed` too."""
    record = output.with_name("watched.json")
    with FileLock(output.with_name("lock")):
        if not record.exists():
            outcome, exposure = _watched(output)
            if outcome.code == 0:
                shutil.copytree(output, output.with_name("undisturbed"), symlinks=True)
            record.write_text(json.dumps([asdict(outcome), asdict(exposure)]))
    run, exposed = json.loads(record.read_text())
    return Outcome(**run), Exposure(**exposed)


def _watched(output: Path) -> tuple[Outcome, Exposure]:
    log = output.with_name("watched.log")
    with log.open("w") as err:
        process = subprocess.Popen(
            [XRAY, *_tiny(output)], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=err, text=True
        )
    try:
        wait_until((output / "logs" / "sft" / "policy-0.log").exists, seconds=240, process=process, why=log)
        exposure = exposure_of(process.pid)
        out, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    return Outcome(process.returncode, out, log.read_text()), exposure


@pytest.fixture(scope="session")
def first(watched: tuple[Outcome, Exposure]) -> Outcome:
    """The lifecycle in `output`."""
    outcome, _ = watched
    assert outcome.code == 0, outcome.err
    return outcome


@pytest.fixture(scope="session")
def second(first: Outcome, output: Path) -> Outcome:
    """The same lifecycle with another learning rate in its last stage, after the reward model was damaged on disk."""
    [weights] = output.glob("checkpoints/reward-*/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    outcome = run_tiny(output, "ppo.stages.1.lr=1e-4")
    assert outcome.code == 0, outcome.err
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
    return xray(*_tiny(output), *(part for o in overrides for part in ("--set", o)))


def _tiny(output: Path) -> list[str]:
    return ["run", "configs/tiny.yaml", "--output", str(output), "--json"]


def to_compute(explained: Outcome) -> list[str]:
    """Stages that a run would compute."""
    assert explained.code == 0, explained.err
    lines = [line.split() for line in explained.err.splitlines()]
    return [words[0] for words in lines if words[1:2] == ["compute"]]


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
