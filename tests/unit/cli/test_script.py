"""How a script ends: in a line where it was interrupted or a stage failed, else in its own traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xray_runtime.kernel.processes import TAG
from xray_runtime.trust.keys import seal_of
from xray_runtime.trust.signing import signing_key

SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from xray.script import Script

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it

class Stages:
    failure = RuntimeError("the disk is full")
    def has_failed_with(self, error):
        return error is self.failure

output = Path(sys.argv[1])
with Script(output) as script:
    script.opened(Stages())
    {body}
"""


def run(output: Path, body: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(body=body)
    return subprocess.run([sys.executable, "-c", code, output], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupted_one_says_where_it_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "snapshots" / "sft-0123abcd" / "step-0000000020").mkdir(parents=True)
    done = run(tmp_path, f"signal.raise_signal({number.value}); time.sleep(60)")
    assert done.returncode == 130
    assert done.stderr.splitlines() == [
        "stopping after the current step, with a snapshot; interrupt again to stop at once",
        "interrupted; run it again to continue from sft step 20",
    ]


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    body = """
    try:
        signal.raise_signal(2)
    finally:
        signal.raise_signal(2)
        time.sleep(60)
        print("waited")"""
    done = run(tmp_path, body)
    assert (done.returncode, "waited" in done.stdout) == (130, False)


def test_a_stage_that_failed_is_its_cause_in_a_line(tmp_path: Path) -> None:
    done = run(tmp_path, "raise Stages.failure")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["failed: RuntimeError: the disk is full", f"logs: {tmp_path / 'logs'}"]


@pytest.mark.parametrize(
    ("body", "error", "shown"),
    [
        ("signal.raise_signal(2); time.sleep(60)", "KeyboardInterrupt", "interrupted; run it again to continue from"),
        ("raise Stages.failure", "RuntimeError", "failed: RuntimeError: the disk is full"),
    ],
    ids=["interrupted", "failed"],
)
def test_in_a_notebook_it_is_a_line_too_and_the_kernel_lives(tmp_path: Path, body: str, error: str, shown: str) -> None:
    cell = SCRIPT.format(body=body).replace("sys.argv[1]", repr(str(tmp_path)))
    code = f"""
from IPython.core.interactiveshell import InteractiveShell
result = InteractiveShell.instance().run_cell({cell!r})
print(type(result.error_in_exec).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    *lines, last = done.stdout.splitlines()
    assert (done.returncode, last) == (0, error), done.stderr
    assert lines[0].startswith(shown)
    assert len(lines) <= 2


def test_a_fault_of_the_script_stays_a_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "raise RuntimeError('the disk is full')")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1] == "RuntimeError: the disk is full"


def test_handlers_of_its_own_are_left_alone(tmp_path: Path) -> None:
    body = "print(signal.getsignal(2) is own, signal.getsignal(15) == script._interrupt)"
    code = SCRIPT.replace("with Script", "own = lambda *_: None\nsignal.signal(2, own)\nwith Script").format(body=body)
    code += "print(signal.getsignal(2) is own, signal.getsignal(15) == signal.SIG_DFL)\n"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["True True", "True True"], done.stderr


def test_one_that_is_killed_leaves_no_process_and_no_run_at_work(tmp_path: Path) -> None:
    record = {"run_id": "0" * 32, "flow_run_id": None, "status": "running", "stages": []}
    (tmp_path / "lifecycle.json").write_text(json.dumps(record))
    signing_key(tmp_path)
    seal_of(tmp_path).seal_file(tmp_path / "lifecycle.json")
    body = f"""
    sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]
    started = subprocess.Popen(sleeper, env=os.environ | script.tag())
    own = subprocess.Popen(sleeper)
    print(started.pid, own.pid, "{TAG}" in os.environ, flush=True)
    os.kill(os.getpid(), 9)"""
    environment = {name: value for name, value in os.environ.items() if name != TAG}
    done = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body), tmp_path], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert done.stdout is not None
    started, own, tagged = done.stdout.readline().split()
    assert tagged == "False"
    deadline = time.monotonic() + 180
    while json.loads((tmp_path / "lifecycle.json").read_text())["status"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    # It was the first thing the reaper did.
    assert not Path(f"/proc/{started}").exists() or "Z" in Path(f"/proc/{started}/stat").read_text().split()[2]
    os.kill(int(own), signal.SIGKILL)
    assert done.wait(timeout=60) == -signal.SIGKILL
