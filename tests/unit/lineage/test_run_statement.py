"""What a run left for people is what it signed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xray_runtime.lineage.run_statement import begin_run, check_runs, sign_run

from xray_runtime.lineage.keys import rotate, trusted_keys
from xray_runtime.lineage.signing import Verifier, sign, signing_key

REPORT, METRICS = "report.html", "records/sft/metrics.csv"
OPEN = ("lifecycle.json", "run-open")
"""Only worth knowing."""


def said(output: Path, status: str, run: str = "run-1") -> None:
    (output / "lifecycle.json").write_text(json.dumps({"run_id": run, "status": status}))


def ended(output: Path, run: str = "run-1") -> None:
    """A run that left a report and a stage's metrics, and signed them."""
    (output / METRICS).parent.mkdir(parents=True, exist_ok=True)
    for name in (REPORT, METRICS):
        (output / name).write_text(f"{name} of {run}")
    said(output, "completed", run)
    sign_run(output, run, [output / n for n in (REPORT, METRICS, "lifecycle.json")], {}, signing_key(output))


def found(output: Path, **options: Any) -> list[tuple[str, str]]:
    """(subject, code) of what is wrong."""
    return [(f.subject, f.code) for f in check_runs(output, Verifier(trusted_keys(output)), **options)]


def signed_again(output: Path, change: Callable[[dict[str, Any]], object], key: Path | None = None) -> None:
    path = output / "attestations" / "run-1.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    path.with_suffix(".sig").unlink()
    sign(path, path.with_suffix(".sig"), key or signing_key(output))


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("name", [REPORT, METRICS])
@pytest.mark.parametrize(
    "change",
    [lambda path: path.write_text("other"), lambda path: path.unlink(), _linked],
    ids=["changed", "gone", "a link"],
)
def test_every_file_is_what_was_signed(tmp_path: Path, name: str, change: Callable[[Path], object]) -> None:
    ended(tmp_path)
    assert found(tmp_path) == []
    change(tmp_path / name)
    assert found(tmp_path) == [(name, "run-changed")]
    # Without a key to check with, digests still are.
    assert [(f.subject, f.code) for f in check_runs(tmp_path, None)] == [(name, "run-changed")]


def test_while_a_run_is_at_work_only_what_it_writes_anew_may_differ(tmp_path: Path) -> None:
    ended(tmp_path, "run-1")
    said(tmp_path, "running", "run-2")
    (tmp_path / REPORT).write_text("half a report")
    assert found(tmp_path) == [OPEN]
    (tmp_path / METRICS).write_text("other")
    assert found(tmp_path) == [OPEN, (METRICS, "run-changed")]
    # A run that signed its end is at work no more, whatever it is made to say.
    ended(tmp_path, "run-1")
    said(tmp_path, "running", "run-1")
    assert found(tmp_path) == [("lifecycle.json", "run-changed")]


@pytest.mark.parametrize(
    ("status", "codes"),
    [("completed", ["run-unsigned"]), ("failed", ["run-unsigned"]), ("running", ["run-open"]), ("cancelled", [])],
)
def test_a_run_that_ended_has_signed(tmp_path: Path, status: str, codes: list[str]) -> None:
    said(tmp_path, status)
    signing_key(tmp_path)
    assert found(tmp_path) == [("lifecycle.json", code) for code in codes]


@pytest.mark.parametrize("status", [None, "completed", "cancelled", "running"])
def test_a_report_whose_signature_is_gone_is_nobodys(tmp_path: Path, status: str | None) -> None:
    ended(tmp_path)
    for path in (tmp_path / "attestations").iterdir():
        path.unlink()
    (tmp_path / REPORT).write_text("forged")
    if status is None:
        (tmp_path / "lifecycle.json").unlink()
    else:
        said(tmp_path, status)
    # Without a signature a run that is said to be at work cannot be told from one that is.
    assert (OPEN in found(tmp_path)) == (status == "running")
    assert ((REPORT, "run-unsigned") in found(tmp_path)) == (status != "running")


def test_a_run_that_goes_on_has_no_end_on_record(tmp_path: Path) -> None:
    ended(tmp_path)
    for _ in range(2):
        begin_run(tmp_path, "run-1")
    assert found(tmp_path) == [("lifecycle.json", "run-unsigned"), (REPORT, "run-unsigned")]
    ended(tmp_path)
    assert found(tmp_path) == []


def test_the_last_run_counts_whatever_its_name(tmp_path: Path) -> None:
    ended(tmp_path, "b")
    ended(tmp_path, "a")
    assert found(tmp_path) == []
    (tmp_path / "attestations" / "b.sig").unlink()
    assert found(tmp_path) == [("attestations/b.json", "run-unsigned")]
    assert found(tmp_path, last_only=True) == []


def test_what_an_earlier_run_alone_left_is_held_too(tmp_path: Path) -> None:
    ended(tmp_path, "a")
    (tmp_path / REPORT).write_text("of b")
    said(tmp_path, "completed", "b")
    sign_run(tmp_path, "b", [tmp_path / REPORT, tmp_path / "lifecycle.json"], {}, signing_key(tmp_path))
    assert found(tmp_path) == []
    (tmp_path / METRICS).write_text("other")
    assert found(tmp_path) == [(METRICS, "run-changed")]


def test_a_statement_of_another_run_is_none(tmp_path: Path) -> None:
    ended(tmp_path, "a")
    for suffix in (".json", ".sig"):
        (tmp_path / "attestations" / f"a{suffix}").rename(tmp_path / "attestations" / f"b{suffix}")
    subjects = ["lifecycle.json", "attestations/b.json", REPORT]
    assert found(tmp_path) == [(subject, "run-unsigned") for subject in subjects]


def test_a_retired_key_vouches_for_runs_that_ended_before(tmp_path: Path) -> None:
    ended(tmp_path)
    old = tmp_path / "old.pem"
    old.write_bytes(signing_key(tmp_path).read_bytes())
    rotate(tmp_path, by="a person", note="")
    assert found(tmp_path) == []
    later = {"at": "2099-01-01T00:00:00+00:00"}
    signed_again(tmp_path, lambda content: content["predicate"].update(later), key=old)
    assert found(tmp_path) == [("attestations/run-1.json", "run-unsigned"), (REPORT, "run-unsigned")]


@pytest.mark.parametrize("name", ["../outside", "records/../../outside", "{outside}"])
def test_no_file_elsewhere_is_read(tmp_path: Path, name: str) -> None:
    output, outside = tmp_path / "out", tmp_path / "outside"
    output.mkdir()
    outside.write_text(f"{REPORT} of run-1")
    ended(output)
    name = name.format(outside=outside)
    signed_again(output, lambda content: next(s for s in content["subject"] if s["name"] == REPORT).update(name=name))
    # Its bytes are those that were signed.
    findings = list(check_runs(output, Verifier(trusted_keys(output))))
    assert (name, "it names a file elsewhere") in [(f.subject, f.detail) for f in findings]
    assert [f.subject for f in findings] == [REPORT, name]


@pytest.mark.parametrize("run", ["../run", "/run", ""])
def test_a_run_id_leads_nowhere_else(tmp_path: Path, run: str) -> None:
    output = tmp_path / "out"
    output.mkdir()
    ended(output, run)
    assert sorted(path.parent for path in tmp_path.rglob("*.sig")) == [output / "attestations"]
