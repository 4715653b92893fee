"""Graphs that learn without PPO: sampled pairs and DPO, the best of n and SFT, in rounds; and DPO and GRPO killed."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import ROOT, XRAY, environment, xray

DPO = ["ppo=null", "reward=null", "dpo={batch_size: 4, epochs: 30}", "runtime.snapshot_every=1"]
"""Three hundred steps in place of PPO."""
GRPO = [
    *("preferences=null", "reward=null", "rewards=[{verifier: {kind: regex, pattern: '[aeiou]'}}]"),
    "ppo={stages: [{method: grpo, resample_rounds: 1, iterations: 60, prompts_per_iteration: 4, samples_per_prompt: 4, "
    "minibatch_size: 8, max_new_tokens: 8, lr: 0.001}]}",
    "runtime.snapshot_every=1",
]
"""Groups of four, judged by a pattern; those that tie are replaced."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("example", "kinds"),
    [
        ("examples.online_dpo:online_dpo", ("preferences", "dpo")),
        ("examples.lessons.03_own_reward:own_reward", ("best_of_n", "sft")),
    ],
)
def test_each_round_learns_from_what_the_one_before_samples(
    example: str, kinds: tuple[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = ("run", example, "--output", str(output), "--json")
    outcome = xray(*run)
    assert outcome.code == 0, outcome.err
    stages = {stage["name"]: stage for stage in outcome.lifecycle["stages"]}
    assert [stage["kind"] for stage in stages.values()][3:-1] == [*kinds, *kinds]
    evaluation = outcome.lifecycle["evaluation"]
    # A third of the replies more pass than did; it was three quarters on the machine this was written on.
    assert evaluation["reward_delta_ci95"][0] > 0.3
    assert outcome.lifecycle["registered"]["name"] == f"{example.partition(':')[2].replace('_', '-')}-policy"
    assert xray("audit", "--all", "--output", str(output)).code == 0
    last = list(stages)[-2]
    drawn = xray("lineage", last, "--output", str(output))
    assert all(name in drawn.out for name in stages if name != "evaluate")
    again = xray(*run)
    assert all(stage["cached"] for stage in again.lifecycle["stages"])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("fields", "stage", "before"),
    [pytest.param(DPO, "dpo", ["sft", "preferences"], id="dpo"), pytest.param(GRPO, "ppo-1", ["sft"], id="grpo")],
)
def test_a_lifecycle_is_killed_and_goes_on_to_the_same_bytes(
    fields: list[str], stage: str, before: list[str], tmp_path: Path
) -> None:
    settings = [part for field in fields for part in ("--set", field)]
    output = tmp_path / "killed"
    command = ["run", "configs/tiny.yaml", *settings, "--output"]
    process = subprocess.Popen(
        [XRAY, *command, str(output)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 600
    while sum(path.read_bytes().count(b"\n") for path in output.glob(f"records/{stage}-*/metrics.jsonl")) < 20:
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
    process.wait()
    resumed, undisturbed = (xray(*command, str(place), "--json") for place in (output, tmp_path / "undisturbed"))
    assert resumed.code == undisturbed.code == 0, resumed.err + undisturbed.err
    stages = [
        {each["name"]: each["checkpoint"]["sha256"] for each in outcome.lifecycle["stages"]}
        for outcome in (resumed, undisturbed)
    ]
    assert list(stages[0]) == ["prepare", "base", *before, stage, "evaluate"]
    assert stages[0] == stages[1]
    killed = next(each for each in resumed.lifecycle["stages"] if each["name"] == stage)
    assert killed["attempts"] == 2
    assert resumed.lifecycle["registered"]["name"] == "xray-tiny-policy"
    assert xray("audit", "--all", "--output", str(output)).code == 0
    # Every point of its curve is there once; DPO learned what the pairs say.
    [path] = output.glob(f"records/{stage}-*/metrics.jsonl")
    points = [json.loads(line) for line in path.read_text().splitlines()]
    assert [point["step"] for point in points] == list(range(len(points)))
    if stage == "dpo":
        assert points[-1]["metrics"]["dpo/loss"] < points[0]["metrics"]["dpo/loss"]
