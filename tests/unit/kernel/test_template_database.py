"""New databases are copies of a template: of the right version, whole, and made once, also by processes that race."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from xray_runtime.kernel import template_database
from xray_runtime.kernel.template_database import copy_template

# Makes a database of two tables, slowly, and notes that it did; then says what is in its own copy.
RACE = """
import sqlite3, sys, time
from pathlib import Path
from xray_runtime.kernel.template_database import copy_template

def make(path):
    with open("made", "a") as file:
        file.write("made\\n")
    connection = sqlite3.connect(path)
    connection.execute("create table first (x)")
    connection.commit()
    time.sleep(0.5)
    connection.execute("create table second (x)")
    connection.commit()
    connection.close()

path = Path(sys.argv[1])
copy_template(path, "mlflow", make)
print(*(name for (name,) in sqlite3.connect(path).execute("select name from sqlite_master order by name")))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "xray"


def make(path: Path) -> None:
    """Also leaves the newest rows in a write-ahead log beside the file."""
    connection = sqlite3.connect(path)
    connection.execute("pragma journal_mode = wal")
    connection.execute("create table made (x)")
    connection.execute("insert into made values (7)")
    connection.commit()
    LEFT_OPEN.append(connection)


LEFT_OPEN: list[sqlite3.Connection] = []


def never(path: Path) -> None:
    raise AssertionError("a template was made again")


def rows(path: Path) -> list[tuple[int]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("select x from made").fetchall()


def test_a_template_is_made_once_and_copied(tmp_path: Path, cache: Path) -> None:
    copy_template(tmp_path / "a.db", "mlflow", make)
    copy_template(tmp_path / "b.db", "mlflow", never)
    assert rows(tmp_path / "a.db") == rows(tmp_path / "b.db") == [(7,)]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.db", "b.db", "cache"]


def test_a_database_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("mine")
    copy_template(tmp_path / "a.db", "mlflow", never)
    assert (tmp_path / "a.db").read_text() == "mine"


def test_one_that_another_process_makes_meanwhile_stays(tmp_path: Path) -> None:
    def slow(path: Path) -> None:
        make(path)
        (tmp_path / "a.db").write_text("theirs")

    copy_template(tmp_path / "a.db", "mlflow", slow)
    assert (tmp_path / "a.db").read_text() == "theirs"


def test_a_template_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_template(tmp_path / "a.db", "mlflow", make)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "99.0")

    def make_new(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("create table made as select 99 as x")
            connection.commit()

    copy_template(tmp_path / "b.db", "mlflow", make_new)
    assert rows(tmp_path / "b.db") == [(99,)]
    monkeypatch.undo()
    assert rows(tmp_path / "a.db") == [(7,)]


def test_processes_that_need_it_at_the_same_time_make_it_once(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.db") for number in range(3)] + [str(tmp_path / "0.db")]
    running = [
        subprocess.Popen([sys.executable, "-c", RACE, path], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for path in paths
    ]
    assert [process.communicate(timeout=60)[0] for process in running] == ["first second\n"] * 4
    assert (tmp_path / "made").read_text() == "made\n"


def test_a_template_cut_short_is_never_seen(tmp_path: Path, cache: Path) -> None:
    """The maker fails, or the power goes, in the middle: there is no template, and no database."""

    def fails(path: Path) -> None:
        make(path)
        raise subprocess.CalledProcessError(1, "upgrade")

    copy_template(tmp_path / "a.db", "mlflow", fails)
    assert not (tmp_path / "a.db").exists()
    assert [path.suffix for path in cache.iterdir() if path.suffix != ".lock"] == []
    copy_template(tmp_path / "a.db", "mlflow", make)
    assert rows(tmp_path / "a.db") == [(7,)]


def test_a_copy_cut_short_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_template(tmp_path / "a.db", "mlflow", make)

    def torn(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:100])
        raise OSError("no space left on device")

    monkeypatch.setattr(template_database.shutil, "copyfile", torn)
    copy_template(tmp_path / "b.db", "mlflow", never)
    assert sorted(path.name for path in tmp_path.glob("*.db*")) == ["a.db"]


@pytest.mark.parametrize("others", ["a file", "writable"])
def test_a_cache_that_cannot_be_used_is_ignored(others: str, tmp_path: Path, cache: Path) -> None:
    if others == "a file":
        cache.parent.write_text("no directory")
    else:
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    copy_template(tmp_path / "a.db", "mlflow", never)
    assert not (tmp_path / "a.db").exists()
