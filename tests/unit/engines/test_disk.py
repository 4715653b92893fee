"""Directories of engines on a node's disk: one each, and none left behind by the dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from xray_runtime.engines.disk import own_directory

CODE = """
import sys
from pathlib import Path
from xray_runtime.engines.disk import own_directory
place = own_directory(Path(sys.argv[1]))
(place / "states.swp").write_bytes(b"x")
print(place, flush=True)
sys.stdin.read()
"""


def test_files_of_killed_processes_are_removed_and_those_in_use_stay(tmp_path: Path) -> None:
    root = tmp_path / "nvme"
    command = [sys.executable, "-c", CODE, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        mine = own_directory(root)
        assert set(root.glob("xray-*")) == {theirs, mine}
        other.kill()
        other.wait()
    again = own_directory(root)
    assert set(root.glob("xray-*")) == {mine, again}
