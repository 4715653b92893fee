"""The digest of X-ray's own files does not depend on where they are installed; the packages are all that are."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from xray_runtime.trust import provenance


def written(root: Path, folders: list[str]) -> Path:
    for number, folder in enumerate(folders):
        (root / folder / "deep").mkdir(parents=True)
        (root / folder / "deep" / "a.py").write_text(f"NUMBER = {number}\n")
        (root / folder / "a.txt").write_text("not of the package")
    return root


def test_a_checkout_and_an_installed_package_have_the_same_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = written(tmp_path / "checkout", list(provenance.FOLDERS.values()))
    installed = written(tmp_path / "installed", list(provenance.FOLDERS))
    # A project of somebody else beside it.
    written(installed, ["flows", "tasks"])

    def digest(root: Path) -> str:
        monkeypatch.setattr(provenance, "ROOT", root)
        return provenance.package_digest.__wrapped__()

    before = digest(checkout)
    assert digest(installed) == before
    (installed / "flows" / "deep" / "a.py").write_text("NUMBER = 9\n")
    assert digest(installed) == before
    (installed / "xray" / "flows" / "deep" / "a.py").write_text("NUMBER = 9\n")
    assert digest(installed) != before


def test_it_reads_the_flows_tasks_and_runtime_of_this_checkout() -> None:
    for installed, checkout in provenance.FOLDERS.items():
        assert any((provenance.ROOT / folder / "__init__.py").is_file() for folder in (installed, checkout))


def test_it_lists_the_installed_packages() -> None:
    found = provenance._machine.__wrapped__()["packages"]
    assert found == {
        name: importlib.metadata.version(name)
        for name in {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    }
    assert len(found) > 100


def test_the_first_package_of_a_name_is_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2", "1"):
        (tmp_path / version / "thing.dist-info").mkdir(parents=True)
        (tmp_path / version / "thing.dist-info" / "METADATA").write_text(f"Name: thing\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "2"), str(tmp_path / "1")])
    assert provenance._machine.__wrapped__()["packages"] == {"thing": "2"}


def test_a_readme_is_no_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_thing-1.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: Some-Thing\nVersion: 1.0\n\nName: other\nVersion: 2\n"
    (tmp_path / "some_thing-1.dist-info" / "METADATA").write_text(text)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert provenance._machine.__wrapped__()["packages"] == {"some-thing": "1.0"}
