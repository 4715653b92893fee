"""The command's manners: bad input, failures, interruption."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import ROOT, XRAY, environment, xray
from xray_runtime.kernel.processes import tagged


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """Found by the run's own process on its Ray; what the command itself finds is in `tests/unit/cli`."""
    bad = ["configs/tiny.yaml", "--set", "runtime.cpus_per_workhorse=1000"]
    outcome = xray("run", *bad, "--output", str(tmp_path / "run"), timeout=60)
    assert outcome.code == 2
    assert "sft: its models need 1000 CPUs (policy 1 × 1000) and the cluster has" in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_failed_stage_says_why_and_exits_with_1(tmp_path: Path) -> None:
    broken = ["--set", "data.min_chars=59"]
    outcome = xray("run", "configs/tiny.yaml", *broken, "--output", str(tmp_path), timeout=300)
    assert outcome.code == 1
    assert "data:" in outcome.err
    assert "pairs are left of 3386" in outcome.err
    assert "Traceback" not in outcome.err
    assert '"status": "failed"' in (tmp_path / "lifecycle.json").read_text()


def _started(output: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A run that has got as far as its first Workhorse; and the mark its processes carry."""
    shutil.rmtree(output / "logs", ignore_errors=True)
    process = subprocess.Popen(
        [XRAY, "run", "configs/tiny.yaml", "--output", str(output)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not list(output.glob("logs/sft/policy-0.log")):
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, "no Workhorse was started"
        time.sleep(0.2)
    marks = set()
    for child in psutil.Process(process.pid).children(recursive=True):
        # Some live for moments alone.
        with contextlib.suppress(psutil.Error):
            marks |= {child.environ().get("XRAY_RUN_TAG")} - {None}
    assert len(marks) == 1
    return process, marks.pop()


def _left(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("XRAY_RUN_TAG") == mark:
                found.append(" ".join(process.cmdline())[:80])
        except (psutil.Error, OSError):
            continue
    return found


def _only_ray_is_reached_by_others(mark: str) -> None:
    """It asks for its token. All else listens on loopback, and there the run's own Prefect asks for its password."""
    open_to_others, addresses = [], set()
    for process in tagged(mark):
        with contextlib.suppress(psutil.Error, OSError):
            line = " ".join(process.cmdline())
            environ = process.environ()
            addresses.add(environ.get("PREFECT_API_URL", ""))
            hosts = {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
            if hosts - {"127.0.0.1", "::1"}:
                open_to_others.append((line, environ.get("RAY_AUTH_MODE")))
    # A driver of Ray's listens as Ray does.
    rays = [found for found in open_to_others if "xray.cli.runner" not in found[0]]
    assert rays
    assert [line for line, mode in rays if mode != "token" or not (line.startswith("ray::") or "/ray/" in line)] == []
    api = max(addresses)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{api}/version", timeout=20)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_nothing_is_left_running(place: Path, number: signal.Signals) -> None:
    process, mark = _started(place)
    assert len(_left(mark)) > 5
    _only_ray_is_reached_by_others(mark)
    os.kill(process.pid, number)
    process.wait(timeout=100)
    deadline = time.monotonic() + 20
    while _left(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _left(mark) == []
    if number != signal.SIGKILL:
        assert process.returncode == 130
