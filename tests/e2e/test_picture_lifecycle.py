"""A model that reads pictures, by the real command: it learns to count, its tower stays, and its report shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import xray
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.models.weight_files import tensors


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_model_learns_to_count_squares(tmp_path: Path) -> None:
    output = tmp_path / "run"
    outcome = xray("run", "examples.squares_vlm:squares_vlm", "--output", str(output), "--json", timeout=1500)
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
    assert changed == {name for name in base if not name.startswith("visual.")}
    prompts = read_shard(shard_path(stages["ppo"] / "ledger", 0)).table["prompt_ids"].to_pylist()
    assert all(sum(number < 0 for number in ids) == 9 for ids in prompts)
    points = [json.loads(line)["metrics"] for line in next(output.glob("records/ppo-*/metrics.jsonl")).open()]
    assert max(point["rollout/mismatch"] for point in points if "rollout/mismatch" in point) < 1e-5
    assert '<img class="picture"' in (output / "report.html").read_text()
