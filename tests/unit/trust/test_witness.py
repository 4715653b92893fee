"""Witnesses: what they cosign, how they are asked, and the attacks that an audit finds with one alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from tests.unit.trust.commands import xray
from tests.unit.trust.log_attacks import ATTACKS, Attack, found, found_of, keys_of, register, tree_of, view_key
from tests.unit.trust.tampering import lines, rotated, write_lines
from xray.deployments.service import free_port
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import load_signer, new_private_key
from xray_runtime.kernel.evidence.kinds.witness import LogWitness
from xray_runtime.kernel.evidence.log import COSIGNED, END, view
from xray_runtime.kernel.files import write_atomic
from xray_runtime.trust.log import choose_witness, origin
from xray_runtime.trust.note import LogCheckpoint, WitnessKey
from xray_runtime.trust.witness import (
    DirectoryWitness,
    LogContradicted,
    ServerWitness,
    WitnessAhead,
    WitnessProblem,
    read_log_checkpoint,
    read_request,
    request_text,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attacks_on_the_whole_of_a_directory(attack: Attack, untracked: Path, untouched: Path, tmp_path: Path) -> None:
    results = found_of(attack, untouched if attack.tracked else untracked, tmp_path)
    for codes, expected in zip(results, (attack.alone, attack.witnessed), strict=True):
        assert expected in codes or (expected, codes) == ("", set())


def test_the_table_in_the_docs_has_the_attacks() -> None:
    text = (Path(__file__).parents[3] / "docs" / "witness.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(tuple(f"| {a.name} |" for a in ATTACKS))]
    assert [row[0].removeprefix("| ") for row in rows] == [attack.name for attack in ATTACKS]
    for row, attack in zip(rows, ATTACKS, strict=True):
        for cell, expected in zip(row[1:], (attack.alone, attack.witnessed), strict=True):
            assert f"`{expected}`" in cell if expected else cell.startswith("sound")


@pytest.fixture
def server(logged: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """(address, public key) of the command `xray witness serve`, which trusts the log."""
    port = free_port()
    command = [sys.executable, "-m", "xray.cli.main", "witness", "serve", str(tmp_path / "served"), "--port", str(port)]
    command += ["--trust", str(keys_of(logged)[0])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        [line] = [line for line in [process.stdout.readline()] if "listens" in line]
        yield f"http://127.0.0.1:{port}", line.split()[2]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_witness_cosigns_what_continues_and_nothing_else(logged: Path, tmp_path: Path) -> None:
    keys = [view_key(logged)]
    witness, first = DirectoryWitness(tmp_path / "w", keys), read_log_checkpoint(logged)
    (tmp_path / "w").mkdir()
    witness.key().require(first, witness.cosign(0, [], first))
    second = register(logged, "four", "five")
    tree = tree_of(logged)
    with pytest.raises(WitnessAhead) as ahead:
        witness.cosign(0, [], second)
    assert ahead.value.size == 3
    with pytest.raises(LogContradicted):
        witness.cosign(3, [], second)
    witness.key().require(second, witness.cosign(3, tree.consistency(3, 5), second))
    with pytest.raises(WitnessAhead):
        witness.cosign(3, [], first)
    # A fork: another fifth entry, signed with the same key.
    write_lines(logged, lines(logged)[:-1])
    fork = register(logged, "another five")
    assert (fork.size, fork.origin) == (5, second.origin)
    with pytest.raises(LogContradicted):
        witness.cosign(5, [], fork)
    # A log of another key.
    register(tmp_path / "other", "one")
    with pytest.raises(WitnessProblem, match="no trusted key"):
        witness.cosign(0, [], read_log_checkpoint(tmp_path / "other"))


def test_each_entry_is_shown_to_the_witness(logged: Path, tmp_path: Path) -> None:
    key = choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    for number in range(3):
        checkpoint = register(logged, str(number))
        cosigned = LogCheckpoint.parse((logged / COSIGNED).read_text())
        assert cosigned.body == checkpoint.body
        key.require(cosigned, cosigned.signatures[-1])
    kept = tmp_path / "w" / f"{origin(view(logged).heads).partition('/')[2]}.checkpoint"
    assert kept.read_text() == (logged / COSIGNED).read_text()
    rotated(logged)
    assert LogCheckpoint.parse((logged / COSIGNED).read_text()).size == len(view(logged).heads)
    assert found(logged) == set()


def test_a_witness_that_is_gone_stops_no_run_and_is_named(
    logged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    shutil.rmtree(tmp_path / "w")
    for number in range(2):
        register(logged, str(number))
    # Asked once a minute.
    assert len([record for record in caplog.records if "the log's witness" in record.message]) == 1
    assert found(logged) == {"witness-silent"}


def test_a_server_is_a_witness(logged: Path, server: tuple[str, str], tmp_path: Path) -> None:
    address, key = server
    choose_witness(logged, address, WitnessKey.parse(key), by="Ada")
    yesterday = Path(shutil.copytree(logged, tmp_path / "yesterday"))
    register(logged, "four")
    assert found(logged) == set()
    chosen = view(logged).state(LogWitness).chosen
    assert chosen is not None
    assert (chosen.address, chosen.key) == (address, key)
    shutil.rmtree(logged)
    yesterday.rename(logged)
    assert found(logged) == {"log-shorter"}
    # A fork of the same length, signed with the key.
    register(logged, "another four")
    assert found(logged) == {"log-shorter"}


def test_a_server_answers_what_is_no_request(server: tuple[str, str], logged: Path) -> None:
    address, _ = server
    checkpoint = read_log_checkpoint(logged)
    for path, body, status in (
        ("/", "", 400),
        ("/add-checkpoint", "", 400),
        ("/add-checkpoint", "x" * 70_000, 400),
        ("/add-checkpoint", request_text(0, [], checkpoint).replace("old 0", "old -1"), 400),
        ("/add-checkpoint", request_text(7, [], checkpoint), 409),
        ("/add-checkpoint", request_text(0, [], LogCheckpoint("x/..", 1, checkpoint.root, checkpoint.signatures)), 403),
        ("/add-checkpoint", request_text(0, [], checkpoint), 200),
        ("/add-checkpoint", request_text(0, [], checkpoint), 409),
        ("/add-checkpoint", request_text(3, [checkpoint.root], checkpoint), 422),
        ("/add-checkpoint", request_text(3, [], checkpoint), 200),
    ):
        answer = httpx.post(address + path, content=body)
        assert (path, body[:20], answer.status_code) == (path, body[:20], status)
    assert httpx.get(address).status_code == 501
    connection = HTTPConnection(address.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/add-checkpoint")
    connection.putheader("Content-Length", "9" * 5000)
    connection.endheaders()
    assert connection.getresponse().status == 400


def test_a_server_that_lies_is_named(logged: Path, tmp_path: Path) -> None:
    """Another witness's key, and no witness at all."""
    other = DirectoryWitness(tmp_path / "other", [])
    (tmp_path / "other").mkdir()
    choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    assert found(logged, witness_key=str(other.key())) == {"witness-silent"}
    assert found(logged, witness=f"http://127.0.0.1:{free_port()}") == {"witness-silent"}
    with pytest.raises(WitnessProblem, match="does not answer"):
        ServerWitness(f"http://127.0.0.1:{free_port()}").cosign(0, [], read_log_checkpoint(logged))
    with pytest.raises(ConfigError, match="--key"):
        choose_witness(logged, "http://127.0.0.1:1", None, by="Ada")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="ADDRESS: "):
        choose_witness(logged, str(tmp_path / "file"), None, by="Ada")


