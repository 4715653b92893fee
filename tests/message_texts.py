"""Texts of messages, once: tests compare what they were told with `tests/messages/FOLDER.txt`.

A file has one entry a message: `== file::test[case]`, with ` #2` for the second one of a test, and the text below.
What differs from run to run is replaced before it is compared (`{tmp}`, `{host}`, `pid {n}`); `{*}`, written by hand,
stands for any text in a line. `XRAY_WRITE_MESSAGES=1 pytest PATH` writes what differs: read the diff.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("messages")
WRITE = "XRAY_WRITE_MESSAGES"
HEADER = "== "


def read(path: Path) -> dict[str, str]:
    """Key → text, of one file."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith(HEADER):
            lines = found[line.removeprefix(HEADER)] = []
        else:
            lines.append(line)
    return {key: "\n".join(lines) for key, lines in found.items()}


def matches(text: str, expected: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in expected.split("{*}"))
    return re.fullmatch(pattern, text) is not None


class Messages:
    """The messages of one test, in the order in which it compares them."""

    def __init__(self, test: Path, name: str, tmp: Path) -> None:
        """`name`: the test's own, with its case in brackets."""
        folder = test.parent.relative_to(Path(__file__).parent)
        self._path = FOLDER / f"{'-'.join(folder.parts)}.txt"
        self._key, self._count, self._tmp = f"{test.name}::{name}", 0, tmp

    @contextmanager
    def raises(self, kind: type[Exception]) -> Iterator[pytest.ExceptionInfo[Exception]]:
        """As `pytest.raises`; the whole message must be the one that is on file."""
        with pytest.raises(kind) as caught:
            yield caught
        self.check(str(caught.value))

    def check(self, text: str) -> None:
        """Compare a text, such as a command's output, with the one that is on file."""
        self._count += 1
        key = self._key if self._count == 1 else f"{self._key} #{self._count}"
        text, known = self._plain(text), read(self._path)
        if os.environ.get(WRITE) and not (key in known and matches(text, known[key])):
            self._write(known | {key: text})
            return
        assert key in known, f"{self._path.name} has no {key!r}, which says {text!r}: write it with {WRITE}=1"
        if not matches(text, known[key]):
            assert text == known[key]

    def _plain(self, text: str) -> str:
        """Without what differs from run to run, nor blanks at the ends of lines."""
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "{host}", text.replace(str(self._tmp), "{tmp}"))
        return "\n".join(line.rstrip() for line in re.sub(r"\bpid \d+", "pid {n}", text).splitlines())

    def _write(self, texts: dict[str, str]) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:
            raise RuntimeError(f"{WRITE} needs one process: leave out -n")
        FOLDER.mkdir(exist_ok=True)
        entries = [f"{HEADER}{key}\n{texts[key]}\n" for key in sorted(texts)]
        self._path.write_text("".join(entries), encoding="utf-8")
