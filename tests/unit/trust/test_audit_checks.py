"""Checks, kinds of entry and evidence plug in: those of a stranger's package are found as X-ray's own are."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xray_runtime.kernel.evidence.lines import KINDS, LogRecord, entry_kinds, parse_line
from xray_runtime.kernel.evidence.view import LogView, SignedEntry
from xray_runtime.kernel.history.audit_check import CHECKS, meanings
from xray_runtime.kernel.history.evidence import EVIDENCE, evidence
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.log import sign_line

ROOT = Path(__file__).parents[3]


def forget() -> None:
    for registry in (CHECKS, KINDS, EVIDENCE):
        registry.__dict__.pop("_places", None)
    meanings.cache_clear()
    entry_kinds.cache_clear()
    evidence.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """Installs a package with one plug: (group of entry points, name, source)."""
    site = tmp_path / "site"

    def install(group: str, name: str, source: str) -> None:
        (site / "strangers-1.0.dist-info").mkdir(parents=True)
        (site / f"strangers_{name}.py").write_text(source)
        (site / "strangers-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\n")
        (site / "strangers-1.0.dist-info" / "entry_points.txt").write_text(f"[{group}]\n{name} = strangers_{name}\n")
        monkeypatch.syspath_prepend(site)
        forget()

    yield install
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.startswith("strangers_")]:
        del sys.modules[name]
    forget()


def example() -> str:
    """The check in CONTRIBUTING.md."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## An audit check\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def test_a_strangers_check_is_run_and_explained(
    fresh: Callable[[], Path], installed: Callable[[str, str, str], None]
) -> None:
    output = fresh()
    before = audit(open_lineage_store(output, None))
    assert "licence-missing" not in {finding.code for finding in before.findings}
    installed("xray.audit_checks", "licences", example())
    after = audit(open_lineage_store(output, None))
    new = [finding for finding in after.findings if finding not in before.findings]
    assert {finding.code for finding in new} == {"licence-missing"}
    assert after.is_sound
    assert new[0].to_json()["meaning"] == "A source has no licence on record."


def test_two_checks_cannot_introduce_one_finding(installed: Callable[[str, str, str], None]) -> None:
    installed("xray.audit_checks", "licences", example().replace("licence-missing", "file-missing"))
    with pytest.raises(ValueError, match="'file-missing' is not allowed: another check introduces it"):
        meanings()


def test_a_strangers_entry_is_read(tmp_path: Path, installed: Callable[[str, str, str], None]) -> None:
    source = """
from typing import Literal
from xray_runtime.kernel.evidence.view import SignedEntry

class Names(list): pass

class Greeted(SignedEntry):
    action: Literal["greet"] = "greet"
    name: str

    def fold(self, view, line):
        view.state(Names).append(self.name)

KINDS = (Greeted,)
"""
    installed("xray.log_entries", "greeting", source)
    strangers_greeting = importlib.import_module("strangers_greeting")

    text = sign_line(tmp_path, LogRecord, strangers_greeting.Greeted(name="Ada"), {})
    view = LogView()
    view.add(parse_line(1, text, LogRecord))
    assert view.state(strangers_greeting.Names) == ["Ada"]
    forget()
    assert isinstance(parse_line(1, text, LogRecord).entry, SignedEntry)


def test_an_entry_of_no_kind_is_refused(tmp_path: Path) -> None:
    class Unknown(SignedEntry):
        action: str = "unknown"

    text = sign_line(tmp_path, LogRecord, Unknown(), {})
    with pytest.raises(ValueError, match="line 1 is not an entry"):
        parse_line(1, text, LogRecord)


def test_another_package_may_take_the_place_of_the_evidence(installed: Callable[[str, str, str], None]) -> None:
    installed("xray.evidence", "notary", "EVIDENCE = object()")
    strangers_notary = importlib.import_module("strangers_notary")

    assert evidence() is strangers_notary.EVIDENCE


def test_the_docs_list_every_check_and_every_kind_of_entry() -> None:
    text = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8")
    assert [action for action in entry_kinds() if f"`{action}`" not in text] == []
    rows = [f"| `{name}` | {CHECKS.get(name).about} |" for name in CHECKS]
    assert "\n".join(rows) in text
