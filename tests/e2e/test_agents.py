"""An agent of somebody else learns through the real command: killed in mid-episode, resumed, replayed without it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import ROOT, XRAY, Outcome, environment
from xray_runtime.graph.artifacts import EPISODES

FLOW = "their.largest_digit:largest_digit"
SMALL = ["--set", "iterations=2", "--set", "steps=60", "--set", "heldout=16"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The example as a project of its own, whose agent can be deleted."""
    package = tmp_path / "their"
    shutil.copytree(ROOT / "examples" / "agents", package)
    for file in package.glob("*.py"):
        file.write_text(file.read_text().replace("examples.agents", "their"))
    return tmp_path


def xray(project: Path, *arguments: str) -> Outcome:
    done = subprocess.run(
        [XRAY, *arguments], cwd=project, env=environment(), capture_output=True, text=True, timeout=600
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def answered(output: Path) -> int:
    """Number of calls of the policy's stage that are journaled."""
    return sum(path.read_bytes().count(b'"call"') for path in output.glob("snapshots/ppo-*/answers.jsonl"))


def kill_in_mid_episode(project: Path, output: Path) -> int:
    """Run until some episodes are open, then kill every process; returns the number of journaled calls."""
    command = [XRAY, "run", FLOW, "--output", str(output), *SMALL]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=project, env=environment(), **quiet)
    deadline = time.monotonic() + 300
    while not answered(output):
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGKILL)
    process.wait()
    return answered(output)


def shas(outcome: Outcome) -> dict[str, str]:
    return {stage["name"]: stage["checkpoint"]["sha256"] for stage in outcome.lifecycle["stages"]}


@pytest.mark.timeout(600)
def test_an_agent_killed_in_mid_episode_gives_the_same_bytes_and_a_replay_needs_no_agent(project: Path) -> None:
    calm, killed = project / "calm", project / "killed"
    first = xray(project, "run", FLOW, "--output", str(calm), "--json", *SMALL)
    assert first.code == 0, first.err
    assert {"ppo", "before", "after"} <= shas(first).keys()

    known = kill_in_mid_episode(project, killed)
    again = xray(project, "run", FLOW, "--output", str(killed), "--json", *SMALL)
    assert again.code == 0, again.err
    assert shas(again) == shas(first)
    [checkpoint] = calm.glob("checkpoints/ppo-*")
    validated = (checkpoint / EPISODES).read_text().splitlines()
    assert {json.loads(line)["rollout"] for line in validated} == {"validation-0-0", "validation-0-2"}
    shown = xray(project, "rollouts", "ppo", "--output", str(calm), "--json", "--limit", "0")
    rows = json.loads(shown.out)["rows"]
    assert 0 < known < sum(len(row["calls"]) for row in rows)

    (project / "their" / "guesser.py").unlink()
    for stage in ("ppo", "after"):
        replayed = xray(project, "replay", stage, "--output", str(calm), "--json")
        assert replayed.code == 0, replayed.out + replayed.err
        assert json.loads(replayed.out)["taken"] == ["environment"]
