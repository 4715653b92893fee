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
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The machine, and the notes of its Workhorses."""
    command = [sys.executable, "-m", "tests.component.fake_gpus", str(tmp_path_factory.mktemp("models"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-2:]


@pytest.fixture(scope="module")
def notes(printed: list[str]) -> dict[str, dict[str, Any]]:
    """`ROLE-NUMBER` → the note of that Workhorse."""
    found: dict[str, dict[str, Any]] = json.loads(printed[-1])
    return found


def test_a_plan_has_the_gpus_that_ray_has(printed: list[str]) -> None:
    """Not those of nvidia-smi, which sees all eight; which of them Ray has it does not say, so the smallest counts."""
    assert printed[-2] == f"cuda 4 4 {80_000 * 2**20}"


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
