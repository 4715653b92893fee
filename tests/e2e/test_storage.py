"""A shared store through the real command: other directories go on from what lies there, whatever was lost."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, XRAY, Outcome, environment
from tests.s3 import BUCKET, S3Server
from tests.waiting import kill_all, wait_until

pytestmark = pytest.mark.long

URL = f"s3://{BUCKET}/team"
EVERY = "runtime.snapshot_every=1"


@pytest.fixture(scope="module")
def server(output: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3") / "data")
    # Machines that share a store sign with one key.
    server.variables["XRAY_SIGNING_KEY"] = str(output / "keys" / "signing.pem")
    yield server
    server.kill()


def command(output: Path, url: str = URL) -> list[str]:
    settings = ["--set", f"runtime.storage={url}", "--set", EVERY]
    return [str(XRAY), "run", "configs/tiny.yaml", "--output", str(output), "--json", *settings]


def xray(server: S3Server, *arguments: str) -> Outcome:
    variables = environment() | server.variables
    done = subprocess.run(arguments, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=900)
    return Outcome(done.returncode, done.stdout, done.stderr)


def shas(content: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["checkpoint"]["sha256"] for stage in content["stages"]}


def cached(content: dict[str, Any]) -> list[str]:
    return [stage["name"] for stage in content["stages"] if stage["cached"]]


def stored(server: S3Server, pattern: str) -> list[Path]:
    return sorted((server.objects / "team").glob(pattern))


def test_a_store_that_is_not_there_is_one_line(server: S3Server, tmp_path: Path) -> None:
    outcome = xray(server, *command(tmp_path / "run", "s3://absent/x"))
    assert outcome.code == 2
    assert outcome.err.splitlines() == [
        "error: runtime.storage: 's3://absent/x' cannot be used: The specified bucket does not exist"
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(1800)
def test_other_directories_go_on_from_the_store(first: Outcome, output: Path, server: S3Server, tmp_path: Path) -> None:
    # What was computed before there was a store is brought there by the next run.
    before = shutil.copytree(output, tmp_path / "before", symlinks=True)
    brought = xray(server, *command(before))
    assert brought.code == 0, brought.err
    assert len(stored(server, "results/*.json")) == 8
    shutil.rmtree(before)

    # Without its last two stages, and from nothing: fetched up to there, killed in mid-stage.
    for left in stored(server, "*/ppo-2-*") + stored(server, "*/evaluate-*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    killed = tmp_path / "killed"
    with (tmp_path / "killed.log").open("wb") as log:
        run = subprocess.Popen(command(killed), cwd=ROOT, env=environment() | server.variables, stdout=log, stderr=log)
    has_snapshot = partial(stored, server, "snapshots/ppo-2-*/step-*/index.json")
    wait_until(has_snapshot, seconds=800, process=run, why=tmp_path / "killed.log", pause_s=0.02)
    kill_all(run)
    assert not stored(server, "checkpoints/ppo-2-*/index.json")
    shutil.rmtree(killed)

    # One object is damaged meanwhile: that stage is computed again, to the same bytes.
    (weights,) = stored(server, "checkpoints/base-*/*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    last = tmp_path / "last"
    outcome = xray(server, *command(last))
    assert outcome.code == 0, outcome.err
    assert shas(outcome.lifecycle) == shas(first.lifecycle)
    assert outcome.lifecycle["evaluation"] == first.lifecycle["evaluation"]
    assert cached(outcome.lifecycle) == ["prepare", "sft", "preferences", "reward", "ppo-1"]
    assert "model.safetensors was changed; the copy there is not used" in log_of(last, "base")
    assert "step-0000000001: fetched from" in log_of(last, "ppo-2")
    assert stored(server, "snapshots/*") == []
    assert all((last / "records" / f"{s['name']}-{s['key'][:12]}").is_dir() for s in outcome.lifecycle["stages"])
    assert (last / "report.html").read_text().count("<svg") == (output / "report.html").read_text().count("<svg")

    # Records of other directories are trusted here, and what is lost here comes back.
    assert "sound: " in sound(server, "audit", "--all", "--output", str(last))
    shutil.rmtree(last / "checkpoints")
    (last / "checkpoints").mkdir()
    broken = xray(server, str(XRAY), "audit", "--all", "--output", str(last))
    assert (broken.code, "`xray fetch`" in broken.out) == (1, True)
    assert sound(server, "fetch", "--output", str(last)).count("fetched") == 8
    sound(server, "audit", "--all", "--output", str(last))
    text = "".join(p.read_text(errors="replace") for p in last.rglob("*") if p.suffix in (".yaml", ".json", ".log"))
    assert server.variables["AWS_SECRET_ACCESS_KEY"] not in text


def log_of(output: Path, stage: str) -> str:
    return (output / "logs" / stage / "stage.log").read_text()


def sound(server: S3Server, *arguments: str) -> str:
    outcome = xray(server, str(XRAY), *arguments)
    assert outcome.code == 0, outcome.out + outcome.err
    return outcome.out
