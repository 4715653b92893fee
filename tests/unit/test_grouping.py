"""Groups of tests stay together: what a module starts is started once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.grouping import GroupScheduling

def pytest_xdist_make_scheduler(config, log):
    return GroupScheduling(config, log, lambda file, function: "both" if function == "test_last" else file)
"""
TESTS = """
import os
import time

import pytest

@pytest.mark.parametrize("number", range(4))
def test_one(number):
    time.sleep(0.1)
    with open("workers", "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], __name__, file=file)

def test_last():
    with open("workers", "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], "both", file=file)
"""


def test_the_tests_of_a_group_run_in_one_worker(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    ran = (tmp_path / "workers").read_text().splitlines()
    assert len(ran) == 10
    # One worker for each of test_a, test_b and both; without groups their tests go to and fro.
    assert len(set(ran)) == 3
