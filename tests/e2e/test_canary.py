"""Candidates of two cycles answer a share of the requests: one is rolled back by itself, one is promoted."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, XRAY, environment, xray
from tests.e2e.cycles import NAME
from tests.waiting import wait_until
from xray.deployments.service import free_port
from xray.flows.cycles import read_cycles
from xray_runtime.kernel.history.recorded import RecordedReader
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.live.serving.middleware import SHA256_HEADER
from xray_runtime.live.serving.recording import ANSWER_HEADER

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

KEY = "a key of the shop"
PEOPLE = 80
PATIENCE_S = 600.0
CYCLE = {"dpo.batch_size": 16, "rules.heldout_fraction": 0.3, "min_rows": 8, "cycles": 1, "canary.share": 0.5}
Verdict = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory with a champion."""
    output = tmp_path_factory.mktemp("canary") / "run"
    command = [sys.executable, "-m", "tests.e2e.cycles", str(output), "dpo"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return output


@pytest.fixture(scope="module")
def log(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "log"


@pytest.fixture(scope="module")
def address(place: Path, log: Path) -> Iterator[str]:
    """The address of the served champion."""
    port = free_port()
    command = [XRAY, "serve", f"{NAME}@champion", "--output", place, "--port", str(port), "--record"]
    keys = {"XRAY_FEEDBACK_KEYS": f"shop={KEY}"}
    with log.open("wb") as out, subprocess.Popen(command, env=environment() | keys, stdout=out, stderr=out) as process:
        try:
            until(lambda: "serving" in log.read_text() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, seconds=PATIENCE_S, pause_s=0.2)


def post(url: str, body: dict[str, Any], **headers: str) -> Any:
    """Headers of the answer."""
    named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), named), timeout=240) as answer:
        answer.read()
        return answer.headers


def send_feedback(address: str, body: dict[str, str]) -> None:
    def is_taken() -> bool:
        try:
            post(f"{address}/feedback", body, authorization=f"Bearer {KEY}")
        except urllib.error.HTTPError as error:
            # The copy of the answer comes a moment after it.
            if error.code in (404, 503):
                return False
            raise
        return True

    until(is_taken)


def day(place: Path, address: str, number: int, verdict: Verdict) -> dict[str, str]:
    """Everybody asks once and says what they think; person → sha256 of the model that answered."""
    kept = len(rows(place))
    answered = {}
    for person in range(PEOPLE):
        text = f"day {number} of person {person}: {hash((number, person))}"
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "ignore_eos": True}
        user = f"person {person}"
        headers = post(f"{address}/chat/completions", asked, x_xray_record="yes", x_xray_user=user)
        answered[user] = headers[SHA256_HEADER]
        said = verdict(answered[user])
        if said["thumb"] == "down":
            said |= {"correction": f"better {number} for {person}"}
        send_feedback(address, {"answer": headers[ANSWER_HEADER], "user": user} | said)
    until(lambda: len(rows(place)) == kept + 2 * PEOPLE)
    return answered


def rows(place: Path) -> list[Any]:
    return list(RecordedReader(place).rows(None, (), None))


def cycle(place: Path, max_loss: float) -> list[str]:
    fields = CYCLE | {"canary.min_feedback": 12, "canary.max_loss": max_loss}
    return ["flywheel", "--output", str(place), "--json", *(f"--set={name}={value}" for name, value in fields.items())]


def killed(place: Path, command: list[str]) -> None:
    """Run the command until it has curated the feedback, and kill it there."""
    before = set(place.glob("checkpoints/curate-*"))
    with subprocess.Popen([XRAY, *command], cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: set(place.glob("checkpoints/curate-*")) != before or process.poll() is not None)
            assert process.poll() is None
        finally:
            process.kill()


def test_candidates_are_tried_on_people(place: Path, address: str, log: Path) -> None:
    champion = resolve(f"{NAME}@champion", place, None)[1].sha256
    thumbs = itertools.cycle(("up", "down"))
    # Without a canary all are answered by the champion.
    answered = day(place, address, 2, lambda sha: {"thumb": next(thumbs)})
    assert set(answered.values()) == {champion}

    # The second cycle is killed and goes on; its candidate displeases those whom it answers.
    killed(place, cycle(place, 0.1))
    done = xray(*cycle(place, 0.1))
    assert done.code == 0, done.err
    second = json.loads(done.out)
    assert (second["number"], second["state"], second["reasons"]) == (2, "canary", [])
    until(lambda: "answers 50% of users" in log.read_text())
    answered = day(place, address, 3, lambda sha: {"thumb": "down" if sha == second["policy"] else "up"})
    assert 24 < sum(sha == second["policy"] for sha in answered.values()) < 56
    assert set(answered.values()) == {champion, second["policy"]}
    until(lambda: "rolled back" in log.read_text())
    assert "its feedback is at best -" in log.read_text()

    # The third cycle learns from that day; its candidate pleases.
    done = xray(*cycle(place, 0.5))
    assert done.code == 0, done.err
    third = json.loads(done.out)
    assert (third["number"], third["state"]) == (3, "canary")
    assert read_cycles(place)[1].state == "rolled back"
    until(lambda: f"{third['policy'][:12]} answers 50%" in log.read_text())
    answered = day(place, address, 4, lambda sha: {"thumb": "up"})
    assert set(answered.values()) == {champion, third["policy"]}
    until(lambda: ": passed" in log.read_text())

    # A person promotes it, and the server follows.
    promoted = xray("promote", "--output", str(place), "--name", NAME, "--by", "Ada", "--note", "the canary passed")
    assert promoted.code == 0, promoted.err
    asked = {"prompt": "hello", "max_tokens": 1}
    until(lambda: post(f"{address}/completions", asked)[SHA256_HEADER] == third["policy"])
    audited = xray("audit", "--all", "--output", str(place))
    assert audited.code == 0, audited.out
