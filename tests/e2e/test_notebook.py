"""What people paste and run: the first hour as a notebook, and the README's ten lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.e2e.conftest import ROOT, environment
from xray_runtime.kernel.store.location import locate

SECONDS = 900
MODEL = "smollm2-135m"


def write_small_model(directory: Path) -> None:
    """A random Llama of three layers with SmolLM2's tokens."""
    place, file = locate(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    ends: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_first_hour_runs_with_a_small_model_in_place_of_the_real_one(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    write_small_model(tmp_path / "model")
    [cell] = [cell for cell in notebook.cells if f'MODEL = "{MODEL}"' in cell.source and cell.cell_type == "code"]
    cell.source = cell.source.replace(MODEL, str(tmp_path / "model"))
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment())
    sft, accuracy, *curves, last = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"][2:]
    for outputs in (sft, *curves):
        assert any("image/png" in output.get("data", {}) for output in outputs)
    shown = [output["data"]["text/plain"] for output in accuracy if "data" in output]
    assert "heldout_accuracy" in shown[-1]
    printed = "".join(output["text"] for output in last if output.get("name") == "stdout")
    assert [line.split()[0] for line in printed.splitlines() if "gold_after" in line] == ["ppo", "grpo", "far"]
    content = json.loads((tmp_path / "runs" / "first-hour" / "lifecycle.json").read_text())
    assert [stage["name"] for stage in content["stages"]] == ["evaluate-ppo", "evaluate-grpo", "evaluate-far"]
    assert content["registered"]["alias"] == "candidate"


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
