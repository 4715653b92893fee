"""The kept state of a long log: a new process reads what was appended since, and believes no state unchecked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trust.long_logs import aged, read_lines, stage
from xray_runtime.kernel.evidence import kept_state, log
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.kept_state import STATE
from xray_runtime.kernel.evidence.kinds.approval import ApprovalGiven
from xray_runtime.kernel.evidence.kinds.canary import ArmResult, CanaryBegan, CanaryConfig, CanaryEnded
from xray_runtime.kernel.evidence.kinds.cycle import CycleWritten
from xray_runtime.kernel.evidence.kinds.recorded import Recorded
from xray_runtime.kernel.evidence.kinds.signed_files import FilesSigned
from xray_runtime.kernel.evidence.kinds.timestamp import AuthorityChosen, Stamped
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawn
from xray_runtime.kernel.evidence.kinds.witness import WitnessChosen
from xray_runtime.kernel.evidence.layered import Layered, Rows
from xray_runtime.kernel.evidence.lines import LogRecord, entry_kinds, parse_line
from xray_runtime.kernel.evidence.log import LOG, LogTail, view
from xray_runtime.kernel.evidence.view import (
    START,
    Decision,
    Left,
    LogView,
    Published,
    RunBegan,
    RunEnded,
    SignedEntry,
)
from xray_runtime.kernel.history.audit_check import read_log
from xray_runtime.trust import keys
from xray_runtime.trust.keys import keep_log_state, rotate, trusted_keys, trusted_view
from xray_runtime.trust.log import append, sign_line
from xray_runtime.trust.signing import make_key, public_bytes, signing_key

LINES = 40


@pytest.fixture(autouse=True)
def kept_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """States of short logs are kept, and each test begins as a new process."""
    monkeypatch.setattr(keys, "KEEP_EVERY", 1)
    new_process()
    yield
    new_process()


def new_process() -> None:
    log._tail.cache_clear()
    keys._tail.cache_clear()
    kept_state._NEWEST.clear()


def some_entry(rng: random.Random, line: str) -> tuple[SignedEntry, dict[str, str]]:
    """An entry of any kind about few things, so that they meet; and its files."""
    sha, name = f"{rng.randrange(6):064x}", f"s-{rng.randrange(6)}"
    arm = ArmResult(answers=1, judges=1, feedback=None, feedback_low=0, feedback_high=1, users=1, errors=None,
                    errors_low=0, errors_high=1, latency_s=None)  # fmt: skip
    decided = {"name": "m", "alias": "candidate", "version": "1", "checkpoint": sha, "by": "a"}
    began = {"run_directory": "", "facts": {"seed": 1}, "tracking": "", "experiment": "", "name": "", "params": sha}
    entries: list[SignedEntry] = [
        Published(action="publish", directory=name, checkpoint=sha),
        Published(action="bring", directory=name, checkpoint=sha),
        Decision(action="prune", checkpoint=sha, by="a"),
        Decision(action="register", **decided),
        RunBegan(run_id=name, tags={"t": "1"}, **began),
        RunEnded(run_id=name, status="completed"),
        Left(note="n"),
        ApprovalGiven(name="m", checkpoint=sha, key="k", envelope="e"),
        CanaryBegan(name="m", candidate=sha, champion=sha, first=0, rules=CanaryConfig(), by="a"),
        CanaryEnded(canary=line, outcome="passed", reason="", through=1, arms={"candidate": arm}),
        CycleWritten(number=rng.randrange(3), cycle={"a": [1]}),
        Recorded(entries=rng.randrange(9), head=sha),
        FilesSigned(directory=name, changes=rng.randrange(9), statement=sha),
        AuthorityChosen(address="a", certificate=name, by="a"),
        Stamped(token="t"),
        Withdrawn(subject="user x", by="a", holders=[sha], descendants=[], erased=[f"f/{rng.randrange(6)}"]),
        WitnessChosen(address=name, key="k", by="a"),
    ]
    files = {f"f/{rng.randrange(6)}": sha for _ in range(rng.randrange(3))}
    return rng.choice(entries), files


def mixed(output: Path, rng: random.Random, count: int = LINES) -> list[bytes]:
    """The lines of a log with entries of every kind."""
    output.mkdir(parents=True, exist_ok=True)
    private, previous, written = signing_key(output), START, list[bytes]()
    for _ in range(count):
        entry, files = some_entry(rng, previous)
        written.append(sign_line(output, LogRecord, entry, files, private=private, previous=previous))
        previous = parse_line(1, written[-1], LogRecord).sha256
    return written


def folded(output: Path) -> LogView:
    """The state after every line, without any that was kept."""
    read = LogView()
    for line in read_lines(output):
        read.add(line)
    return read


def test_the_mixed_log_has_every_kind_of_entry() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(300):
        seen.add(type(some_entry(rng, START)[0]))
    assert seen == set(entry_kinds().values())
    assert {kind.folds_into for kind in seen} == {"fields", "states"}


@pytest.mark.parametrize("seed", range(8))
def test_lines_after_a_kept_state_lead_to_the_state_after_all_lines(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    written = mixed(tmp_path, rng)
    cuts = [*sorted(rng.sample(range(1, LINES), 3)), LINES]
    for cut in cuts:
        (tmp_path / LOG).write_bytes(b"".join(written[:cut]))
        expected = folded(tmp_path)
        for read in (view, trusted_view):
            assert read(tmp_path) == expected
            assert list(read(tmp_path).runs) == list(expected.runs)
        # The next state is kept by a process that began with this one.
        keep_log_state(tmp_path)
        new_process()
        assert trusted_view(tmp_path) == expected
        assert list(trusted_view(tmp_path).runs) == list(expected.runs)


def test_a_new_process_parses_what_was_appended_however_long_the_log_is(tmp_path: Path, parsed: list[int]) -> None:
    counts = []
    for entries in (10, 300):
        output = tmp_path / str(entries)
        aged(output, entries)
        keep_log_state(output)
        stage(output, 1)
        new_process()
        parsed.clear()
        stage(output, 2)
        counts.append(len(parsed))
    # The three lines of the stage before (its parent, its checkpoint, its result), and its own two, each by both views.
    assert counts == [10, 10]


def test_a_state_is_kept_where_enough_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEEP_EVERY", 5)
    aged(tmp_path, 4)
    keep_log_state(tmp_path)
    assert not (tmp_path / STATE).exists()
    append(tmp_path, Left(note="fifth"))
    keep_log_state(tmp_path)
    kept = (tmp_path / STATE).read_bytes()
    for _ in range(4):
        append(tmp_path, Left(note="more"))
        new_process()
        keep_log_state(tmp_path)
    assert (tmp_path / STATE).read_bytes() == kept
    append(tmp_path, Left(note="tenth"))
    keep_log_state(tmp_path)
    assert (tmp_path / STATE).read_bytes() != kept


def test_a_log_that_is_not_sound_or_has_an_unknown_kind_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = tmp_path / "broken", tmp_path / "other"
    aged(broken, 5)
    lines = (broken / LOG).read_bytes().splitlines(keepends=True)
    (broken / LOG).write_bytes(b"".join([*lines[:3], lines[4]]))
    keep_log_state(broken)
    aged(other, 5)
    monkeypatch.setattr(Left, "folds_into", None)
    keep_log_state(other)
    assert not (broken / STATE).exists()
    assert not (other / STATE).exists()


def flipped(output: Path, other: Path) -> None:
    content = bytearray((output / STATE).read_bytes())
    content[-100] ^= 1
    (output / STATE).write_bytes(content)


def of_another_directory(output: Path, other: Path) -> None:
    (output / STATE).write_bytes((other / STATE).read_bytes())


def transplanted(output: Path, other: Path) -> None:
    """The statement of this directory, and the state of another."""
    statement = (output / STATE).read_bytes().partition(b"\n")[0]
    (output / STATE).write_bytes(statement + b"\n" + (other / STATE).read_bytes().partition(b"\n")[2])


def key_rotated(output: Path, other: Path) -> None:
    rotate(output, by="a", note="n")


def other_key_trusted(output: Path, other: Path) -> None:
    trusted = output / "keys" / "trusted"
    trusted.mkdir()
    (trusted / "other.pub").write_bytes((other / "keys" / "signing.pub").read_bytes())


def linked(output: Path, other: Path) -> None:
    (output / STATE).rename(output / "moved")
    (output / STATE).symlink_to(output / "moved")


def cut(output: Path, other: Path) -> None:
    lines = (output / LOG).read_bytes().splitlines(keepends=True)
    (output / LOG).write_bytes(b"".join(lines[:-1]))


def last_replaced(output: Path, other: Path) -> None:
    lines = (output / LOG).read_bytes().splitlines(keepends=True)
    (output / LOG).write_bytes(b"".join([*lines[:-1], lines[0]]))


@pytest.mark.parametrize(
    "change",
    [flipped, of_another_directory, transplanted, key_rotated, other_key_trusted, linked, cut, last_replaced],
)
def test_a_state_that_cannot_be_checked_is_not_used(
    change: Callable[[Path, Path], None], tmp_path: Path, parsed: list[int]
) -> None:
    output, other = tmp_path / "output", tmp_path / "other"
    for directory, count in ((output, 6), (other, 9)):
        aged(directory, count)
        keep_log_state(directory)
    new_process()
    assert trusted_view(output).head.entries == 6
    change(output, other)
    new_process()
    parsed.clear()
    found = trusted_view(output)
    assert 1 in parsed  # it began with the first line
    (output / STATE).unlink()
    new_process()
    assert found == trusted_view(output)


def test_a_state_that_other_code_folded_is_not_used(
    tmp_path: Path, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    aged(tmp_path, 5)
    keep_log_state(tmp_path)
    monkeypatch.setattr(kept_state, "_code", lambda: "ab" * 32)
    new_process()
    parsed.clear()
    assert trusted_view(tmp_path).head.entries == 5
    assert 1 in parsed


def test_nothing_is_kept_where_sqlite_cannot_serialize(
    tmp_path: Path, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python is where its SQLite was built without it."""
    aged(tmp_path, 5)
    keep_log_state(tmp_path)
    kept = (tmp_path / STATE).read_bytes()
    for name in ("content", "__init__"):
        monkeypatch.delattr(Rows, name)
    monkeypatch.setattr(kept_state, "IS_KEPT", False)
    new_process()
    parsed.clear()
    append(tmp_path, Left(note="sixth"))
    keep_log_state(tmp_path)
    assert trusted_view(tmp_path).head.entries == 6
    assert 1 in parsed
    assert (tmp_path / STATE).read_bytes() == kept


