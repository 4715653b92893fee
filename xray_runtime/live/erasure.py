"""Erasing texts below an output directory: which files hold them, and how each kind of file loses them.

A text is searched as it is, and as JSON, JSON in JSON, and HTML write it. Comparisons lose the rows that have it,
databases the values; any other file is removed. Weights, encrypted segments, keys and the signed log contain no plain
text.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from xray_runtime.data.withdrawn import FOLDER as WITHDRAWN, MIN_CHARS
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import LOG
from xray_runtime.kernel.evidence.view import LOCKS
from xray_runtime.kernel.files import sync, write_atomic
from xray_runtime.kernel.history.comparisons import JUDGEMENTS, REPLIES, SESSIONS
from xray_runtime.kernel.history.recorded_rows import RECORDED
from xray_runtime.kernel.history.signed_files import NEXT, log_signed, read_signed, write_signed
from xray_runtime.kernel.tracking.registry import is_sqlite

LEFT_ALONE = {RECORDED, WITHDRAWN, LOCKS, "keys", LOG}
WEIGHTS = (".safetensors", ".pt", ".bin", ".distcp")
GONE = "(withdrawn)"


class TextPattern:
    """Finds any of several texts in bytes."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = sorted({text.strip() for text in texts if len(text.strip()) >= MIN_CHARS}, key=len, reverse=True)
        forms = {form for text in self.texts for form in _forms(text)}
        self._pattern = re.compile(b"|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None
        self.forms = sorted((form.decode("utf-8", "surrogatepass") for form in forms), key=len, reverse=True)

    def is_in(self, content: bytes) -> bool:
        return self._pattern is not None and self._pattern.search(content) is not None


def _forms(text: str) -> Iterator[bytes]:
    for plain in {text, html.escape(text), html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")}:
        for once in (plain, json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1]):
            # A database may contain JSON inside JSON.
            for written in (once, json.dumps(once)[1:-1], json.dumps(once, ensure_ascii=False)[1:-1]):
                yield written.encode("utf-8", "surrogatepass")


def files_with(output: Path, pattern: TextPattern) -> list[Path]:
    """The files below `output` that hold one of the texts; links are not followed."""
    paths = []
    for directory, folders, names in os.walk(output):
        if Path(directory) == output:
            folders[:] = [name for name in folders if name not in LEFT_ALONE]
            names = [name for name in names if name not in LEFT_ALONE]
        for path in (Path(directory, name) for name in names):
            if path.suffix not in WEIGHTS and not path.is_symlink() and path.is_file():
                with contextlib.suppress(FileNotFoundError):
                    if pattern.is_in(path.read_bytes()) or _is_in_database(path, pattern):
                        paths.append(path)
    return sorted(paths)


def _is_in_database(path: Path, pattern: TextPattern) -> bool:
    """Whether a value of a database has one of the texts: a long one is split across pages, so the file's bytes may not
    contain it."""
    if not is_sqlite(path):
        return False
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=60)) as connection:
        return any(
            connection.execute(f"select 1 from {table} where instr({column}, ?) limit 1", (form,)).fetchone()
            for table, column in _columns(connection)
            for form in pattern.forms
        )


def _columns(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """(table, column) of every table with rows of its own, both quoted."""
    tables = connection.execute("select name from sqlite_master where type = 'table' and sql not like '%virtual%'")
    return [
        (_quoted(table), _quoted(row[1]))
        for (table,) in tables.fetchall()
        for row in connection.execute(f"pragma table_info({_quoted(table)})")
    ]


def is_database(path: Path) -> bool:
    """Whether it is a database of SQLite, or a file beside one."""
    with contextlib.suppress(OSError):
        return is_sqlite(_main(path))
    return False


def _main(path: Path) -> Path:
    """The database that a file is, or lies beside."""
    return Path(re.sub(r"-(wal|shm|journal)$", "", str(path)))


def erase_file(path: Path) -> None:
    """Overwrite a file and remove it; it may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        with path.open("r+b") as file:
            for start in range(0, size, 2**20):
                file.write(bytes(min(2**20, size - start)))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
        sync(path.parent)


def erase_from_database(path: Path, pattern: TextPattern) -> None:
    """Replace the texts in every value of a database, and rebuild it, so that its free pages do not contain them."""
    with contextlib.closing(sqlite3.connect(_main(path), timeout=60)) as connection:
        connection.execute("pragma secure_delete = on")
        for table, column in _columns(connection):
            for form in pattern.forms:
                connection.execute(
                    f"update {table} set {column} = replace({column}, ?, ?) where instr({column}, ?)",
                    (form, GONE, form),
                )
        connection.commit()
        connection.execute("vacuum")
        connection.execute("pragma wal_checkpoint(truncate)")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def loses_rows(path: Path, pattern: TextPattern) -> bool:
    """Whether a file is not erased but loses rows: a database's, or those of a comparison that have a text."""
    is_session = path.name.removesuffix(NEXT) in (REPLIES, JUDGEMENTS) and path.parent.parent.name == SESSIONS
    return is_database(path) or (is_session and bool(pattern.texts))


def erase_verdicts(output: Path, comparison: Path, pattern: TextPattern) -> None:
    """Remove from a comparison the questions and verdicts that contain a text, and the verdicts on these questions."""
    try:
        contents, is_sound = read_signed(output, comparison, (REPLIES, JUDGEMENTS)), True
    except ConfigError:
        # A file with foreign changes loses the texts too, and stays unsigned.
        paths = {name: comparison / name for name in (REPLIES, JUDGEMENTS)}
        contents = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
        is_sound = False
    lines = {name: content.splitlines(keepends=True) for name, content in contents.items()}
    remaining = {name: [line for line in name_lines if not pattern.is_in(line)] for name, name_lines in lines.items()}
    numbers = {_number(line) for line in remaining.get(REPLIES, [])}
    remaining[JUDGEMENTS] = [line for line in remaining.get(JUDGEMENTS, []) if _number(line) in numbers]
    present = {path.name.removesuffix(NEXT) for path in comparison.iterdir()}
    rewritten = {name: b"".join(name_lines) for name, name_lines in remaining.items() if name in present}
    if is_sound:
        write_signed(output, comparison, rewritten)
        # A copy from before the withdrawal is refused.
        log_signed(output, comparison)
        return
    for name, content in rewritten.items():
        write_atomic(comparison / name, content)


def _number(line: bytes) -> int | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        number: int = json.loads(line)["number"]
        return number
    return None


def rewrite(output: Path, paths: Iterable[Path], pattern: TextPattern) -> None:
    """Remove the texts from databases and comparisons."""
    comparisons = set()
    for path in paths:
        if is_database(path):
            erase_from_database(path, pattern)
        else:
            comparisons.add(path.parent)
    for directory in sorted(comparisons):
        erase_verdicts(output, directory, pattern)
