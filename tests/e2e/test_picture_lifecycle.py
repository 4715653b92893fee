"""A model that reads pictures, by the real command: it learns to count, its tower stays, and its report shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import xray
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.pairs import pairs_of
from xray_runtime.data.pictures import pictures_of
from xray_runtime.models.weight_files import tensors


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "num_tokens"), [("qwen2_5_vl", 9), ("qwen3_vl", 9), ("smolvlm", 33)])
def test_a_model_learns_to_count_squares(family: str, num_tokens: int, tmp_path: Path) -> None:
    output = tmp_path / "run"
    flow = ("examples.squares_vlm:squares_vlm", "--set", f"family={family}", "--set", f"output={tmp_path / 'drawn'}")
    outcome = xray("run", *flow, "--output", str(output), "--json", timeout=1500)
    assert outcome.code == 0, outcome.err
    assert outcome.lifecycle["evaluation"]["reward_delta_ci95"][0] > 0
    assert xray("audit", "--all", "--output", str(output)).code == 0

    stages = {
        stage["name"]: next(output.glob(f"checkpoints/{stage['name']}-*[0-9a-f]"))
        for stage in outcome.lifecycle["stages"]
    }
    base, policy = (dict(tensors(stages[name])) for name in ("base", "ppo"))
    changed = {name for name in base if not torch.equal(base[name], policy[name])}
    assert changed
    towers = ("visual.", "model.visual.", "model.vision_model.", "model.connector.")
    assert changed == {name for name in base if not name.startswith(towers)}
    prompts = read_shard(shard_path(stages["ppo"] / "ledger", 0)).table["prompt_ids"].to_pylist()
    assert all(sum(number < 0 for number in ids) == num_tokens for ids in prompts)
    points = [json.loads(line)["metrics"] for line in next(output.glob("records/ppo-*/metrics.jsonl")).open()]
    assert max(point["rollout/mismatch"] for point in points if "rollout/mismatch" in point) < 1e-5
    assert '<img class="picture"' in (output / "report.html").read_text()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pairs_with_pictures(tmp_path: Path) -> None:
    output = tmp_path / "run"
    flow = ("tests.e2e.picture_pairs:picture_pairs", "--set", f"output={tmp_path / 'drawn'}")
    outcome = xray("run", *flow, "--output", str(output), "--json", timeout=1500)
    assert outcome.code == 0, outcome.err
    assert xray("audit", "--all", "--output", str(output)).code == 0

    names = [stage["name"] for stage in outcome.lifecycle["stages"]]
    found = {name: next(output.glob(f"checkpoints/{name}-*[0-9a-f]")) for name in names}
    for name in ("preferences", "best"):
        pairs = [pair for side in ("train.arrow", "heldout.arrow") for pair in pairs_of(found[name] / side)]
        used = {picture["sha256"] for pair in pairs for picture in pictures_of(pair.prompt)}
        assert used
        assert {file.stem for file in (found[name] / "pictures").iterdir()} == used
    base, dpo = (dict(tensors(found[name])) for name in ("base", "dpo"))
    assert {name for name in base if not torch.equal(base[name], dpo[name])}
    assert all(torch.equal(base[name], dpo[name]) for name in base if name.startswith("model.visual."))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_agent_asks_about_pictures(tmp_path: Path) -> None:
    """Its calls have the pictures of its rows, in the ledger by digest; a replay needs no agent."""
    output = tmp_path / "run"
    flow = ("tests.e2e.picture_agent:picture_agent", "--set", f"output={tmp_path / 'drawn'}")
    outcome = xray("run", *flow, "--output", str(output), "--json", timeout=1500)
    assert outcome.code == 0, outcome.err
    found = {
        stage["name"]: next(output.glob(f"checkpoints/{stage['name']}-*")) for stage in outcome.lifecycle["stages"]
    }
    known = {file.stem for file in next(output.glob("checkpoints/prepare-*/pictures")).iterdir()}
    table = read_shard(shard_path(found["ppo"] / "ledger", 0)).table
    for ids, answers in zip(table["prompt_ids"].to_pylist(), table["answers"].to_pylist(), strict=True):
        calls = json.loads(answers)["calls"]
        assert sum(number < 0 for number in ids) in (9, 18)
        assert {p["sha256"] for call in calls for p in pictures_of(call["messages"])} <= known
        assert all(len(pictures_of(call["messages"])) == sum(n < 0 for n in call["prompt"]) // 9 for call in calls)
    points = [json.loads(line)["metrics"] for line in next(output.glob("records/ppo-*/metrics.jsonl")).open()]
    assert max(point["rollout/mismatch"] for point in points if "rollout/mismatch" in point) < 1e-5
    assert xray("replay", "ppo", "--output", str(output), timeout=900).code == 0
    assert xray("audit", "--all", "--output", str(output)).code == 0
    pairs = [pair for side in ("train.arrow", "heldout.arrow") for pair in pairs_of(found["best"] / side)]
    used = {p["sha256"] for pair in pairs for p in pictures_of(pair.prompt)}
    assert used
    assert {file.stem for file in (found["best"] / "pictures").iterdir()} == used
