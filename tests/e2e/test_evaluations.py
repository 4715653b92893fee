"""Evaluations as stages of a graph, through the real command: side by side, with a judge that PPO never saw."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest

from tests.e2e.conftest import xray

TRAINED = {"sft", "reward", "judge", "ppo"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_policies_side_by_side_and_a_judge_of_its_own(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = ["run", "examples.side_by_side:side_by_side", "--output", str(output), "--json"]
    command += ["--set", "steps=10", "--set", "iterations=2"]
    first = xray(*command)
    assert first.code == 0, first.err
    judges = first.lifecycle["evaluation"]["judges"]
    assert set(judges) == {"gold", "judges.0"}
    assert first.lifecycle["evaluation"]["judge"] in judges

    table = first.lifecycle["evaluations"]
    numbers = {row["policy"]: dict(zip(table["columns"], row["numbers"], strict=True)) for row in table["rows"]}
    assert set(numbers) == {"sft", "ppo"}
    for policy in ("sft", "ppo"):
        value, low, high = numbers[policy]["perplexity"]
        assert 1 < low <= value <= high < 600  # ten steps from a vocabulary of 512
        assert 0 <= numbers[policy]["rude"][0] <= 1
    assert numbers["sft"]["win_rate by judges.0"] is None
    assert numbers["ppo"]["win_rate by judges.0"] is not None
    assert "perplexity" in (output / "report.html").read_text()
    uri = f"sqlite:///{output / 'mlflow.db'}"
    shown = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri).list_artifacts(first.lifecycle["run_id"])
    assert {"evaluations.json", "evaluations.png"} <= {file.path for file in shown}
    assert xray("audit", "--all", "--output", str(output)).code == 0

    # Another evaluation trains nothing.
    again = xray(*command, "--set", "words=16")
    assert again.code == 0, again.err
    computed = {stage["name"] for stage in again.lifecycle["stages"] if not stage["cached"]}
    assert computed == {"words-sft", "words-ppo"}
    keys = {stage["name"]: stage["key"] for stage in first.lifecycle["stages"] if stage["name"] in TRAINED}
    assert {stage["name"]: stage["key"] for stage in again.lifecycle["stages"] if stage["name"] in TRAINED} == keys

    # The judge counts at the promotion, where the reward it is beside does not.
    asked = xray("promote", "--output", str(output), "--name", "side-by-side-policy", "--by", "a test", "--note", "why",
                 "--set", "promotion.min_win_rate=0.99", "--set", "promotion.max_judge_drop=null",
                 "--set", "promotion.max_length_ratio=null", "--set", "promotion.max_kl=null")  # fmt: skip
    assert asked.code != 0
    assert "judges.0: " in asked.err + asked.out
    assert "must be above 0.99" in asked.err + asked.out