def test_a_key_of_somebody_else_signs_no_state(tmp_path: Path, parsed: list[int]) -> None:
    aged(tmp_path, 5)
    make_key(tmp_path / "thief.pem")
    LogTail(tmp_path / LOG, Verifier(trusted_keys(tmp_path))).keep((tmp_path / "thief.pem").read_bytes(), 1)
    assert (tmp_path / STATE).exists()
    for read in (view, trusted_view):
        parsed.clear()
        assert read(tmp_path).head.entries == 5
        assert 1 in parsed


def test_a_key_of_somebody_who_is_trusted_signs_no_state(tmp_path: Path) -> None:
    """It may sign checkpoints that were brought here, but what the log says is the directory's own to say."""
    aged(tmp_path, 5)
    thief = tmp_path / "thief.pem"
    make_key(thief)
    thief.with_suffix(".pub").write_bytes(public_bytes(thief))
    keys.trust(tmp_path, thief.with_suffix(".pub"))
    forged = LogTail(tmp_path / LOG, Verifier(trusted_keys(tmp_path)))
    forged.view().files.clear()
    forged.keep(thief.read_bytes(), 1)
    new_process()
    assert len(trusted_view(tmp_path).files) == 5
    assert trusted_view(tmp_path) == folded(tmp_path)


