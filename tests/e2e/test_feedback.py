"""People in the loop: a conversation, a blind comparison killed half-way, and a reward model's data from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, XRAY, Outcome, environment, xray
from tests.waiting import wait_until

pytestmark = pytest.mark.long

LONG = 400.0
ASKED = ["compare", "sft", "ppo-2", "--prompts", "train", "--count", "40", "--judge", "ada", "--json"]


@pytest.fixture(scope="module")
def place(first: Outcome, output: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished lifecycle of our own: other tests look at the first one's records."""
    assert first.code == 0
    return Path(shutil.copytree(output, tmp_path_factory.mktemp("feedback") / "run", symlinks=True))


@pytest.fixture(scope="module")
def judged(place: Path) -> dict[str, Any]:
    """What a judge said whose terminal was killed after three verdicts, and who then went on to the end."""
    process = subprocess.Popen(
        [XRAY, *ASKED, "--output", str(place)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.write(b"1\n2\nt\n")
    process.stdin.flush()
    wait_until(lambda: len(verdicts(place)) == 3, seconds=LONG, process=process)
    process.kill()
    process.wait()
    done = subprocess.run(
        [XRAY, *ASKED, "--output", str(place)],
        cwd=ROOT,
        env=environment(),
        input="1\n2\n" * 20,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    # Whoever judges is told nothing about which model is which.
    assert "sft" not in done.stderr
    assert "ppo" not in done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


@pytest.fixture(scope="module")
def dataset(judged: dict[str, Any], place: Path) -> Path:
    published = xray("preferences", "--output", str(place), "--json")
    assert published.code == 0, published.err
    content = json.loads(published.out)
    assert content["judgements"] == judged["prompts"]
    assert content["pairs"] == judged["verdicts"]["a"] + judged["verdicts"]["b"]
    return Path(content["uri"])


def verdicts(place: Path) -> list[dict[str, Any]]:
    """Verdicts on disk, a torn last line apart."""
    found = list(place.glob("feedback/*/judgements.jsonl"))
    return [json.loads(line) for path in found for line in path.read_bytes().split(b"\n")[:-1]]


def test_a_conversation_through_a_pipe(place: Path) -> None:
    outcome = subprocess.run(
        [XRAY, "chat", "xray-tiny-policy@candidate", "--output", str(place), "--seed", "3"],
        cwd=ROOT,
        env=environment(),
        input="hello there\n\nhow are you?\n",
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert len(outcome.stdout.splitlines()) == 2
    assert "ppo-2" in outcome.stderr
    assert "audit: sound, 8 checkpoints" in outcome.stderr


def test_nothing_judged_is_asked_again_or_lost(judged: dict[str, Any], place: Path) -> None:
    rows = verdicts(place)
    numbers = [row["number"] for row in rows]
    assert len(set(numbers)) == len(numbers) == judged["prompts"]
    assert judged["prompts"] + judged["same_reply"] == 40
    assert judged["judges"] == {"ada": judged["prompts"]}
    # Pressed were 1, 2, t, and then 1 and 2 in turn; which model that was, the side drawn for it says.
    keys = ["1", "2", "t", *"12" * 20]
    meant = {"1": lambda left: left, "2": lambda left: "ab".replace(left, ""), "t": lambda _: "tie"}
    assert [row["verdict"] for row in rows] == [meant[k](row["left"]) for k, row in zip(keys, rows, strict=False)]
    assert {row["left"] for row in rows} == {"a", "b"}
    low, high = judged["win_rate_ci95"]
    assert low <= judged["win_rate"] <= high


def test_a_run_trains_on_what_was_judged(dataset: Path, place: Path) -> None:
    chosen = f"preferences={{source: dataset, path: {dataset}, heldout_fraction: 0.4}}"
    process = subprocess.Popen(
        [XRAY, "run", "configs/tiny.yaml", "--output", str(place), "--set", chosen],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def stages() -> dict[str, Any]:
        content = json.loads((place / "lifecycle.json").read_text())
        return {s["name"]: s for s in content["stages"] if content["status"] == "running"}

    # What follows is the same as for any other preferences.
    wait_until(lambda: "preferences" in stages(), seconds=LONG, process=process)
    made = stages()
    os.kill(process.pid, signal.SIGINT)
    process.wait(timeout=LONG)
    assert [made[name]["cached"] for name in ("prepare", "base", "sft", "preferences")] == [True, True, True, False]
    pairs = made["preferences"]["checkpoint"]
    content = json.loads(xray("lineage", pairs["sha256"], "--output", str(place), "--json").out)
    by_sha = {entry["sha256"]: entry for entry in content["checkpoints"]}
    judgements = by_sha[by_sha[pairs["sha256"]]["parents"]["judgements"]]
    assert Path(judgements["directory"]) == dataset
    policies = {by_sha[judgements["parents"][role]]["stage"] for role in ("policy-1", "policy-2")}
    assert policies == {"sft", "ppo-2"}
    audited = xray("audit", pairs["sha256"], "--output", str(place))
    assert audited.code == 0, audited.out


def test_people_judge_the_evaluation(place: Path) -> None:
    asked = ["compare", "sft", "ppo-2", "--count", "12", "--judge", "ada", "--json", "--output", str(place)]
    compared = subprocess.run(
        [XRAY, *asked], cwd=ROOT, env=environment(), input="2\n" * 12, capture_output=True, text=True, timeout=LONG
    )
    assert compared.returncode == 0, compared.stderr
    said = json.loads(compared.stdout)
    published = json.loads(xray("preferences", "--output", str(place), "--json").out)
    run = xray("run", "configs/tiny.yaml", "--output", str(place), "--set", f"evaluate.verdicts={published['uri']}")
    assert run.code == 0, run.err
    content = json.loads((place / "lifecycle.json").read_text())
    assert [stage["name"] for stage in content["stages"] if not stage["cached"]] == ["evaluate"]
    people = content["evaluation"]["judges"]["people"]
    assert people["samples"] == said["prompts"]
    # `compare` counts the wins of the first it was given, the evaluation those of the policy.
    assert people["win_rate"] == pytest.approx(1 - said["win_rate"])
    audited = xray("audit", "--all", "--output", str(place))
    assert audited.code == 0, audited.out


def test_people_judge_the_comparison_with_the_champion(place: Path) -> None:
    name, gates = "xray-tiny-policy", ["--set", "promotion.min_win_rate=null", "--set", "promotion.max_judge_drop=null"]
    decided = ["promote", "--output", str(place), "--name", name, "--by", "Ada", "--note", "why", *gates]
    assert xray(*decided, "--set", "promotion.max_regression=null").code == 0
    second = xray("run", "configs/tiny.yaml", "--output", str(place), "--set", "ppo.stages.1.lr=1e-4")
    assert second.code == 0, second.err
    models = [f"{name}@candidate", f"{name}@champion"]
    compared = subprocess.run(
        [XRAY, "compare", *models, "--count", "12", "--judge", "ada", "--json", "--output", str(place)],
        cwd=ROOT, env=environment(), input="1\n2\n" * 12, capture_output=True, text=True, timeout=LONG,
    )  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    said = json.loads(compared.stdout)
    published = json.loads(xray("preferences", "--output", str(place), "--json").out)
    done = xray(*decided, "--set", "promotion.max_regression=0.5", "--verdicts", published["uri"])
    assert done.code == 0, done.err
    assert "people: " in done.out
    [path] = place.glob("checkpoints/compare-*/comparison.json")
    people = json.loads(path.read_text())["judges"]["people"]
    assert (people["samples"], people["win_rate"]) == (said["prompts"], pytest.approx(said["win_rate"]))
    audited = xray("audit", "--all", "--output", str(place))
    assert audited.code == 0, audited.out
    wrong = xray(*decided, "--verdicts", "sft")
    assert wrong.code == 2
    assert "--verdicts: sft " in wrong.err


def test_a_changed_verdict_is_found(dataset: Path, place: Path) -> None:
    path = dataset / "judgements.jsonl"
    content = path.read_text()
    path.write_text(content.replace('"verdict": "a"', '"verdict": "b"', 1))
    audited = xray("audit", "--all", "--output", str(place), "--json")
    path.write_text(content)
    assert audited.code == 1
    broken = [(f["code"], f["detail"]) for f in json.loads(audited.out)["findings"] if f["broken"]]
    assert ("file-changed", "judgements.jsonl was changed") in broken
