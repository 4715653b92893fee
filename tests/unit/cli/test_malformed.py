"""Malformed input to every command: one line, exit code 2, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xray.cli import group
from xray.cli.main import app

DEEP = "[" * 3000
CONTENTS: dict[str, bytes] = {
    "list": b"- 1\n- 2\n",
    "text": b"sft",
    "number": b"7",
    "sections": b"sft: 5\ndata: [1]\nppo: text\n",
    "unknown": b"sft: {nothing: 1}\n",
    "nan": b"sft: {lr: .nan}\n",
    "infinite": b"sft: {lr: .inf}\n",
    "huge": b"sft: {steps: " + b"9" * 5000 + b"}\n",
    "large": b"sft: {steps: 1e308}\nseed: 1e400\n",
    "negative": b"seed: -1\n",
    "key is a mapping": b"sft: {{7*7}}\n",
    "key is a list": b"? [a, b]\n: 1\n",
    "key is null": b"~: 1\n",
    "key is a number": b"1: 2\n",
    "deep list": b"sft: " + DEEP.encode() + b"\n",
    "deep mapping": b"".join(b" " * n + b"a:\n" for n in range(1500)),
    "deep flow": b"{a: " * 2000,
    "aliases": b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "merge": b"<<: 5\n",
    "python": b"sft: !!python/object/apply:os.system [id]\n",
    "bool": b"sft: {full: !!bool maybe}\n",
    "timestamp": b"sft: !!timestamp never\n",
    "binary": b"sft: !!binary '%'\n",
    "set": b"sft: !!set {a, b}\n",
    "omap": b"sft: !!omap [a: 1]\n",
    "float": b"sft: {lr: !!float x}\n",
    "unclosed": b"sft: {lr: 1\n",
    "tab": b"sft:\n\tlr: 1\n",
    "twice": b"seed: 1\nseed: 2\n",
    "two documents": b"seed: 1\n---\nseed: 2\n",
    "not UTF-8": b"\xff\xfe\x00sft",
    "NUL": b"sft: \x00\n",
    "ELF": b"\x7fELF" + bytes(range(256)),
    "surrogate": b'project: "\\ud800"\n',
    "control": b'project: "\\e[2J"\n',
    "empty key": b'"": 1\n',
    "search": b"fields: {sft.lr: {low: nan, high: 1}}\n",
    "no fields": b"fields: {}\n",
    "odd path": b"fields: {..: {low: 1, high: 2}, 'a.9.b': {choices: [1, 2]}}\n",
}
OVERRIDES = (
    *("sft={{7*7}}", "sft", "=", "=1", ".=1", "sft..lr=1", "sft.lr=", "sft.lr=.nan", "sft.lr=[", f"sft={DEEP}"),
    *("a" * 5000, "ppo.stages.x=1", "ppo.stages.99.lr=1", "ppo.stages.-1=1", "ppo.stages=5", "seed.x=1"),
    *("seed=1e999", "seed=!!bool x", "project=\x00", "project=\udcff", "project='[red]'", "sft.lr=*x", "sft=&"),
    *("data={a: b: c}", "sft=!!python/none", "runtime.storage=5", "runtime.storage=/dev/null/x", "𝕤𝕗𝕥=1"),
    *("sft.steps=٣",),
)
REFS = (
    *("", " ", ".", "..", "../../etc/passwd", "/etc/passwd", "-", "@", "policy@", "@champion", "policy@@", "xray:"),
    *("a:b:c", "models:/", "models:/a/b/c", "models:/a/-1", "policy/1/2", "0" * 64, "g" * 64, "*", "[a-", "{{7*7}}"),
    *("\udcff", "é", "a" * 5000, "sft-1\n", "file:///etc/passwd", "http://127.0.0.1:1/", "sft-2-", "~root", "$(id)"),
    *("a\x00b",),
)


def arguments(place: Path) -> Iterator[tuple[str, ...]]:
    """Command lines, none of which may start anything."""
    files = [place / f"{number}.yaml" for number in range(len(CONTENTS))]
    for path, content in zip(files, CONTENTS.values(), strict=True):
        path.write_bytes(content)
    os.mkfifo(place / "pipe.yaml")
    (place / "folder.yaml").mkdir()
    (place / "loop.yaml").symlink_to("loop.yaml")
    for path in ("pipe", "folder", "loop", "missing"):
        files.append(place / f"{path}.yaml")
    files += [Path("/dev/zero"), Path("/etc/shadow/x"), Path("a" * 300 + ".yaml")]
    good = place / "good.yaml"
    good.write_text("project: xray-malformed\n")
    for number, path in enumerate(files):
        yield ("plan", str(path))
        if number % 8 == 0 or number >= len(CONTENTS):
            yield ("run", str(path), "--output", str(place / "out"))
            yield ("tune", str(good), "--search", str(path), "--output", str(place / "out"))
            yield ("import", str(path), "--output", str(place / "out"))
    for override in OVERRIDES:
        yield ("plan", str(good), "--set", override)
    for number, ref in enumerate(REFS):
        yield (("lineage", "audit", "rollouts")[number % 3], ref, "--output", str(place / "empty"))
    for command in group.COMMANDS:
        yield (command.rstrip("_"), "--nothing")
    for flow in ("a:b", ":", "a:", ":b", "os:path", "os:nothing", "..:x", "a b:c", "\udcff:x", "a" * 3000 + ":b"):
        yield ("run", flow, "--output", "/dev/null/out")


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_malformed_input_is_one_line(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/nowhere/mlflow.db")
    tried, wrong = 0, []
    for line in [*arguments(tmp_path)][part::3]:
        result = CliRunner().invoke(app, list(line))
        said = result.stderr.strip().splitlines()
        usage = any(text.startswith("Usage:") for text in said)
        plain = len(said) == 1 and said[0].startswith("error: ")
        if result.exit_code != 2 or not (plain or usage) or not isinstance(result.exception, SystemExit):
            wrong.append(
                (*(text[:60] for text in line), result.exit_code, result.stderr[-400:], repr(result.exception))
            )
        tried += 1
    assert tried > 50
    assert wrong == []


def test_an_unexpected_error_is_one_line_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail() -> None:
        raise KeyError("two\nlines [red]")

    monkeypatch.setattr(group, "load", lambda name: group.command_of(name, fail))
    result = CliRunner().invoke(app, ["status"])
    [path] = tmp_path.glob("xray-error-*.log")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [rf"failed: KeyError: 'two\nlines [red]' (please report it, with {path})"]
    assert path.read_text().startswith("Traceback (most recent call last)")


def test_the_real_command_takes_bytes_that_are_no_text(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xray.cli.main", "plan", b"\xff\xfe.yaml", "--set", b"sft.lr=\xff"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert b"Traceback" not in done.stderr + done.stdout
