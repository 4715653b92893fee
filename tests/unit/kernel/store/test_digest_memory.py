"""A file that did not change is not read again, whoever asks, and whatever happened to the memory."""

from __future__ import annotations

import hashlib
import mmap
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.kernel.store.outside import LONG_AGO, written
from xray_runtime.kernel.store import digest_memory
from xray_runtime.kernel.store.content_digest import DigestMemory, OutsideChangedError, file_digest
from xray_runtime.kernel.store.digest_memory import FileState

ROOT = Path(__file__).parents[4]
needs_memory_disk = pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a file system in memory")


def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path, memory: DigestMemory, reads: list[str]) -> None:
    path = written(tmp_path / "a.jsonl", b"abc")
    # FIPS 180-2's example.
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digest(path, memory) == expected
    assert file_digest(path, DigestMemory(memory.path)) == expected
    assert reads == ["a.jsonl"]
    (tmp_path / "link").symlink_to(path)
    assert file_digest(tmp_path / "link", memory) == expected
    assert reads == ["a.jsonl"]
    os.utime(path, (LONG_AGO + 1, LONG_AGO + 1))
    assert file_digest(path, memory) == expected
    assert len(reads) == 2
    written(path, b"xyz", LONG_AGO + 2)
    assert file_digest(path, memory) == hashlib.sha256(b"xyz").hexdigest()
    os.replace(written(tmp_path / "b", b"123", LONG_AGO + 2), path)
    assert file_digest(path, memory) == hashlib.sha256(b"123").hexdigest()


def test_recently_written_files_are_read_again(tmp_path: Path, reads: list[str]) -> None:
    """Two writes in one tick of the file system's clock would look the same."""
    path, memory = written(tmp_path / "new", b"one"), DigestMemory(tmp_path / "digests.sqlite")
    assert file_digest(path, memory) == file_digest(path, memory)
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("folder", "age_s"), [(None, 60), pytest.param(Path("/dev/shm"), 10**6, marks=needs_memory_disk)], ids=str
)
def test_memory_that_is_mapped_hides_no_change(
    folder: Path | None, age_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second store into a page leaves the times, until the page was written to the disk."""
    now, memory = time.time_ns, DigestMemory(tmp_path / "digests.sqlite")
    with tempfile.NamedTemporaryFile(dir=folder or tmp_path) as file:
        file.write(bytes(4096))
        file.flush()
        path, mapped = Path(file.name), mmap.mmap(file.fileno(), 4096)
        mapped[0] = 1
        state = FileState.of(path)
        monkeypatch.setattr(time, "time_ns", lambda: now() + age_s * 10**9)
        assert file_digest(path, memory) == hashlib.sha256(b"\1" + bytes(4095)).hexdigest()
        mapped[0] = 2
        assert FileState.of(path) == state
        assert file_digest(path, memory) == hashlib.sha256(b"\2" + bytes(4095)).hexdigest()


def test_where_the_system_does_not_say_what_a_disk_is_files_are_remembered(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_memory, "SETTLED_S", -1.0)
    path, memory = written(tmp_path / "a", b"abc"), DigestMemory(tmp_path / "digests.sqlite")
    device = path.stat().st_dev
    mount = f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw master:1 - vfat /dev/root rw\n"
    monkeypatch.setattr(digest_memory, "MOUNTS", tmp_path / "mounts")
    for number, content in enumerate(("35 34 0:99999 / / rw - tmpfs none rw\n", mount, None)):
        if content is not None:
            (tmp_path / "mounts").write_text(content)
        else:
            (tmp_path / "mounts").unlink()
        path = written(tmp_path / str(number), b"abc")
        file_digest(path, memory)
        file_digest(path, memory)
    assert reads == ["0", "1", "1", "2"]


def test_a_time_set_back_hides_no_change(tmp_path: Path, memory: DigestMemory) -> None:
    path = written(tmp_path / "model.safetensors", b"one")
    file_digest(path, memory)
    inode = path.stat().st_ino
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, (LONG_AGO, LONG_AGO))
    assert path.stat().st_ino == inode
    assert file_digest(path, memory) == hashlib.sha256(b"two").hexdigest()


def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, memory: DigestMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = written(tmp_path / "a", b"one"), hashlib.file_digest

    def while_another_writes(file: Any, algorithm: str) -> Any:
        with path.open("ab") as more:
            more.write(b"more")
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", while_another_writes)
    with pytest.raises(OutsideChangedError, match="a changed while it was read"):
        file_digest(path, memory)


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 300, None])
def test_a_damaged_memory_is_begun_anew(
    tmp_path: Path, memory: DigestMemory, reads: list[str], damage: bytes | None
) -> None:
    path = written(tmp_path / "a", b"abc")
    expected = file_digest(path, memory)
    if damage is None:
        content = bytearray(memory.path.read_bytes())
        content[100:] = b"\xff" * (len(content) - 100)
        memory.path.write_bytes(content)
    else:
        memory.path.write_bytes(damage)
    assert [file_digest(path, memory) for _ in range(3)] == [expected] * 3
    assert len(reads) == 2


def test_another_table_in_its_place(tmp_path: Path, memory: DigestMemory, reads: list[str]) -> None:
    memory.path.parent.mkdir()
    with sqlite3.connect(memory.path) as connection:
        connection.execute("CREATE TABLE files (name TEXT)")
    connection.close()
    path = written(tmp_path / "a", b"abc")
    assert file_digest(path, memory) == file_digest(path, memory)
    assert reads == ["a"]


def test_without_a_memory_files_are_read(tmp_path: Path, reads: list[str], caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "a", b"abc")
    nowhere = DigestMemory(path / "below a file" / "digests.sqlite")
    assert file_digest(path, nowhere) == file_digest(path, nowhere)
    assert len(reads) == 2
    assert "files are read each time" in caplog.text


WRITER = """
import sys
from pathlib import Path
from xray_runtime.kernel.store import digest_memory
from xray_runtime.kernel.store.content_digest import DigestMemory, file_digest
digest_memory.SETTLED_S, digest_memory.CANNOT_TELL = -1.0, frozenset()
memory, folder, wanted = DigestMemory(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:]
sys.stdin.read()
print(*(file_digest(folder / name, memory)[:16] for name in wanted))
"""


def test_several_processes_at_once(tmp_path: Path, memory: DigestMemory, reads: list[str]) -> None:
    names = [f"{i}.bin" for i in range(40)]
    for name in names:
        written(tmp_path / "data" / name, name.encode())
    expected = [hashlib.sha256(name.encode()).hexdigest()[:16] for name in names]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(memory.path), str(tmp_path / "data"), *names],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert outputs == [expected] * 4
    assert [process.returncode for process in processes] == [0] * 4
    assert [file_digest(tmp_path / "data" / name, memory)[:16] for name in names] == expected
    assert reads == []
    assert not memory.path.with_name("digests.sqlite.damaged").exists()


def test_a_reader_of_much_remembers_on_the_way(
    tmp_path: Path, memory: DigestMemory, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_memory, "WRITE_AFTER_BYTES", 2)
    folder = tmp_path / "data"
    for name in "abc":
        written(folder / name, b"two bytes and more")
    (folder / "d").symlink_to(tmp_path / "absent")
    reader = digest_memory.FileReader(memory)
    for name in "abc":
        reader.digest(folder / name)
    # Never flushed by its user, as one that was killed.
    again = digest_memory.FileReader(memory)
    for name in "abc":
        again.digest(folder / name)
    assert reads == ["a", "b", "c"]
