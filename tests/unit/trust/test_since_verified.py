"""An audit since the last: it reads what changed, says what it left out, and trusts no record but its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trust.commands import xray
from tests.unit.trust.synthetic import Lifecycle
from tests.unit.trust.tampering import FAULTS, IN_MLFLOW, payload_of, rotated, signed, with_payload
from xray_runtime.kernel.evidence.envelope import Verifier, new_private_key
from xray_runtime.kernel.evidence.kept_state import FoldedLines, write_state
from xray_runtime.kernel.evidence.log import LOG
from xray_runtime.kernel.history import audit_check
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.kernel.store import digest_memory
from xray_runtime.kernel.store.manifest import ATTESTATION, MANIFEST
from xray_runtime.trust.audit import verified
from xray_runtime.trust.audit.checkpoints import Audit, audit
from xray_runtime.trust.audit.checks import checkpoints
from xray_runtime.trust.audit.verified import RECORD, STATE
from xray_runtime.trust.keys import rotate, trust, trusted_keys
from xray_runtime.trust.log import decide
from xray_runtime.trust.retention import plan_prune, prune
from xray_runtime.trust.signing import make_key, public_bytes

SEEN = {"file-changed", "signature-foreign", "key-exposed", "checkpoint-missing", "file-unsigned"}
"""Codes of the faults that are put in after an audit."""


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test has just made count as settled."""
    monkeypatch.setattr(digest_memory, "SETTLED_S", 0.0)
    monkeypatch.setattr(digest_memory, "CANNOT_TELL", frozenset())


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checkpoints inspected, and envelopes checked that have no time: the record."""
    done: list[str] = []
    inspect, check = checkpoints.inspect, Verifier.check

    def inspected(directory: Path, *arguments: Any, **options: Any) -> Any:
        done.append(directory.name)
        return inspect(directory, *arguments, **options)

    def checked(self: Verifier, envelope: Any, made: str | None = None) -> str:
        if made is None:
            done.append(json.loads(envelope.payload)["predicateType"])
        return check(self, envelope, made)

    monkeypatch.setattr(checkpoints, "inspect", inspected)
    monkeypatch.setattr(Verifier, "check", checked)
    return done


def since(output: Path, public: Path | None = None) -> Audit:
    return audit(open_lineage_store(output, None), public=public, since_verified=True)


def codes(result: Audit) -> set[str]:
    return {finding.code for finding in result.findings if finding.is_broken}


def flip_unseen(path: Path) -> None:
    """Change a file's bytes, and set its time back."""
    found = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)


def test_unchanged_checkpoints_are_not_read_again(fresh: Callable[[], Path], work: list[str]) -> None:
    output = fresh()
    first = since(output)
    assert first.is_sound
    assert first.notes == ["everything was read: nothing was verified before"]
    work.clear()
    second = since(output)
    assert second.is_sound
    assert (second.unchanged, second.checkpoints) == (8, 8)
    # The state of the log, by the directory's key and by one that is trusted.
    assert work == ["urn:xray:verified:v1", *["urn:xray:log-state:v1"] * 2]
    (note,) = second.notes
    assert note.startswith("8 of 8 checkpoints are unchanged in size, inode and times")

    lifecycle = Lifecycle(output).whole()
    new = lifecycle.add("ppo-3", "ppo", {"model.safetensors": b"3"}, {"policy": "ppo-2", "prompts": "prepare"})
    decide(output, action="decline", checkpoint=new.sha256)
    work.clear()
    third = since(output)
    assert third.is_sound
    assert (third.unchanged, third.checkpoints) == (7, 9)
    # The model card of the policy was written again.
    assert {name.partition("-0")[0].rpartition("-")[0] or name for name in work} >= {"ppo-3", "ppo-2"}
    assert sum("urn:" not in name for name in work) == 2
    work.clear()
    assert since(output).unchanged == 9
    assert audit(open_lineage_store(output, None)).unchanged == 0


@pytest.mark.parametrize("name", [name for name, (_, code) in FAULTS.items() if code in SEEN and name not in IN_MLFLOW])
def test_tampering_since_the_last_audit_is_found(name: str, bare: Path) -> None:
    output = bare
    assert since(output).is_sound
    before = (output / RECORD).read_bytes()
    FAULTS[name][0](output)
    result = since(output)
    assert codes(result)
    assert codes(result) == codes(audit(open_lineage_store(output, None)))
    # What is not sound is not recorded.
    assert (output / RECORD).read_bytes() == before
    assert any("nothing is recorded" in note for note in result.notes)