def test_requests_are_read_as_they_are_written(logged: Path) -> None:
    checkpoint = register(logged, "four", "five")
    proof = tree_of(logged).consistency(3, 5)
    assert read_request(request_text(3, proof, checkpoint)) == (3, proof, checkpoint)


def test_the_commands(bare: Path, tmp_path: Path) -> None:
    alone = xray("audit", "--all", "--output", bare)
    assert alone.exit_code == 0
    assert "no witness: " in alone.output
    kept = Path(shutil.copy(bare / END, tmp_path / "kept"))
    chosen = xray("witness", "use", tmp_path / "w", "--output", bare, "--by", "Ada")
    assert chosen.exit_code == 0, chosen.output
    key = chosen.output.split()[-1]
    assert str(WitnessKey.parse(key)) == key
    for options in ((), ("--witness", tmp_path / "w", "--witness-key", key), ("--witness", kept)):
        sound = xray("audit", "--all", "--output", bare, *options)
        assert (sound.exit_code, "no witness" in sound.output) == (0, False), sound.output
    write_lines(bare, lines(bare)[:-3])
    shutil.copy(kept, bare / END)
    assert xray("audit", "--all", "--output", bare, "--witness", kept).exit_code == 1
    for options, field in (
        (("--witness", tmp_path / "nowhere"), "--witness: "),
        (("--witness-key", "x"), "--witness-key: "),
    ):
        bad = xray("audit", "--all", "--output", bare, *options)
        assert (bad.exit_code, field in bad.output) == (2, True), bad.output
    bad = xray("witness", "use", tmp_path / "w", "--output", bare, "--key", "x")
    assert (bad.exit_code, "--key: " in bad.output) == (2, True)


def test_signatures_that_the_last_audit_checked_are_not_checked_again(
    logged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xray_runtime.kernel.evidence.envelope import Verifier
    from xray_runtime.kernel.history.audit_check import read_log
    from xray_runtime.trust.keys import trusted_keys

    verifier = Verifier(trusted_keys(logged))
    before, _ = read_log(logged, verifier)
    register(logged, "four")
    checked: list[str | None] = []
    real = Verifier.check
    monkeypatch.setattr(Verifier, "check", lambda *arguments: (checked.append(arguments[2]), real(*arguments))[1])
    after, broken = read_log(logged, verifier, before)
    assert (broken, len(after.folded.view.heads), len(checked)) == ([], 4, 1)
    assert after == read_log(logged, verifier)[0]
    edited = [lines(logged)[0].replace(b"a", b"b", 1), *lines(logged)[1:]]
    write_lines(logged, edited)
    assert read_log(logged, verifier, before)[1] != []


def least_seconds(work: Callable[[str], object]) -> float:
    """Processor time of one of twenty calls: the least of five times."""
    found = []
    for _ in range(5):
        start = time.process_time()
        for number in range(20):
            work(str(number))
        found.append((time.process_time() - start) / 20)
    return min(found)


def test_an_entry_costs_a_few_times_its_signatures_and_files(tmp_path: Path) -> None:
    """It is signed twice and hashed, and two files are written: less than 2 ms where these take half of one."""
    register(tmp_path, *map(str, range(300)))
    signer = load_signer(new_private_key())

    def plain(_: str) -> None:
        for name in ("a", "b"):
            signer.sign(bytes(1000))
            write_atomic(tmp_path / name, bytes(400))

    assert least_seconds(lambda name: register(tmp_path, name)) < 8 * least_seconds(plain)
    assert os.path.getsize(tmp_path / END) < 400
