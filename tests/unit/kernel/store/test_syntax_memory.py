"""The syntax of files is remembered between processes, as long as their bytes are the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xray_runtime.kernel.store.syntax_memory import SyntaxMemory

ROOT = Path(__file__).parents[4]
KL = ROOT / "xray_runtime" / "algorithms" / "kl.py"
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


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, Path]:
    """The output of a first process, and the cache file that it wrote."""
    cache = tmp_path_factory.mktemp("cache")
    code, parsed = digested(cache)
    (memory,) = (cache / "xray").iterdir()
    return code, parsed, memory


@pytest.fixture
def memory(kept: tuple[str, int, Path], tmp_path: Path) -> Path:
    """A copy of that memory, in the cache `tmp_path`."""
    (tmp_path / "xray").mkdir(mode=0o700)
    return Path(shutil.copy2(kept[2], tmp_path / "xray"))


@pytest.mark.usefixtures("memory")
def test_another_process_parses_nothing_that_is_known(kept: tuple[str, int, Path], tmp_path: Path) -> None:
    first, parsed, _ = kept
    assert parsed > 0
    assert digested(tmp_path) == (first, 0)


@pytest.mark.parametrize("damage", ["{ damaged", json.dumps({str(KL): 5}), "[" * 100_000, ""])
def test_a_damaged_memory_is_not_read(kept: tuple[str, int, Path], memory: Path, tmp_path: Path, damage: str) -> None:
    memory.write_text(damage)
    assert digested(tmp_path) == kept[:2]


def test_one_changed_byte_damages_a_memory(kept: tuple[str, int, Path], memory: Path, tmp_path: Path) -> None:
    head, content = memory.read_text().split("\n")
    digest = re.search("[0-9a-f]{64}", content.partition(str(KL))[2])
    assert digest is not None
    memory.write_text(f"{head}\n{content.replace(digest[0], '0' * 64)}")
    assert digested(tmp_path) == kept[:2]


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "xray").mkdir()
    (tmp_path / "xray").chmod(0o777)
    assert digested(tmp_path)[1] > 0
    assert list((tmp_path / "xray").iterdir()) == []


def test_only_the_same_bytes_are_known(tmp_path: Path) -> None:
    path, memory = tmp_path / "code.py", tmp_path / "memory.json"
    path.touch()
    kept = SyntaxMemory(memory)
    kept.remember(path, "a" * 64, FIELDS)
    kept.keep()
    assert SyntaxMemory(memory).recall(path, "a" * 64) == FIELDS
    assert SyntaxMemory(memory).recall(path, "b" * 64) is None
    assert SyntaxMemory(memory).recall(tmp_path / "other.py", "a" * 64) is None


def test_an_edit_shows_where_times_do_not(tmp_path: Path) -> None:
    """As in an image of a container, whose files all have one time."""
    code = f"""
import os, sys
from pathlib import Path
from xray_runtime.kernel.store.syntax import keep_syntax, read_syntax
real = os.stat
times = {{"st_atime_ns": 1, "st_mtime_ns": 1, "st_ctime_ns": 1}}
os.stat = lambda *a, **k: os.stat_result((*real(*a, **k)[:7], 0, 0, 0), times)
print(read_syntax(Path({str(tmp_path / "code.py")!r})).digest)
keep_syntax()
"""
    digests = set()
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "code.py").write_text(text)
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
        digests.add(shown.stdout)
    assert len(digests) == 2


def test_what_is_gone_is_not_kept(tmp_path: Path) -> None:
    path, other, memory = tmp_path / "code.py", tmp_path / "other.py", tmp_path / "memory.json"
    path.touch()
    kept = SyntaxMemory(memory)
    kept.remember(path, "a" * 64, FIELDS)
    kept.keep()
    path.unlink()
    other.touch()
    kept = SyntaxMemory(memory)
    kept.remember(other, "b" * 64, FIELDS)
    kept.keep()
    assert SyntaxMemory(memory).recall(path, "a" * 64) is None
    assert SyntaxMemory(memory).recall(other, "b" * 64) == FIELDS
