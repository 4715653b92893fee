"""Models that share GPUs, on real Ray with fake GPUs: where their ranks are, and in which order they are built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """`ROLE-NUMBER` → the note of that Workhorse."""
    command = [sys.executable, "-m", "tests.component.fake_gpus", str(tmp_path_factory.mktemp("models"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_plan_has_the_gpus_that_ray_has(tmp_path: Path) -> None:
    """Not those of nvidia-smi, which sees all eight; which of them Ray has it does not say, so the smallest counts."""
    command = [sys.executable, "-m", "tests.component.one_of_eight_gpus", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"cuda 1 1 {80_000 * 2**20}"


def test_two_ranks_of_a_model_never_share_a_gpu_and_models_do(notes: dict[str, dict[str, Any]]) -> None:
    for rank in (0, 1):
        # Two ranks of a model on one GPU: NCCL refuses them. Policy and generator on the same ones: CUDA IPC works.
        assert {tuple(notes[f"{role}-{rank}"]["gpus"]) for role in ("policy", "reference", "generator")} == {
            tuple(notes[f"policy-{rank}"]["gpus"])
        }
    assert notes["policy-0"]["gpus"] != notes["policy-1"]["gpus"]


def test_nothing_else_is_built_while_a_generator_starts(notes: dict[str, dict[str, Any]]) -> None:
    # vLLM would count the memory of others as its own.
    generator = max(note["end"] for note in notes.values() if note["role"] == "generator")
    others = [note["begin"] for note in notes.values() if note["role"] != "generator"]
    assert generator <= min(others)
