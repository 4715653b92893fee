"""`.venv/tree` has the shape of the wheel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tree(tmp_path: Path, load_script: Callable[..., Any]) -> Any:
    module = load_script("tree")
    module.TREE = tmp_path / "tree"
    return module


def test_folders_lie_where_they_are_imported_from(tree: Any) -> None:
    place = tree.assemble()
    assert (place / "xray" / "flows" / "lifecycle.py").samefile(ROOT / "flows" / "lifecycle.py")
    assert (place / "xray" / "session.py").samefile(ROOT / "xray" / "session.py")
    assert (place / "xray_runtime/kernel/files.py").samefile(ROOT / "xray_runtime/kernel/files.py")
    assert not (place / "xray").is_symlink(), "a link into the checkout would have no flows"


def test_links_to_missing_files_are_removed(tree: Any) -> None:
    place = tree.assemble()
    (place / "xray" / "gone.py").symlink_to(ROOT / "xray" / "gone.py")
    (place / ".mypy_cache").mkdir()
    before = (place / "xray" / "flows").lstat().st_mtime_ns
    tree.assemble()
    assert not (place / "xray" / "gone.py").is_symlink()
    assert (place / ".mypy_cache").is_dir()
    assert (place / "xray" / "flows").lstat().st_mtime_ns == before


def test_links_of_another_checkout_are_made_anew(tree: Any, tmp_path: Path) -> None:
    place = tree.assemble()
    (place / "tests").unlink()
    (place / "tests").symlink_to(tmp_path)
    assert (tree.assemble() / "tests").samefile(ROOT / "tests")
