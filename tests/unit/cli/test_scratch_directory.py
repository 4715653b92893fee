"""The directory that a replay works in: each call removes what killed ones left, and nothing of those at work."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

from xray.cli import replaying
from xray.cli.replaying import LOCK, PREFIX, scratch_directory

KILLED = """
import os, signal, sys
from pathlib import Path
from xray.cli.replaying import scratch_directory
with scratch_directory(Path(sys.argv[1])) as scratch:
    (scratch / "state").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def without_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever these tests start ends by itself."""
    monkeypatch.setattr(replaying, "start_reaper", lambda: "")
    monkeypatch.setattr(replaying, "kill_tagged", lambda tag: None)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert [path.name for path in tmp_path.glob(f"{PREFIX}*/state")] == ["state"]
    with scratch_directory(tmp_path) as scratch:
        assert list(tmp_path.iterdir()) == [scratch]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_at_work_stays(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as first, scratch_directory(tmp_path) as second:
        assert first != second
        assert first.stat().st_mode & 0o777 == 0o700
        (first / "state").write_text("whole")
        with scratch_directory(tmp_path):
            assert (first / "state").read_text() == "whole"


def test_a_new_directory_is_not_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looks for what killed ones left just then."""
    there = []

    class Interrupted(FileLock):
        def _acquire(self) -> None:
            if not there:
                # As a lock makes its file: it opens it, and then locks it.
                path = Path(self.lock_file)
                path.touch()
                there.append(path.parent)
                with scratch_directory(tmp_path):
                    there.append(path.parent.is_dir())
            super()._acquire()

    monkeypatch.setattr(replaying, "FileLock", Interrupted)
    with scratch_directory(tmp_path) as scratch:
        assert there == [scratch, True]
        assert os.listdir(scratch) == [LOCK]


def test_two_that_remove_one_directory_do_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process ends while another one, which takes it for killed, opens its lock once more."""
    cleanup = tempfile.TemporaryDirectory._rmtree

    def meanwhile(name: str, **options: bool) -> None:
        unlink = os.unlink

        def unlinked(path: object, **more: object) -> None:
            unlink(path, **more)  # type: ignore[arg-type]
            Path(name, LOCK).touch()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "unlink", unlinked)
            cleanup(name, **options)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "_rmtree", staticmethod(meanwhile))
    with scratch_directory(tmp_path):
        pass
    monkeypatch.undo()
    # The next one finds what is left.
    with scratch_directory(tmp_path) as scratch:
        assert list(tmp_path.iterdir()) == [scratch]
