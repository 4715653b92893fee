"""No request and no damaged file makes a page of the studio fail: the answer is a page with one line."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sweeps import sweep
from tests.unit.studio.world import studio
from tests.unit.trust.synthetic import NAME
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.reference import find, open_lineage_store
from xray_runtime.live.feedback.session import read_sessions

NUMBERS = (
    *("-1", "NaN", "nan", "inf", "-inf", "Infinity", "1e400", "-1e400", "9" * 20, "9" * 5000, "1.5", "1_0", "٣"),
    *("１", "0x10", "1e5", " 1 ", "", "%00", "%ff", "%F0%9F%92%A9", "1,5", "--1", "+1", "²", "None", "[]"),
    *("a" * 9000, "1%0A"),
)
FIELDS = (
    *("{policy}?iteration=", "{policy}?min=", "{policy}?max=", "{policy}?order=", "{policy}?source="),
    *("{policy}/tokens?iteration=1&row=", "{policy}/extremes?iteration=", "{policy}?text="),
    *("{policy}/rows?start=", "{policy}/diff?first=0&second=", "{policy}/diff?second=0&first="),
)


def test_odd_numbers_are_one_line(made: Path) -> None:
    client, policy = studio(made), find("ppo-read", open_lineage_store(made, None)).sha256
    [session] = read_sessions(made)
    paths = [f"/rollouts/{field.format(policy=policy)}" for field in FIELDS] + [f"/review/{session.name}?number="]
    for path, number in zip(itertools.cycle(paths), NUMBERS * 2, strict=False):
        reply = client.get(path + number)
        assert reply.status_code < 500, (path, number)
        assert "Traceback" not in reply.text
    assert client.get(f"/rollouts/{policy}?iteration=1").status_code == 200
    for refused in ("1.5", "nan", "-1", "1e400", "9" * 5000, "٣"):
        reply = client.get(f"/rollouts/{policy}?iteration={refused}")
        assert reply.status_code == 400, refused
        assert "is not allowed" in reply.text
    for refused in ("nan", "inf", "1e400", "0x10", "1_0"):
        assert client.get(f"/rollouts/{policy}?min={refused}").status_code == 400, refused


HOSTS = (
    *("", "[", "]", "[::1", "::1", "[::1]]", "[::1]:x", "localhost:", "localhost:abc", "localhost:999999"),
    *("evil.example", "evil@localhost", "localhost@evil", "127.0.0.1.evil.example", "localhost.", "127.1"),
    *("0.0.0.0", "[fe80::1%25lo]", "a" * 9000, "localhost\t", "loc\xe4lhost", "127.0.0.1:80:80", "//localhost"),
    *("localhost/x", "localhost#"),
)


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: ascii(host)[:20])
def test_odd_hosts_are_refused(host: str, made: Path) -> None:
    reply = studio(made).get("/", headers={"host": host.encode("latin-1")})  # type: ignore[dict-item]
    assert reply.status_code == 421
    assert len(reply.text.splitlines()) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8100", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8100"])
def test_names_of_loopback_are_answered(host: str, made: Path) -> None:
    assert studio(made).get("/", headers={"host": host}).status_code == 200


ODD_PATHS = (
    *("/static/%00", "/static/" + "a" * 5000, "/static/..%2f..%2fapp.py", "/runs/%00", "/runs/" + "a" * 5000),
    *("/runs/%ff", "/checkpoints/%00", "/checkpoints/" + "f" * 5000, "/rollouts/%2e%2e", "/promote/%00"),
    *("/promote/'", "/promote/" + "a" * 5000, "/review/%00", "/review/" + "a" * 5000, "/review/.."),
    *("/review/%2e%2e%2f", "//", "/%ff"),
)


@pytest.mark.parametrize("path", ODD_PATHS, ids=lambda path: path[:24])
def test_odd_paths_are_one_line(path: str, made: Path) -> None:
    reply = studio(made).get(path)
    assert reply.status_code < 500
    assert "Traceback" not in reply.text


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def gone(path: Path) -> None:
    path.unlink()


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def of_odd_values(path: Path) -> None:
    stage = {"name": "../x", "kind": 1, "key": None, "checkpoint": [], "findings": 3, "cached": {}}
    path.write_text(json.dumps({"stages": [stage, [], None, 1], "rows": [[1e400, None, {}]], "columns": [[]]}))


def sparse(path: Path) -> None:
    os.truncate(path, 3 * 2**40)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = (truncated, gone, deep, of_odd_values, sparse, pipe)
FILES = (
    *("lifecycle.json", "log.jsonl", "records/ppo-2-*/metrics.jsonl", "checkpoints/evaluate-*/evaluation.json"),
    *("checkpoints/evaluate-*/samples.json", "checkpoints/evaluate-*/manifest.json"),
    *("checkpoints/sft-*/manifest.json", "checkpoints/ppo-read-*/ledger/000001.parquet"),
    *("checkpoints/ppo-read-*/tokenizer.json", "checkpoints/sft-*/attestation/statement.json"),
    *("feedback/*/session.json", "feedback/*/replies.jsonl", "recorded/*.parquet", "mlflow.db", "keys/signing.pub"),
    *("config.yaml",),
)


@pytest.mark.parametrize(("damage", "name"), sweep(DAMAGES, FILES))
def test_damaged_files_are_one_line(damage: Callable[[Path], None], name: str, made: Path, tmp_path: Path) -> None:
    policy = find("ppo-read", open_lineage_store(made, None)).sha256
    [session] = read_sessions(made)
    paths = ["/", "/rollouts", "/review", "/review/recorded", "/lineage", "/evaluations", "/promote", "/withdrawals"]
    paths += [f"/promote/{NAME}", f"/rollouts/{policy}", f"/rollouts/{policy}/diff?first=0&second=1", "/metrics"]
    paths += [f"/checkpoints/{policy}", f"/review/{session.name}"]
    paths += [
        "/runs",
        "/waiting",
        f"/rollouts/{policy}/tokens?iteration=1&row=0",
        f"/rollouts/{policy}/extremes?iteration=1",
    ]
    paths += [f"/runs/{run}{part}" for run in list(view(made).runs)[:1] for part in ("", "/live", "/curves")]
    output = Path(shutil.copytree(made, tmp_path / "run", symlinks=True))
    damage(sorted(output.glob(name))[0])
    client = studio(output)
    for path in (*paths, "/runs/x", "/runs/"):
        reply = client.get(path)
        assert reply.status_code < 500, (path, reply.text)
        assert "Traceback" not in reply.text
