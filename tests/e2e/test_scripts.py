"""README's ten lines as a script: interrupted, killed, and run again to the end."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import ROOT, environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
MARK = "XRAY_TEST_SCRIPT"
"""In the environment of all that a script starts."""
LEFT_SECONDS = 60


def _left(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(" ".join(process.cmdline())[:80])
        except (psutil.Error, OSError):
            continue
    return found


def _start(directory: Path, output: Path) -> subprocess.Popen[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Ten lines")[2]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    script = directory / "first.py"
    script.write_text(code[1].replace("runs/first", str(output)))
    return subprocess.Popen(
        [sys.executable, script],
        cwd=ROOT,
        env=environment() | {MARK: str(output)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _status(output: Path) -> str:
    return str(json.loads((output / "lifecycle.json").read_text())["status"])


def test_a_script_that_ends_early_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    output = tmp_path / "run"
    for number, status in ((signal.SIGTERM, "interrupted"), (signal.SIGKILL, "failed")):
        shutil.rmtree(output / "logs", ignore_errors=True)
        process = _start(tmp_path, output)
        wait_until(lambda: list(output.glob("logs/*/policy-0.log")), seconds=600, process=process)
        process.send_signal(number)
        printed = process.communicate(timeout=300)[0]
        if number == signal.SIGTERM:
            assert process.returncode == 130
            assert "Traceback" not in printed
            assert re.match(r"interrupted; run it again to continue from \w", printed.splitlines()[-1]), printed[-2000:]
        wait_until(lambda: not _left(str(output)), seconds=LEFT_SECONDS, why="something is left", pause_s=0.5)
        assert _status(output) == status
    process = _start(tmp_path, output)
    printed = process.communicate(timeout=900)[0]
    assert process.returncode == 0, printed[-2000:]
    assert _status(output) == "completed"
