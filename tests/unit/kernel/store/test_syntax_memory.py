"""The syntax of files is remembered between processes, as long as nothing about them changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xray_runtime.kernel.store import syntax_memory as module
from xray_runtime.kernel.store.digest_memory import FileState
from xray_runtime.kernel.store.syntax_memory import SyntaxMemory

ROOT = Path(__file__).parents[4]
FIELDS = ["aa", [["json", ["loads"]]], [], None, 7]
DIGEST = """
import ast
parsed, parse = [], ast.parse
def counted(*arguments, **options):
    parsed.append(1)
    return parse(*arguments, **options)
ast.parse = counted
from xray_runtime.kernel.store.code_digest import code_reached
print(len(parsed), code_reached(["xray_runtime.algorithms.kl"], ["xray_runtime"]), len(parsed), sep="|")
"""


def digested(cache: Path) -> tuple[str, int]:
    """(code, number of files parsed) in a process of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    shown = subprocess.run(
        [sys.executable, "-c", DIGEST], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    _, code, parsed = shown.stdout.strip().split("|")
    return code, int(parsed)


def test_another_process_parses_nothing_that_is_known(tmp_path: Path) -> None:
    first, parsed = digested(tmp_path)
    assert parsed > 0
    assert digested(tmp_path) == (first, 0)
    (memory,) = (tmp_path / "xray").iterdir()
    memory.write_text("{ damaged")
    assert digested(tmp_path) == (first, parsed)


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "xray").mkdir()
    (tmp_path / "xray").chmod(0o777)
    assert digested(tmp_path)[1] > 0
    assert list((tmp_path / "xray").iterdir()) == []


def remembered(path: Path, memory: Path) -> None:
    kept = SyntaxMemory(memory)
    kept.remember(FileState.of(path), FIELDS)
    kept.keep()


def test_a_changed_file_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_S", 0.0)
    path, memory = tmp_path / "code.py", tmp_path / "memory.json"
    path.write_text("x = 1\n")
    remembered(path, memory)
    assert SyntaxMemory(memory).recall(FileState.of(path)) == FIELDS
    times = path.stat()
    path.write_text("x = 2\n")  # the same size, and its time set back
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert SyntaxMemory(memory).recall(FileState.of(path)) is None


def test_what_is_gone_or_changed_just_now_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other, memory = tmp_path / "code.py", tmp_path / "other.py", tmp_path / "memory.json"
    path.write_text("x = 1\n")
    remembered(path, memory)
    assert SyntaxMemory(memory).recall(FileState.of(path)) is None
    monkeypatch.setattr(module, "SETTLED_S", 0.0)
    remembered(path, memory)
    state = FileState.of(path)
    path.unlink()
    other.write_text("x = 1\n")
    remembered(other, memory)
    assert SyntaxMemory(memory).recall(state) is None
    assert SyntaxMemory(memory).recall(FileState.of(other)) == FIELDS
