"""The acceptance of a GPU, rehearsed on the CPU with a tiny model, so that no import or call fails first on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_acceptance.runner import run_all
from benchmarks.gpu_acceptance.setting import Setting
from benchmarks.gpu_acceptance.steps import STEPS, AcceptanceStep

ROOT = Path(__file__).parents[2]
GPU_ONLY = {
    *("trainer sleep", "vLLM sleep", "vLLM beside a neighbour", "in turn"),
    *("sync by IPC", "sync of LoRA by IPC", "sync of a large embedding", "sync by NCCL"),
}
BARE = """import sys
sys.modules["ray"] = sys.modules["vllm"] = None
"""
"""Makes every process one of a machine without Ray and vLLM."""
COMMAND = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--rehearse"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_step_runs_that_a_cpu_can_run(tmp_path: Path) -> None:
    command = [*COMMAND, "--minutes", "30", "--out", str(tmp_path / "out")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [step.name for step in STEPS]
    skipped = {record["step"]: record["reason"] for record in records if record["status"] == "skipped"}
    peers = {name: reason for name, reason in skipped.items() if name.endswith("TRL")}
    assert set(peers.values()) <= {"no trl"}
    assert skipped.keys() - peers.keys() == GPU_ONLY


def records_of(out: Path) -> dict[str, dict[str, Any]]:
    return {r["step"]: r for r in map(json.loads, (out / "records.jsonl").read_text().splitlines())}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_machine_without_ray_and_vllm_runs_what_needs_neither(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    steps = ["attention", "ZeRO-1 bfloat16", "profile", "shared prompts", "vLLM", "sync by IPC", "in turn", "xray run"]
    command = [*COMMAND, "--minutes", "15", "--out", str(tmp_path / "out"), "--steps", *steps]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
    records = records_of(tmp_path / "out")
    passed = [name for name, record in records.items() if record["status"] == "passed"]
    assert passed == ["attention", "prepare", "ZeRO-1 bfloat16", "profile", "shared prompts"]
    assert {name: records[name]["reason"] for name in records if name not in passed} == dict.fromkeys(
        steps[4:], "no vllm"
    )
    assert 0 <= records["profile"]["figures"]["head_share"] < 1
    assert "Self CPU" in (tmp_path / "out" / "profile.txt").read_text()


def test_a_missing_parent_of_a_library_is_a_missing_library(tmp_path: Path) -> None:
    step = AcceptanceStep("lacks", _refuse, modules=("no_such_library.core",))
    assert step.skip_reason(Setting(tmp_path, True)) == "no no_such_library.core"


def _hang(setting: Setting) -> dict[str, object]:
    import time

    time.sleep(1000)
    return {}


def _die(setting: Setting) -> dict[str, object]:
    import os

    os.abort()


def _refuse(setting: Setting) -> dict[str, object]:
    raise ValueError("too small\nmore")


@pytest.mark.long
def test_a_step_that_hangs_dies_or_fails_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    steps = [
        AcceptanceStep("hangs", _hang, limit_s=0.2),
        AcceptanceStep("dies", _die),
        AcceptanceStep("fails", _refuse),
        AcceptanceStep("lacks", _refuse, modules=("no_such_library",)),
        AcceptanceStep("passes", _size),
    ]
    records = run_all(steps, Setting(tmp_path, True), deadline=float("inf"))
    assert [record["status"] for record in records] == ["failed", "failed", "failed", "skipped", "passed"]
    assert records[0]["reason"].startswith("took more than its")
    assert records[1]["reason"].startswith("ended with exit code -6")
    assert records[2]["reason"] == "ValueError: more"
    assert records[3]["reason"] == "no no_such_library"
    assert records[4]["figures"] == {"num_rows": 6}
    late = run_all(steps, Setting(tmp_path, True), deadline=0.0)
    assert {record["reason"] for record in late} == {"no time left"}


def _size(setting: Setting) -> dict[str, object]:
    return {"num_rows": setting.size.num_rows}


def test_a_machine_without_a_gpu_is_refused_unless_it_rehearses(tmp_path: Path) -> None:
    command = [argument for argument in COMMAND if argument != "--rehearse"]
    found = subprocess.run([*command, "--out", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2
    assert "--rehearse" in found.stderr
    assert not (tmp_path / "out").exists()
