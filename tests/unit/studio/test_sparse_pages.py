"""Pages of runs that have little: one stage, a failure, no evaluation, one rollout; and of a lineage that has much."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.studio.world import HOSTILE, run_at_work, studio, with_rollouts
from tests.unit.trust.synthetic import Lifecycle, weights
from xray_runtime.kernel.evidence.view import RunEnded, run_lock
from xray_runtime.kernel.report.rendering import counted
from xray_runtime.trust.log import append


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 rollouts"), (1, "1 rollout"), (2, "2 rollouts"), (50_000, "50,000 rollouts")]
)
def test_one_thing_is_not_several(number: int, text: str) -> None:
    assert counted(number, "rollout") == text


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    output = tmp_path / "run"
    Lifecycle(output, tracking=False).whole()
    run_at_work(output, "sft", [{"sft/loss": 2.0}])
    content = {"run_id": "live-1", "status": "failed", "stages": [], "failure": f"reward: {HOSTILE}"}
    (output / "lifecycle.json").write_text(json.dumps(content))
    append(output, RunEnded(run_id="live-1", status="failed"))
    client = studio(output)
    for path in ("/", "/runs/live-1"):
        page = client.get(path).text
        assert '<span class="state failed">failed</span>' in page
        assert "reward: &lt;script&gt;" in page
    # Damage in its place is no text for people.
    (output / "lifecycle.json").write_text(json.dumps(content | {"failure": {"a": 1}}))
    assert "It failed" not in client.get("/runs/live-1").text


def test_a_run_that_has_begun_and_done_nothing_yet(tmp_path: Path) -> None:
    output = tmp_path / "run"
    Lifecycle(output, tracking=False).add("prepare", "prepare", {"train.jsonl": b"{}"}, {})
    run_at_work(output, "sft", [])
    client = studio(output)
    with run_lock(output, "live-1"):
        front, page = client.get("/").text, client.get("/runs/live-1").text
        assert "0 stages" in front
        assert "not evaluated" not in front.partition("tonight")[2].partition("</article>")[0]
        assert "<b>sft</b> is at work" in page
        assert "sft" not in [stage["stage"] for stage in client.get("/runs/live-1/curves").json()["stages"]]
    assert "No policy was evaluated here yet." in client.get("/evaluations").text
    assert "No policy here has a ledger of rollouts." in client.get("/rollouts").text
    assert "No model is registered here yet" in client.get("/promote").text
    assert "There is nothing to judge yet" in client.get("/review").text


def test_one_rollout(tmp_path: Path) -> None:
    output = tmp_path / "run"
    Lifecycle(output, tracking=False).whole()
    policy = with_rollouts(output, tmp_path / "tokenizer", 1, 1)[:12]
    client = studio(output)
    assert "1 iteration</li>" in client.get("/rollouts").text
    page = client.get(f"/rollouts/{policy}").text
    assert re.search(r'<p role="status">1 rollout</p>', page)
    assert page.count("<article") == 1
    assert "iteration 0</span></p>" in page
    assert "1 prompt is in both" in client.get(f"/rollouts/{policy}/diff?first=0&second=0").text
    for part in ("tokens?iteration=0&row=0", "extremes?iteration=0"):
        assert client.get(f"/rollouts/{policy}/{part}").status_code == 200


def test_a_lineage_of_forty_models_is_listed_as_it_was_made(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path / "run", tracking=False).whole()
    before = "sft"
    for number in range(40):
        roles = {"policy": before, "prompts": "prepare", "reference": "sft", "rewards.0": "reward"}
        stage = f"night-{number:02}"
        life.add(stage, "ppo", {"config.json": b"{}", "model.safetensors": weights(stage)}, roles)
        before = "sft" if number % 5 == 4 else stage
    page = studio(tmp_path / "run").get("/lineage").text
    nights = re.findall(r">(night-[0-9]+) <code>", page.partition("<table")[2])
    assert nights == [f"night-{number:02}" for number in range(40)]
    boxes = re.findall(r'transform="translate\(([-.0-9]+),([0-9]+)\)"', page)
    assert len(boxes) == len(set(boxes)) == 48
    rows: dict[str, list[float]] = {}
    for x, y in boxes:
        rows.setdefault(y, []).append(float(x))
    width = float(re.findall(r'<rect width="([0-9]+)"', page)[0])
    for row in rows.values():
        assert all(right - left >= width for left, right in zip(sorted(row), sorted(row)[1:], strict=False))
