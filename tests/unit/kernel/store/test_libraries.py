"""Libraries are known by the version that is installed, and a file beside the program by its code."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from xray_runtime.kernel.store.code_digest import code_reached
from xray_runtime.kernel.store.libraries import version_of

ROOT = Path(__file__).parents[4]
PRINT = "from xray_runtime.kernel.store.code_digest import code_reached"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_libraries(folder: Path) -> None:
    (folder / "user.py").write_text("import json, yaml, rich, transformers, beside, absent_library\n")
    (folder / "beside.py").write_text("import beside_that\n")
    (folder / "beside_that.py").write_text("X = 1\n")
    versions = code_reached(["user"], ["user"]).libraries
    assert set(versions) == {"PyYAML", "transformers", "tokenizers", "Jinja2", "beside", "beside_that"}
    assert versions["PyYAML"] == importlib.metadata.version("pyyaml")
    (folder / "beside_that.py").write_text("X = 1  # a comment\n")
    assert code_reached(["user"], ["user"]).libraries == versions
    (folder / "beside_that.py").write_text("X = 20\n")
    after = code_reached(["user"], ["user"]).libraries
    assert {name for name in after if after[name] != versions[name]} == {"beside_that"}


def test_one_name_in_several_distributions() -> None:
    """As Python itself finds them, which reads all lists of files."""
    known = importlib.metadata.packages_distributions()
    assert len(known["google"]) > 1
    assert version_of("google") == ", ".join(
        f"{d} {importlib.metadata.version(d)}" for d in sorted(set(known["google"]))
    )
    assert version_of("PIL") == f"pillow {importlib.metadata.version('pillow')}"


def test_a_file_that_hides_a_library(folder: Path) -> None:
    (folder / "hidden.py").write_text("import xxhash\n")
    assert code_reached(["hidden"], ["hidden"]).libraries == {"xxhash": importlib.metadata.version("xxhash")}
    (folder / "xxhash.py").write_text("X = 1\n")
    importlib.invalidate_caches()
    shown = subprocess.run(
        [sys.executable, "-c", f"{PRINT}; print(code_reached(['hidden'], ['hidden']).libraries['xxhash'])"],
        env={"PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(shown.stdout.strip()) == 64


def test_an_editable_install_is_its_version_and_its_source(folder: Path) -> None:
    (folder / "user_of.py").write_text("import editable_one\n")
    (folder / "editable_one.py").write_text("X = 1\n")
    info = folder / "editable_one-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: editable-one\nVersion: 1.2\n")
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))
    importlib.invalidate_caches()
    before = code_reached(["user_of"], ["user_of"]).libraries
    assert before["editable-one"].startswith("1.2 ")
    (folder / "editable_one.py").write_text("X = 20\n")
    assert code_reached(["user_of"], ["user_of"]).libraries["editable-one"] != before["editable-one"]


def test_a_library_that_ray_carries_too_is_the_installed_one() -> None:
    """Importing Ray puts a psutil of its own first on the path: the key must not depend on who imported what."""
    code = (
        "import psutil\n{}from xray_runtime.kernel.store.code_digest import code_reached\n"
        "roots = ['xray_runtime.cluster.whole_model']\n"
        "print(code_reached(roots, {{'xray_runtime'}}).modules, code_reached(roots, {{'xray_runtime'}}).libraries)\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code.format(first)], capture_output=True, text=True, check=True).stdout
        for first in ("", "import ray\n")
    ]
    assert runs[0] == runs[1]
