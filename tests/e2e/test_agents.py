"""An agent of somebody else learns through the real command: killed in mid-episode, resumed, replayed without it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, XRAY, Outcome, environment
from tests.waiting import kill_all, wait_until
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.kernel.graph.artifacts import EPISODES

FLOW = "their.largest_digit:largest_digit"
SMALL = ["--set", "iterations=2", "--set", "steps=20", "--set", "heldout=16", "--until", "before"]
"""Up to the benchmark of the policy that begins; the one that was trained is measured alike."""
PROMPTS = "prompts_per_iteration=16"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The example as a project of its own, whose agent can be deleted."""
    package = tmp_path / "their"
    shutil.copytree(ROOT / "examples" / "agents", package)
    for file in package.glob("*.py"):
        file.write_text(file.read_text().replace("examples.agents", "their"))
    flow = package / "largest_digit.py"
    text = flow.read_text()
    assert text.count(PROMPTS) == 1
    # 32 episodes an iteration in place of 128.
    flow.write_text(text.replace(PROMPTS, "prompts_per_iteration=4"))
    return tmp_path


def xray(project: Path, *arguments: str) -> Outcome:
    done = subprocess.run(
        [XRAY, *arguments], cwd=project, env=environment(), capture_output=True, text=True, timeout=1800
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def answered(output: Path) -> int:
    """Number of journaled calls of training episodes."""
    return sum(path.read_bytes().count(b'"episode": "sample-') for path in output.glob("snapshots/ppo-*/answers.jsonl"))


def kill_in_mid_episode(project: Path, output: Path, options: list[str]) -> int:
    """Run until some episodes are open, then kill every process; returns the number of journaled calls."""
    command = [XRAY, "run", FLOW, "--output", str(output), *options]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=project, env=environment(), **quiet)
    wait_until(lambda: answered(output), seconds=1500, process=process, pause_s=0.02)
    kill_all(process)
    return answered(output)


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_an_agent_killed_in_mid_episode_goes_on_to_the_bytes_of_a_replay_without_it(project: Path) -> None:
    """The replay computes the stage undisturbed, from its inputs and the seeds of the recorded calls."""
    output = project / "run"
    known = kill_in_mid_episode(project, output, SMALL)
    again = xray(project, "run", FLOW, "--output", str(output), "--json", *SMALL)
    assert again.code == 0, again.err
    stages = {stage["name"]: stage for stage in again.lifecycle["stages"]}
    assert {"ppo", "before"} <= stages.keys()
    [checkpoint] = output.glob("checkpoints/ppo-*")
    validated = (checkpoint / EPISODES).read_text().splitlines()
    assert {json.loads(line)["rollout"] for line in validated} == {"validation-0-0", "validation-0-2"}
    shown = xray(project, "rollouts", "ppo", "--output", str(output), "--json", "--limit", "0")
    calls = [call for row in json.loads(shown.out)["rows"] for call in row["calls"]]
    assert 0 < known < len(calls)
    assert {call["version"] for call in calls} == {0, 1}

    (project / "their" / "guesser.py").unlink()
    replayed = xray(project, "replay", "ppo", "--output", str(output), "--json")
    assert replayed.code == 0, replayed.out + replayed.err
    assert json.loads(replayed.out)["taken"] == ["environment"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_episodes_across_updates_go_on_after_a_kill_and_a_replay_follows_their_schedule(project: Path) -> None:
    """One prompt in five has a slow agent; calls that were journaled before the kill are in the ledger as they were."""
    for name, old, new in (
        ("largest_digit.py", "iterations=iterations,", "iterations=iterations, lag=2, in_flight_updates=True,"),
        ("guesser.py", "    client =", "    time.sleep(3.0 if task['seed'] % 5 == 0 else 0.2)\n    client ="),
        ("guesser.py", "import openai", "import time\n\nimport openai"),
    ):
        file = project / "their" / name
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))
    output, options = project / "run", ["--set", "iterations=4", *SMALL[2:]]
    kill_in_mid_episode(project, output, options)
    [journal] = output.glob("snapshots/ppo-*/answers.jsonl")
    entries = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    known = {e["call"]["key"]: e["call"] for e in entries if e.get("episode", "").startswith("sample-")}
    again = xray(project, "run", FLOW, "--output", str(output), "--json", *options)
    assert again.code == 0, again.err
    [checkpoint] = output.glob("checkpoints/ppo-*")
    rows = [row for n in range(4) for row in read_shard(shard_path(checkpoint / "ledger", n)).table.to_pylist()]
    calls = {call["key"]: call for row in rows for call in json.loads(row["answers"])["calls"]}
    assert 0 < len(known) < len(calls)
    assert all((calls[key]["ids"], calls[key]["versions"]) == (of["ids"], of["versions"]) for key, of in known.items())
    assert {version for call in calls.values() for version, _ in call["versions"]} > {0}
    assert all(row["iteration"] - row["version"] <= 2 for row in rows)

    (project / "their" / "guesser.py").unlink()
    replayed = xray(project, "replay", "ppo", "--output", str(output), "--json")
    assert replayed.code == 0, replayed.out + replayed.err
    assert json.loads(replayed.out)["compared"] == [0, 1, 2, 3]
