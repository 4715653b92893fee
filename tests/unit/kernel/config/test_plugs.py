"""Plugs: found by name in a package and among entry points, imported when they are asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from xray_runtime.kernel.plugs import Registry


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[str]:
    """Two plugs of ours (one is a folder), one of somebody else's package, and one without its object."""
    name = f"plugs_{tmp_path.name}"
    ours = tmp_path / name
    (ours / "folder").mkdir(parents=True)
    (ours / "__init__.py").touch()
    (ours / "_shared.py").write_text("PLUG = 'no plug'\n")
    (ours / "one.py").write_text("PLUG = 'a module'\n")
    (ours / "folder" / "__init__.py").write_text("PLUG = 'a folder'\n")
    (ours / "empty.py").touch()
    (tmp_path / f"{name}_theirs.py").write_text("OTHER = 'their object'\n")
    information = tmp_path / "theirs-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[xray.{name}]\nfar = {name}_theirs:OTHER\n")
    monkeypatch.syspath_prepend(tmp_path)
    return Registry("trainer", name, "PLUG", f"xray.{name}")


def test_plugs_are_found_without_importing_them(registry: Registry[str]) -> None:
    assert list(registry) == ["empty", "far", "folder", "one"]
    assert registry.module("folder") == f"{registry.package}.folder"
    assert not {name for name in sys.modules if name.startswith(f"{registry.package}.")}
    assert [registry.get(name) for name in ("far", "folder", "one")] == ["their object", "a folder", "a module"]
    assert f"{registry.package}.empty" not in sys.modules


def test_an_unknown_plug_names_the_known_ones(registry: Registry[str]) -> None:
    message = "trainer = 'two' is not allowed: known are empty, far, folder, one"
    for ask in (registry.get, registry.module):
        with pytest.raises(ValueError, match=message):
            ask("two")


def test_a_module_without_the_object_is_named(registry: Registry[str]) -> None:
    with pytest.raises(ValueError, match=r"trainer 'empty': plugs_.*\.empty exposes no PLUG"):
        registry.get("empty")


def test_a_name_belongs_to_one_plug(registry: Registry[str], tmp_path: Path) -> None:
    (tmp_path / registry.package / "far.py").touch()
    with pytest.raises(ValueError, match=r"trainer 'far' is defined twice: plugs_.*\.far, plugs_.*_theirs"):
        list(registry)
