"""Every command on graphs of one's own, through `benchmarks.any_graph`: a kind of one's own, and SFT alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.any_graph import CELLS
from tests.e2e.conftest import ROOT, environment


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["own kind", "SFT alone"])
def test_every_command_works_on_a_graph(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.any_graph", "--output", str(tmp_path), "--graphs", name]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    cells = json.loads((tmp_path / "any_graph.json").read_text())["graphs"][name]
    assert {cell: found["error"] for cell, found in cells.items()} == dict.fromkeys(CELLS)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith(f"| {name} | ok, ")
