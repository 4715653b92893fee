"""What people paste and run: the notebook, and the README's ten lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.conftest import ROOT, environment

SECONDS = 900


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment())
    *_, metrics, lineage, figure = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert "evaluate/length_after" in metrics[0]["data"]["text/plain"]
    assert "sft" in lineage[0]["text"]
    assert "image/png" in figure[0]["data"]
    stages = json.loads((tmp_path / "runs" / "notebook" / "lifecycle.json").read_text())["stages"]
    assert [stage["name"] for stage in stages] == ["prepare", "fresh_base", "sft", "ppo", "evaluate"]


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_the_readmes_ten_lines_run_as_they_are(tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "first.py").write_text(code)
    command = [sys.executable, "first.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "runs" / "first" / "lifecycle.json").read_text())
    assert [stage["name"] for stage in content["stages"]] == ["prepare", "fresh_base", "sft", "ppo", "evaluate"]
    assert content["registered"]["name"] == "first-policy"