@pytest.mark.parametrize(
    "pattern",
    [LOG, *(f"checkpoints/sft-*/{n}" for n in ("model.safetensors", MANIFEST, f"{ATTESTATION}/*.json", "README.md"))],
)
def test_a_file_with_its_time_set_back_is_read(pattern: str, bare: Path) -> None:
    assert since(bare).is_sound
    flip_unseen(next(bare.glob(pattern)))
    result = since(bare)
    assert codes(result) == codes(audit(open_lineage_store(bare, None))) != set()


def test_lines_of_the_log_that_the_last_audit_read_are_not_read_again(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    fold = audit_check.fold

    def counted(begin: FoldedLines, content: bytes, verifier: Verifier | None) -> Any:
        first = begin.view.head.entries + 1
        read.extend(range(first, first + content.count(b"\n")))
        return fold(begin, content, verifier)

    monkeypatch.setattr(audit_check, "fold", counted)
    first = since(bare)
    assert read == list(range(1, first.log.entries + 1))
    read.clear()
    assert since(bare).is_sound
    assert read == []
    decide(bare, action="decline", checkpoint=_sha(bare, "sft"))
    second = since(bare)
    assert (second.is_sound, read) == (True, [first.log.entries + 1])
    assert second.log == audit(open_lineage_store(bare, None)).log


def _without_records(output: Path, key: bytes) -> None:
    """A state of the log that no longer names records, signed with `key`."""
    trusted = trusted_keys(output)
    lines, _ = audit_check.read_log(output, Verifier(trusted))
    for name in [name for name in lines.folded.view.files if name.startswith("records/")]:
        del lines.folded.view.files[name]
    write_state(output / STATE, lines.folded, Verifier(trusted), key)


def _of_a_trusted_key(output: Path) -> None:
    private = output.parent / "friend.pem"
    make_key(private)
    private.with_suffix(".pub").write_bytes(public_bytes(private))
    trust(output, private.with_suffix(".pub"))
    # The keys that are trusted are those of the audit.
    assert since(output).is_sound
    _without_records(output, private.read_bytes())


def _of_an_older_log(output: Path) -> None:
    older = (output / STATE).read_bytes()
    decide(output, action="decline", checkpoint=_sha(output, "sft"))
    assert since(output).is_sound
    (output / STATE).write_bytes(older)


STATES: dict[str, Callable[[Path], object]] = {
    "gone": lambda output: (output / STATE).unlink(),
    "empty": lambda output: (output / STATE).write_bytes(b""),
    "another byte": lambda output: (output / STATE).write_bytes((output / STATE).read_bytes()[:-1] + b"!"),
    "signed by a stranger": lambda output: _without_records(output, new_private_key()),
    "signed by a trusted key": _of_a_trusted_key,
    "of an older log": _of_an_older_log,
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_the_log_that_does_not_count_is_not_believed(name: str, bare: Path) -> None:
    """A record that is missing is a finding whatever stands in the audit's own file."""
    assert since(bare).is_sound
    STATES[name](bare)
    assert since(bare).is_sound
    STATES[name](bare)
    next(bare.glob("records/sft-*/metrics.jsonl")).unlink()
    assert codes(since(bare)) == {"run-changed"}


def test_recently_changed_files_are_read_again(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_memory, "SETTLED_S", 1000.0)
    since(bare)
    result = since(bare)
    assert result.unchanged == 0
    assert result.is_sound


def _rewritten(output: Path, key: bytes | None = None) -> None:
    """Other states in the record; signed with `key`, else under the signature it had."""
    line = (output / RECORD).read_bytes()
    content = payload_of(line)
    for entry in content["predicate"]["checkpoints"].values():
        entry[1] = "0" * 64
    (output / RECORD).write_bytes(with_payload(line, content) if key is None else signed(content, key))


def _a_pipe(output: Path) -> None:
    (output / RECORD).unlink()
    os.mkfifo(output / RECORD)


def _a_link(output: Path) -> None:
    shutil.move(output / RECORD, output / "elsewhere")
    (output / RECORD).symlink_to(output / "elsewhere")


RECORDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda output: (output / RECORD).unlink(), "nothing was verified before"),
    "not signed": (lambda output: (output / RECORD).write_text(json.dumps({"payload": ""})), "cannot be read"),
    "rewritten": (_rewritten, ""),
    "empty": (lambda output: (output / RECORD).write_bytes(b""), ""),
    "a pipe": (_a_pipe, "not a file"),
    "a link": (_a_link, "a link"),
    "nonsense": (lambda output: (output / RECORD).write_text("[]"), "the signature cannot be read"),
    "signed by a stranger": (lambda output: _rewritten(output, new_private_key()), "another key"),
    "signed with a retired key": (lambda output: _rewritten(output, rotated(output)), "retired"),
    "a signed entry of the log": (
        lambda output: (output / RECORD).write_bytes((output / LOG).read_bytes().splitlines()[0]),
        "not written by an audit",
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_does_not_count_leaves_nothing_out(name: str, bare: Path) -> None:
    output = bare
    assert since(output).is_sound
    change, reason = RECORDS[name]
    change(output)
    # Of the same size, and its time set back: were the record believed, it could be missed.
    flip_unseen(next(output.glob("checkpoints/sft-*/model.safetensors")))
    result = since(output)
    assert result.unchanged == 0
    assert result.notes[0].startswith("everything was read: ")
    assert reason in result.notes[0]
    assert "file-changed" in codes(result)


def test_a_record_of_another_directory_version_or_key_does_not_count(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = bare
    assert since(output).is_sound
    other = Path(shutil.copytree(output, output.parent / "other"))
    assert f"{RECORD} is of {output}" in since(other).notes[0]
    with monkeypatch.context() as patch:
        patch.setattr(verified, "package_digest", lambda: "1" * 64)
        assert "another version" in since(output).notes[0]
    since(output)
    rotate(output, by="a person", note="")
    result = since(output)
    assert (result.is_sound, result.unchanged) == (True, 0)
    assert since(output).unchanged == 8


def test_an_older_record_makes_it_read_more(bare: Path) -> None:
    output = bare
    since(output)
    kept = (output / RECORD).read_bytes()
    Lifecycle(output, tracking=False).add("late", "ppo", {"x": b"late"}, {})
    since(output)
    assert since(output).unchanged == 9
    (output / RECORD).write_bytes(kept)
    result = since(output)
    assert (result.is_sound, result.unchanged) == (True, 8)


def test_pruned_checkpoints_are_no_finding_and_removed_ones_are(fresh: Callable[[], Path]) -> None:
    output = fresh()
    lifecycle = Lifecycle(output, tracking=False)
    lifecycle.done["sft"] = open_lineage_store(output, None).graph.nodes[_sha(output, "sft")].reference(None)
    for name in ("trial", "other"):
        lifecycle.add(name, "ppo", {"x": name.encode()}, {"policy": "sft"})
    place = open_lineage_store(output, None)
    alone = type(place)(output, place.graph, None)
    assert audit(alone, since_verified=True).is_sound

    def again() -> Audit:
        return audit(type(place)(output, open_lineage_store(output, None).graph, None), since_verified=True)

    prune(alone, plan_prune(alone, [place.graph.nodes[lifecycle.done["other"].sha256]]))
    result = again()
    assert result.is_sound
    # What the pruned one was made from is looked at again.
    assert (result.unchanged, result.checkpoints) == (8, 9)
    shutil.rmtree(lifecycle.done["other"].path)
    assert codes(again()) == {"checkpoint-missing"}


def _sha(output: Path, stage: str) -> str:
    return next(n.sha256 for n in open_lineage_store(output, None).graph.nodes.values() if n.manifest.stage == stage)


def test_without_the_private_key_nothing_is_recorded(bare: Path) -> None:
    output = bare
    (output / "keys" / "signing.pem").unlink()
    result = since(output)
    assert result.is_sound
    assert "private key" in result.notes[-1]
    assert not (output / RECORD).exists()
    assert not (output / "keys" / "signing.pem").exists()


def test_the_command(bare: Path) -> None:
    output = bare
    assert xray("audit", "ppo-2", "--output", output, "--since-verified").exit_code == 2
    assert xray("audit", "--all", "--output", output, "--since-verified", "--no-hash").exit_code == 2
    assert xray("audit", "--all", "--output", output, "--since-verified").exit_code == 0
    shown = xray("audit", "--all", "--output", output, "--since-verified")
    assert shown.exit_code == 0
    assert "were read again" in shown.output
    assert "0 checkpoints read" in shown.output
    flip_unseen(next(output.glob("checkpoints/sft-*/model.safetensors")))
    assert xray("audit", "--all", "--output", output, "--since-verified").exit_code == 1
