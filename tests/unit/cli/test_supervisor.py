"""When the supervisor starts a run again, when its exit code is the run's own, and what the records say then."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from xray.cli import supervisor
from xray.cli.exit_codes import FAILED, INTERRUPTED
from xray.cli.job import Job
from xray.cli.supervisor import supervise
from xray.deployments.local_services import LOST
from xray.flows.subject import Subject
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.view import RunBegan
from xray_runtime.kernel.history.audit_check import read_log
from xray_runtime.trust.keys import trusted_keys
from xray_runtime.trust.log import append

Attempt = Callable[[Job], int]
"""Job → exit code of its process."""


def by_itself(code: int, reason: str = "") -> Attempt:
    def end(job: Job) -> int:
        job.ended.write_text(reason)
        return code

    return end


def supervised(
    attempts: list[Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int = 1
) -> tuple[int, int, str]:
    """(exit code, attempts made, what was printed)."""
    made = 0

    def run(self: Any) -> int:
        nonlocal made
        made += 1
        self._job.ended.unlink(missing_ok=True)
        return attempts[min(made, len(attempts)) - 1](self._job)

    monkeypatch.setattr(supervisor._Attempts, "run", run)
    monkeypatch.setattr(supervisor, "start_reaper", lambda *_: "tag")
    for name in ("kill_tagged", "end_well"):
        monkeypatch.setattr(supervisor, name, lambda tag: None)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    said = io.StringIO()
    runtime = RuntimeConfig(restarts=restarts, stall_timeout_s=60.0)
    code = supervise(tmp_path, Subject(), runtime, Console(file=said))
    assert [*tmp_path.glob("**/job.json"), *scratch.iterdir()] == []
    return code, made, said.getvalue()


def test_a_failure_of_its_own_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervised([by_itself(FAILED)], tmp_path, monkeypatch)[:2] == (FAILED, 1)


def test_a_process_that_ends_without_a_word_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, made, said = supervised([lambda _: FAILED, by_itself(0)], tmp_path, monkeypatch)
    assert (code, made) == (0, 2)
    assert "starting again (1 of 1)" in said


def test_servers_that_do_not_start_are_started_as_often_as_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt and the end are a line each; the last one says how to go on."""
    lost = by_itself(LOST, "raylet of Ray ended right after it was started")
    code, made, said = supervised([lost], tmp_path, monkeypatch, restarts=3)
    assert (code, made) == (FAILED, 4)
    lines = said.splitlines()
    assert [line.partition("; ")[2][:22] for line in lines] == [
        "starting again (1 of 3",
        "starting again (2 of 3",
        "starting again (3 of 3",
        "giving up. Run the sam",
    ]
    assert all(line.startswith("the run was lost (raylet of Ray ended right after it was started)") for line in lines)


def test_the_reason_of_an_earlier_attempt_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = supervised([by_itself(LOST, "no room"), lambda _: -9, by_itself(0)], tmp_path, monkeypatch, restarts=2)[2]
    assert [line.partition(";")[0] for line in said.splitlines()] == [
        "the run was lost (no room)",
        "the run was lost (killed by SIGKILL)",
    ]


def test_an_interrupted_one_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Job) -> int:
        signal.raise_signal(signal.SIGTERM)
        return INTERRUPTED

    code, made, said = supervised([interrupt], tmp_path, monkeypatch)
    assert (code, made) == (INTERRUPTED, 1)
    assert said == "interrupted; run the same command again to continue from the beginning\n"


def test_an_abandoned_record_does_not_stay_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """…in the output directory, and in the one that a flow has chosen."""
    chosen = tmp_path / "chosen"

    def killed(job: Job) -> int:
        for output in (job.output, chosen):
            output.mkdir(exist_ok=True)
            facts = {"project": "p", "seed": 0, "config_digest": "0" * 64}
            named = {"tracking": "", "experiment": "p", "name": "p seed 0", "params": "0" * 64, "tags": {}}
            append(output, RunBegan(run_id="0" * 32, run_directory="", facts=facts, **named))
            record = {"run_id": "0" * 32, "flow_run_id": None, "status": "running", "stages": []}
            (output / "lifecycle.json").write_text(json.dumps(record))
        job.outputs.write_text(f"{chosen}\n")
        return -9

    assert supervised([killed], tmp_path, monkeypatch)[:2] == (FAILED, 2)
    for output in (tmp_path, chosen):
        assert json.loads((output / "lifecycle.json").read_text())["status"] == "failed"
        lines, broken = read_log(output, Verifier(trusted_keys(output)))
        view = lines.folded.view
        assert (broken, view.ended["0" * 32].status) == ([], "failed")


def test_files_in_the_output_directory_do_not_change_what_a_restart_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real child reads its job anew at each attempt; here it records what it reads."""
    reads = "import os, sys; print(open(sys.argv[1]).read()); os._exit(3)"
    output, given, modes = tmp_path / "run", list[str](), list[int]()
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        file = Path(command[-1])
        modes.append(stat.S_IMODE(file.parent.stat().st_mode))
        for place in [output / "jobs" / file.parent.name, *output.glob("**/"), *output.glob("jobs/*/")]:
            place.mkdir(parents=True, exist_ok=True)
            for name in ("job.json", "outputs", "ended", "heartbeat"):
                (place / name).write_text(file.read_text().replace("mine:flow", "os:system"))
        child = popen([sys.executable, "-c", reads, str(file)], stdout=subprocess.PIPE, text=True)
        given.append(child.communicate()[0])
        return child

    monkeypatch.setattr(supervisor.subprocess, "Popen", start)
    monkeypatch.setattr(supervisor, "start_reaper", lambda *_: "tag")
    for name in ("kill_tagged", "end_well"):
        monkeypatch.setattr(supervisor, name, lambda tag: None)
    old = os.umask(0)
    try:
        runtime = RuntimeConfig(restarts=1, stall_timeout_s=60.0)
        supervise(output, Subject(flow="mine:flow"), runtime, Console(file=io.StringIO()))
    finally:
        os.umask(old)
    assert len(given) == 2
    assert given[0] == given[1]
    assert json.loads(given[0])["subject"]["flow"] == "mine:flow"
    assert modes == [0o700] * 2
