"""Timestamps of the log by an authority, which is a real one here."""

from __future__ import annotations

import base64
import hashlib
import logging
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.trust.authority import Authority, authority
from tests.unit.trust.log_attacks import tree_of
from xray.cli.main import app
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.timestamp import LogTimestamps, Stamped
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.trust import log as log_module
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.log import append, choose_authority, choose_witness, decide, origin
from xray_runtime.trust.note import LogCheckpoint
from xray_runtime.trust.timestamp import TimestampProblem, request_stamp, stamped_at
from xray_runtime.trust.witness import read_log_checkpoint


@pytest.fixture(scope="module")
def tsa(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    with authority(tmp_path_factory.mktemp("tsa") / "one") as running:
        yield running


@pytest.fixture
def decided(tmp_path: Path) -> Path:
    """A log of three decisions."""
    output = tmp_path / "run"
    (output / "checkpoints").mkdir(parents=True)
    for version in "123":
        decision(output, version)
    return output


def decision(output: Path, version: str) -> None:
    decide(output, by="Ada", action="promote", name="chat", alias="champion", version=version, checkpoint="a" * 64)


def checkpoint_of(output: Path, size: int) -> LogCheckpoint:
    return LogCheckpoint(origin(view(output).heads), size, tree_of(output).root(size))


@pytest.fixture
def stamped(decided: Path, tsa: Authority) -> Path:
    """A log of three decisions, then the authority, then one that it stamped."""
    choose_authority(decided, tsa.address, tsa.root, by="Ada")
    decision(decided, "4")
    return decided


def findings(output: Path) -> list[str]:
    return [one.code for one in audit(open_lineage_store(output, None)).findings if one.code.startswith("timestamp")]


def test_decisions_are_stamped_and_the_audit_checks_it(stamped: Path, tsa: Authority) -> None:
    state = view(stamped).state(LogTimestamps)
    assert (state.unstamped, [(one.size, one.decisions) for one in state.stamps]) == (3, [(4, 3), (6, 4)])
    assert findings(stamped) == []
    now = stamped_at(state.stamps[1].token, tsa.root, checkpoint_of(stamped, 6))
    assert abs((datetime.now(UTC) - now).total_seconds()) < 60


def test_openssl_verifies_the_token(stamped: Path, tsa: Authority, tmp_path: Path) -> None:
    (tmp_path / "root.pem").write_text(tsa.root)
    (tmp_path / "token.tsr").write_bytes(base64.b64decode(view(stamped).state(LogTimestamps).stamps[1].token))
    (tmp_path / "body").write_bytes(checkpoint_of(stamped, 6).body)
    command = ["openssl", "ts", "-verify", "-in", "token.tsr", "-data", "body", "-CAfile", "root.pem"]
    certificate = ["-untrusted", str(tsa.certificate)]
    assert subprocess.run([*command, *certificate], cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "body").write_bytes(checkpoint_of(stamped, 5).body)
    assert subprocess.run([*command, *certificate], cwd=tmp_path, capture_output=True).returncode != 0


def test_a_stamp_of_another_state_is_found(stamped: Path) -> None:
    older = view(stamped).state(LogTimestamps).stamps[0].token
    append(stamped, Stamped(token=older))
    append(stamped, Stamped(token="bm90aGluZw=="))
    assert findings(stamped) == ["timestamp-invalid"] * 2


@pytest.mark.parametrize("at", ["2020-01-01T00:00:00+00:00", "2026-12-01T00:00:00", "today"])
def test_a_decision_that_was_dated_to_another_time_is_found(
    at: str, stamped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_now", lambda: at)
    decision(stamped, "5")
    assert findings(stamped) == ["timestamp-contradicts"]


def test_a_decision_without_a_stamp_is_found_until_one_comes(
    decided: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with authority(tmp_path / "two") as running:
        choose_authority(decided, running.address, running.root, by="Ada")
    with caplog.at_level(logging.ERROR):
        decision(decided, "4")
    assert "does not answer" in caplog.text
    assert findings(decided) == ["timestamp-missing"]


def test_an_audit_lists_every_authority(stamped: Path, tsa: Authority, tmp_path: Path) -> None:
    def notes() -> list[tuple[str, str]]:
        found = audit(open_lineage_store(stamped, None)).findings
        named = [one for one in found if one.code.startswith("authority")]
        named.sort(key=lambda one: int(one.subject.rpartition(" ")[2]))
        return [(one.code, f"{one.subject}: {one.detail}") for one in named]

    digest = hashlib.sha256(tsa.root.encode()).hexdigest()[:16]
    at = view(stamped).state(LogTimestamps).named[0].entry.at
    first = f"log.jsonl, entry 4: {tsa.address}, by Ada, {at}; sha256 of its root certificate {digest}"
    assert notes() == [("authority-named", first)]
    with authority(tmp_path / "two") as other:
        choose_authority(stamped, other.address, other.root, by="Eve")
        assert [code for code, _ in notes()] == ["authority-named", "authority-replaced"]
        assert f"{other.address}, by Eve, " in notes()[1][1]
        assert notes()[1][1].endswith("; no witness saw it")
        choose_witness(stamped, str(tmp_path / "witness"), None, by="Ada")
        choose_authority(stamped, tsa.address, tsa.root, by="Ada")
    assert [code for code, _ in notes()] == ["authority-named", "authority-replaced", "authority-replaced"]
    assert notes()[2][1].endswith(digest)
    assert findings(stamped) == []


def test_another_authority_does_not_count(decided: Path, tsa: Authority, tmp_path: Path) -> None:
    with authority(tmp_path / "other") as other, pytest.raises(ConfigError, match="does not count"):
        choose_authority(decided, tsa.address, other.root, by="Ada")
    assert view(decided).state(LogTimestamps).chosen is None


@pytest.mark.parametrize("certificate", ["", "no certificate"])
def test_a_certificate_is_read_before_anything_is_sent(certificate: str, decided: Path) -> None:
    with pytest.raises(TimestampProblem, match="no certificate in PEM"):
        request_stamp("http://127.0.0.1:9", certificate, read_log_checkpoint(decided))


def test_the_command_says_what_is_wrong(decided: Path, tsa: Authority, tmp_path: Path) -> None:
    (tmp_path / "root.pem").write_text(tsa.root)
    common = ["witness", "authority", "--output", str(decided), "--certificate"]
    done = CliRunner().invoke(app, [*common, str(tmp_path / "none.pem"), tsa.address])
    assert (done.exit_code, "cannot be read" in done.output) == (2, True)
    done = CliRunner().invoke(app, [*common, str(tmp_path / "root.pem"), "http://127.0.0.1:9"])
    assert (done.exit_code, "does not answer" in done.output) == (2, True)
    done = CliRunner().invoke(app, [*common, str(tmp_path / "root.pem"), tsa.address])
    assert (done.exit_code, "after each decision" in done.output) == (0, True)
    assert findings(decided) == []
