"""The signed log: what an entry reads and keeps, when it is cut short, and what is taken into it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trust.long_logs import read_lines
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.log import LOG, digests
from xray_runtime.kernel.evidence.view import START, Left, LogView, RunBegan, RunEnded, run_lock
from xray_runtime.kernel.history.audit_check import read_log
from xray_runtime.kernel.history.graph import CheckpointGraph
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.trust import log
from xray_runtime.trust.audit.checks.files import check_files
from xray_runtime.trust.keys import rotate, trusted_keys
from xray_runtime.trust.log import append, decide, log_checkpoints, log_files
from xray_runtime.trust.signing import signing_key


def register(output: Path, number: int, name: str = "policy") -> None:
    decide(output, action="register", name=name, alias="candidate", version=str(number),
           checkpoint=f"{number:064x}")  # fmt: skip


def chain(output: Path) -> list[dict[str, Any]]:
    payloads = [json.loads(line)["payload"] for line in (output / LOG).read_bytes().splitlines()]
    return [json.loads(base64.b64decode(payload))["predicate"] for payload in payloads]


def viewed(output: Path) -> LogView:
    lines, broken = read_log(output, Verifier(trusted_keys(output)))
    view = lines.folded.view
    assert broken == []
    return view


def broken(output: Path) -> list[str]:
    return [finding.detail for finding in read_log(output, Verifier(trusted_keys(output)))[1]]


def test_the_same_registration_again_is_one_decision(tmp_path: Path) -> None:
    for number, name in ((1, "a"), (1, "a"), (2, "b"), (1, "a"), (2, "a"), (1, "a")):
        register(tmp_path, number, name)
    assert [(d["name"], d["version"]) for d in chain(tmp_path)] == [("a", "1"), ("b", "2"), ("a", "2"), ("a", "1")]


def test_a_decision_keeps_what_it_was_made_of(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        **{"action": "promote", "name": "policy", "alias": "champion", "version": "3", "checkpoint": f"{3:064x}"},
        **{"by": "Ada", "note": "as agreed", "gates": [{"name": "max_kl", "passed": True, "reason": "KL 1.0"}]},
        **{"gates_from": "the defaults", "evidence": {"evaluation": f"{4:064x}"}},
    }
    decide(tmp_path, **given)
    register(tmp_path, 4, "other")
    [first, second] = chain(tmp_path)
    assert {name: first[name] for name in given} == given
    assert first["previous"] == START == "0" * 64
    first_line = (tmp_path / LOG).read_bytes().splitlines(keepends=True)[0]
    assert second["previous"] == hashlib.sha256(first_line).hexdigest()
    statement = json.loads(base64.b64decode(json.loads(first_line)["payload"]))
    assert statement["subject"] == [{"name": "policy/3", "digest": {"sha256": f"{3:064x}"}}]
    assert viewed(tmp_path).decided["policy", "champion"].version == "3"
    # What a decision is about is no file.
    assert viewed(tmp_path).files == {}


KILLED_AT = {
    "before it is signed": (log, "sign", True),
    "after it is signed": (log, "sign", False),
    "before it is on disk": (os, "fsync", True),
    "after it is on disk": (os, "fsync", False),
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_an_entry_that_is_killed_is_there_whole_or_not_at_all(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, before = KILLED_AT[moment]
    register(tmp_path, 1)
    child = os.fork()
    if child == 0:
        real = getattr(owner, name)

        def die(*arguments: Any) -> None:
            if not before:
                real(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, die)
        register(tmp_path, 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(chain(tmp_path)) == 1 + (owner is os)
    assert broken(tmp_path) == []
    register(tmp_path, 2)
    register(tmp_path, 3)
    assert [d["version"] for d in chain(tmp_path)] == ["1", "2", "3"]
    assert broken(tmp_path) == []


@pytest.mark.parametrize("size", [1, 100, 70_000])
def test_half_a_line_is_found_and_makes_way_for_the_next_entry(size: int, tmp_path: Path) -> None:
    register(tmp_path, 1)
    with (tmp_path / LOG).open("ab") as file:
        file.write(b"x" * size)
    assert broken(tmp_path) == ["line 2 is cut short"]
    register(tmp_path, 2)
    assert [d["version"] for d in chain(tmp_path)] == ["1", "2"]
    assert broken(tmp_path) == []


def test_the_last_line_is_found_whatever_its_length(tmp_path: Path) -> None:
    """The end is read in blocks of 64 KiB."""
    for size in (1, 60_000, 200_000, 5, 65_500):
        append(tmp_path, Left(note="x" * size))
    assert broken(tmp_path) == []
    assert [len(entry["note"]) for entry in chain(tmp_path)] == [1, 60_000, 200_000, 5, 65_500]


def test_no_link_is_written_through(tmp_path: Path) -> None:
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    output.mkdir()
    elsewhere.write_text("")
    (output / LOG).symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"symbolic|loop|ELOOP"):
        register(output, 1)
    assert elsewhere.read_text() == ""
    assert broken(output) != []


def test_a_retired_key_signs_nothing_after_the_one_that_took_over(tmp_path: Path) -> None:
    register(tmp_path, 1)
    old = tmp_path / "old.pem"
    old.write_bytes(signing_key(tmp_path).read_bytes())
    old.chmod(0o600)
    rotate(tmp_path, by="a person", note="")
    assert broken(tmp_path) == []
    append(tmp_path, Left(note="late"), private=old)
    [reason] = broken(tmp_path)
    assert "retired" in reason


def test_a_broken_entry_ends_what_the_log_vouches_for(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        register(tmp_path, number)
    lines = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    (tmp_path / LOG).write_bytes(lines[0] + lines[2])
    sound, found = read_log(tmp_path, Verifier(trusted_keys(tmp_path)))
    view = sound.folded.view
    assert [(f.code, f.detail) for f in found] == [("log-broken", "it does not follow the entry before it")]
    assert view.decided["policy", "candidate"].version == "1"


# Checkpoints


def test_a_checkpoint_is_logged_once_and_again_after_it_was_pruned(tmp_path: Path) -> None:
    one, two = f"{1:064x}", f"{2:064x}"
    for _ in range(2):
        log_checkpoints(tmp_path, {"a-1": one, "b-1": two}, here=True)
    assert len(chain(tmp_path)) == 2
    decide(tmp_path, action="prune", checkpoint=one)
    assert set(viewed(tmp_path).published) == {"b-1"}
    assert viewed(tmp_path).pruned == {one}
    log_checkpoints(tmp_path, {"a-1": one}, here=False)
    assert set(viewed(tmp_path).published) == {"a-1", "b-1"}
    assert viewed(tmp_path).pruned == set()
    # Computed again, and not to the same bytes.
    log_checkpoints(tmp_path, {"a-1": two}, here=True)
    assert viewed(tmp_path).published["a-1"].checkpoint == two


def test_changed_files_are_not_signed_again(tmp_path: Path) -> None:
    path = tmp_path / "records" / "a-1" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("what was measured")
    before = digests(tmp_path, [path.parent])
    log_checkpoints(tmp_path, {"a-1": f"{1:064x}"}, before, here=True, renew=True)
    path.write_text("what somebody likes better")
    log_checkpoints(tmp_path, {"a-1": f"{1:064x}"}, digests(tmp_path, [path.parent]), here=True)
    assert viewed(tmp_path).files["records/a-1/metrics.jsonl"] == before["records/a-1/metrics.jsonl"]
    log_checkpoints(tmp_path, {"a-1": f"{1:064x}"}, digests(tmp_path, [path.parent]), here=True, renew=True)
    assert viewed(tmp_path).files["records/a-1/metrics.jsonl"] != before["records/a-1/metrics.jsonl"]


def test_a_page_is_listed_once_as_long_as_it_stays_the_same(tmp_path: Path) -> None:
    page = tmp_path / "lineage" / "a.html"
    page.parent.mkdir()
    for text in ("one", "one", "two"):
        page.write_text(text)
        log_files(tmp_path, [page], "lineage")
    assert len(chain(tmp_path)) == 2


# Runs


def began(output: Path, run_id: str, place: str = "", **facts: Any) -> None:
    entry = RunBegan(
        run_id=run_id,
        run_directory=place,
        facts={"seed": 0} | facts,
        tracking="",
        experiment="x",
        name="x",
        params=START,
        tags={},
    )
    append(output, entry)
    said(output, run_id, "running", place)


def said(output: Path, run_id: str, status: str, place: str = "", **others: Any) -> None:
    path = output / place / "lifecycle.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"run_id": run_id, "status": status, "seed": 0} | others))


def ended(output: Path, run_id: str, place: str = "") -> None:
    said(output, run_id, "completed", place)
    (output / place / "report.html").write_text(f"report of {run_id}")
    files = digests(output, [output / place / name for name in ("lifecycle.json", "report.html")])
    append(output, RunEnded(run_id=run_id, status="completed"), files)


def found(output: Path) -> list[tuple[str, str]]:
    """(subject, code) of what is wrong."""
    view = viewed(output)
    return [(f.subject, f.code) for f in check_files(LineageStore(output, CheckpointGraph(), None), view)]


def test_a_run_ends_goes_on_and_ends_again(tmp_path: Path) -> None:
    began(tmp_path, "a")
    assert found(tmp_path) == [("lifecycle.json", "run-open")]
    ended(tmp_path, "a")
    assert found(tmp_path) == []
    began(tmp_path, "a")
    assert found(tmp_path) == [("lifecycle.json", "run-open")]
    ended(tmp_path, "a")
    assert found(tmp_path) == []


@pytest.mark.parametrize("status", ["running", "interrupted", "failed", ""])
def test_an_ended_run_is_not_running_whatever_its_record_says(status: str, tmp_path: Path) -> None:
    began(tmp_path, "a")
    ended(tmp_path, "a")
    said(tmp_path, "a", status)
    assert found(tmp_path) == [("lifecycle.json", "run-changed")]


def test_a_run_that_was_cut_short_vouches_for_nothing_once_another_ended(tmp_path: Path) -> None:
    began(tmp_path, "a")
    began(tmp_path, "b")
    ended(tmp_path, "b")
    assert found(tmp_path) == []
    said(tmp_path, "a", "running", seed=0)
    assert found(tmp_path) == [("lifecycle.json", "run-changed")]
    # Still at work, it holds its lock: then the record is its own.
    with run_lock(tmp_path, "a"):
        assert found(tmp_path) == [("lifecycle.json", "run-open")]


def test_an_open_run_says_what_it_began_with(tmp_path: Path) -> None:
    began(tmp_path, "a")
    for others, code in (({"seed": 1}, "run-changed"), ({"seed": False}, "run-open"), ({}, "run-open")):
        said(tmp_path, "a", "running", **others)
        assert (code in dict(map(reversed, found(tmp_path)))) or others == {"seed": False}
    said(tmp_path, "a", "completed")
    assert ("lifecycle.json", "run-changed") in found(tmp_path)


def test_runs_in_places_of_their_own_are_held_to_what_they_signed(tmp_path: Path) -> None:
    began(tmp_path, "a", "searches/x/1")
    ended(tmp_path, "a", "searches/x/1")
    began(tmp_path, "b", "searches/x/2")
    assert found(tmp_path) == [("searches/x/2/lifecycle.json", "run-open")]
    (tmp_path / "searches/x/1/report.html").write_text("forged")
    assert ("searches/x/1/report.html", "run-changed") in found(tmp_path)


@pytest.mark.parametrize("make", [said, lambda output, *_: (output / "report.html").write_text("forged")])
def test_records_of_an_unsigned_run_are_named(make: Callable[..., Any], tmp_path: Path) -> None:
    register(tmp_path, 1)
    make(tmp_path, "a", "completed")
    [(subject, code)] = found(tmp_path)
    assert (subject in ("lifecycle.json", "report.html"), code) == (True, "run-unsigned")


@pytest.mark.parametrize("name", ["../outside", "records/../../outside", "{outside}"])
def test_no_file_elsewhere_is_read(tmp_path: Path, name: str) -> None:
    output, outside = tmp_path / "out", tmp_path / "outside"
    output.mkdir()
    outside.write_text("secret")
    name = name.format(outside=outside)
    append(output, Left(note=""), {name: hashlib.sha256(b"secret").hexdigest()})
    findings = list(check_files(LineageStore(output, CheckpointGraph(), None), viewed(output)))
    assert [(f.subject, f.detail) for f in findings] == [(name, "it names a file elsewhere")]


def test_a_file_reached_through_a_link_is_not_the_one_that_was_left(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "records" / "a").mkdir(parents=True)
    (output / "records" / "a" / "x").write_text("x")
    append(output, Left(note=""), digests(output, [output / "records"]))
    (output / "records" / "a").rename(tmp_path / "elsewhere")
    (output / "records" / "a").symlink_to(tmp_path / "elsewhere")
    assert ("records/a/x", "run-changed") in found(output)


def test_a_mark_is_of_one_log(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        register(tmp_path / name, 1, name)
    kept = viewed(tmp_path / "one").mark
    register(tmp_path / "one", 2, "one")
    view = viewed(tmp_path / "one")
    assert view.contradicts(kept) is None
    assert view.contradicts(viewed(tmp_path / "two").mark) is None
    longer = viewed(tmp_path / "one").mark
    lines = (tmp_path / "one" / LOG).read_bytes().splitlines(keepends=True)
    (tmp_path / "one" / LOG).write_bytes(lines[0])
    shorter = viewed(tmp_path / "one")
    assert shorter.contradicts(kept) is None
    assert shorter.contradicts(longer) == "it has 1 entries and had 2"
    assert shorter.contradicts(longer.replace(":2:", ":1:")) == "its entry 1 was replaced"
    assert shorter.contradicts(shorter.identity + ":x") == "it is no mark of a log"
    assert len(list(read_lines(tmp_path / "one"))) == 1