def test_an_audit_reads_every_line_whatever_was_kept(tmp_path: Path) -> None:
    aged(tmp_path, 6)
    keep_log_state(tmp_path)
    lines = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    edited = lines[1].replace(lines[1][20:24], bytes(reversed(lines[1][20:24])), 1)
    assert len(edited) == len(lines[1])
    assert edited != lines[1]
    (tmp_path / LOG).write_bytes(b"".join([lines[0], edited, *lines[2:]]))
    new_process()
    # A process knows the lines as they were checked; an audit finds the edit.
    assert trusted_view(tmp_path).head.entries == 6
    _, findings = read_log(tmp_path, Verifier(trusted_keys(tmp_path)))
    assert [finding.code for finding in findings] == ["log-broken"]


@pytest.mark.parametrize("seed", range(20))
def test_a_layered_mapping_is_as_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    plain = {f"{number}": f"{number}" for number in rng.sample(range(9), 5)}
    rows = Rows()
    rows.write("table1", plain)
    layered: Layered[str] = Layered(Rows(rows.content()), "table1", str)
    before = layered.__copy__()
    first = dict(plain)
    changes: list[Callable[[Any, str, str], object]] = [
        lambda one, key, value: one.update({key: value}),
        lambda one, key, value: one.pop(key, None),
        lambda one, key, value: one.setdefault(key, value),
    ]
    for _ in range(30):
        change, key, value = rng.choice(changes), str(rng.randrange(12)), str(rng.random())
        change(layered, key, value)
        change(plain, key, value)
        assert layered == plain
        assert (len(layered), key in layered) == (len(plain), key in plain)
    assert before == first
    with pytest.raises(KeyError):
        del layered["none"]
