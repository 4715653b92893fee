"""What somebody who can write an output directory, or answers in a witness's place, does to the guards of the log."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.unit.trust.commands import bundled, xray
from tests.unit.trust.log_attacks import found, register, tree_of, view_key
from tests.unit.trust.tampering import lines, write_lines
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import SignatureProblem, Verifier
from xray_runtime.kernel.evidence.log import COSIGNED, END, LOG, view
from xray_runtime.kernel.history.audit_check import read_log
from xray_runtime.trust.audit.checks import log as check
from xray_runtime.trust.keys import trusted_keys
from xray_runtime.trust.log import _RETRY_AT, choose_witness, origin
from xray_runtime.trust.merkle import is_consistent
from xray_runtime.trust.note import LogCheckpoint
from xray_runtime.trust.witness import DirectoryWitness, ServerWitness, WitnessProblem, read_log_checkpoint


@pytest.fixture
def answering() -> Iterator[Callable[[int, bytes], str]]:
    """Starts a server that answers everything so; returns its address."""
    servers = list[ThreadingHTTPServer]()

    def start(status: int, content: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing is logged."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def rolled_back(output: Path, tmp_path: Path) -> str:
    """A log set back to where its witness knew less; returns the witness's key."""
    key = choose_witness(output, str(tmp_path / "w"), None, by="Ada")
    register(output, "yesterday")
    yesterday = Path(shutil.copytree(output, tmp_path / "yesterday"))
    register(output, "newest")
    for name in (LOG, END, COSIGNED):
        shutil.copy(yesterday / name, output / name)
    assert found(output) == {"log-shorter"}
    return str(key)


def test_a_file_in_place_of_the_witness_does_not_count(logged: Path, tmp_path: Path) -> None:
    key = rolled_back(logged, tmp_path)
    shutil.rmtree(tmp_path / "w")
    shutil.copy(logged / END, tmp_path / "w")
    assert found(logged) == {"witness-silent"}
    assert found(logged, witness=str(tmp_path / "w"), witness_key=key) == {"witness-silent"}


def test_a_key_without_a_witness_is_not_ignored(logged: Path, tmp_path: Path) -> None:
    """The log is set back to before it named one."""
    before = Path(shutil.copytree(logged, tmp_path / "before"))
    key = choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    for name in (LOG, END):
        shutil.copy(before / name, logged / name)
    assert found(logged, witness_key=str(key)) == {"witness-silent"}


def test_what_a_server_says_counts_only_with_its_key(logged: Path, answering: Callable[[int, bytes], str]) -> None:
    address = answering(200, "— anybody AAAAAAA=\n".encode())
    assert found(logged, witness=address) == {"witness-silent"}


def test_a_cosignature_from_before_is_not_an_answer(
    logged: Path, tmp_path: Path, answering: Callable[[int, bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody between the auditor and the witness has the log set back, and repeats what the witness said then."""
    monkeypatch.setattr("xray_runtime.trust.note.time.time", lambda: 1e9)
    key = rolled_back(logged, tmp_path)
    monkeypatch.undo()
    cosigned = LogCheckpoint.parse((logged / COSIGNED).read_text())
    address = answering(200, str(cosigned.signatures[-1]).encode())
    assert found(logged, witness=address, witness_key=key) == {"witness-silent"}


@pytest.mark.parametrize("content", [b"\xff", b"x" * 2_000_000, "link", "directory"], ids=lambda one: str(one)[:10])
def test_a_witness_whose_files_are_damaged_stops_no_run(content: bytes | str, logged: Path, tmp_path: Path) -> None:
    choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    for name in (f"{origin(view(logged).heads).partition('/')[2]}.checkpoint", "witness.pem"):
        path = tmp_path / "w" / name
        kept = path.read_bytes()
        path.unlink()
        if content == "link":
            path.symlink_to(tmp_path / "nowhere")
        elif content == "directory":
            path.mkdir()
        else:
            path.write_bytes(content)
        _RETRY_AT.clear()
        register(logged, "goes on")
        assert found(logged) == {"witness-silent"}
        shutil.rmtree(path) if content == "directory" else path.unlink()
        path.write_bytes(kept)
    assert found(logged) == set()


def test_a_key_with_a_password_is_a_problem_of_the_witness(logged: Path, tmp_path: Path) -> None:
    choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    secret = serialization.BestAvailableEncryption(b"password")
    (tmp_path / "w" / "witness.pem").write_bytes(Ed25519PrivateKey.generate().private_bytes(encoding, form, secret))
    register(logged, "goes on")
    assert found(logged) == {"witness-silent"}


@pytest.mark.parametrize(
    "answer", [(409, b"9" * 5000), (409, b"9" * 4000), (409, b"0"), (409, b""), (200, b"\xff"), (422, b"x")]
)
def test_a_witness_that_answers_nonsense_stops_no_run(
    answer: tuple[int, bytes], logged: Path, tmp_path: Path, answering: Callable[[int, bytes], str]
) -> None:
    key = choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    address = answering(*answer)
    with pytest.raises(ConfigError, match="ADDRESS"):
        choose_witness(logged, address, key, by="Ada")
    with pytest.raises(WitnessProblem):
        ServerWitness(address).cosign(1, [], read_log_checkpoint(logged))
    assert len(found(logged, witness=address)) == 1


def test_an_unreadable_line_stops_no_run_that_has_a_witness(logged: Path, tmp_path: Path) -> None:
    choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    with (logged / LOG).open("ab") as file:
        file.write(b"junk\n")
    register(logged, "goes on")
    assert found(logged) == {"log-broken"}


def test_a_directory_in_place_of_the_cosignature_stops_no_run(logged: Path, tmp_path: Path) -> None:
    choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    (logged / COSIGNED).unlink()
    (logged / COSIGNED / "x").mkdir(parents=True)
    register(logged, "goes on")
    assert found(logged) == set()


@pytest.mark.parametrize("size", [-3, -1, 0, 10**4000])
def test_a_checkpoint_of_an_odd_size_is_a_finding(size: int, logged: Path) -> None:
    """Even if the key's owner signed it."""
    whole = read_log_checkpoint(logged)
    odd = LogCheckpoint(whole.origin, size, whole.root).signed((logged / "keys" / "signing.pem").read_bytes())
    for kept in (lines(logged), lines(logged)[:1], []):
        write_lines(logged, kept)
        (logged / END).write_text(str(odd))
        assert found(logged) == {"log-shorter"}


@pytest.mark.parametrize("size", ["9" * 5000, " 3", "3.0", "٣", "-3"])
def test_a_size_that_is_no_number_is_malformed(size: str, logged: Path) -> None:
    with pytest.raises(SignatureProblem):
        LogCheckpoint.parse(str(read_log_checkpoint(logged)).replace("\n3\n", f"\n{size}\n"))


def test_an_audit_makes_no_witness(logged: Path, tmp_path: Path) -> None:
    choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    shutil.rmtree(tmp_path / "w")
    assert found(logged) == {"witness-silent"}
    register(logged, "later")
    assert not (tmp_path / "w").exists()


def test_the_log_is_exchanged_between_its_two_reads(
    logged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set back while it is audited, whole while the witness is asked."""
    choose_witness(logged, str(tmp_path / "w"), None, by="Ada")
    yesterday = Path(shutil.copytree(logged, tmp_path / "yesterday"))
    register(logged, "newest")
    whole = Path(shutil.copytree(logged, tmp_path / "whole"))
    for name in (LOG, END):
        shutil.copy(yesterday / name, logged / name)
    reads = check.read_log_checkpoint

    def reading(output: Path) -> LogCheckpoint:
        checkpoint = reads(output)
        shutil.copy(whole / END, output / END)
        return checkpoint

    monkeypatch.setattr(check, "read_log_checkpoint", reading)
    assert found(logged) == {"log-shorter"}


def test_a_log_that_replaced_the_verified_one_is_checked(logged: Path) -> None:
    """For `--since-verified`, though it is no longer than the log was then."""
    verifier = Verifier(trusted_keys(logged))
    before, _ = read_log(logged, verifier)
    forged = json.loads(lines(logged)[0])
    forged["signatures"][0]["sig"] = "AAAA"
    write_lines(logged, [json.dumps(forged).encode() + b"\n"])
    assert read_log(logged, verifier, before)[1] != []


def test_a_proof_of_hashes_of_another_length_is_none(logged: Path) -> None:
    def node(content: bytes) -> bytes:
        return hashlib.sha256(b"\1" + content).digest()

    a, b = b"a" * 32, b"b" * 32
    # Bytes moved from one side of a node to the other give the same hash.
    assert not is_consistent(3, node(a + b), 4, node(a + b[:16] + node(b[16:] + b"c")), [b[16:], b"c", a + b[:16]])


def test_an_empty_name_is_no_witness(logged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for address in ("", "ftp://there", str(logged / "witness")):
        with pytest.raises(ConfigError, match="ADDRESS"):
            choose_witness(logged, address, None, by="Ada")
    assert not (tmp_path / "witness.pem").exists()


def test_the_audits_that_ask_no_witness_refuse_one(bare: Path, tmp_path: Path) -> None:
    bundle = bundled(bare, tmp_path / "bundle.tar")
    for arguments, field in (
        ((bundle, "--witness", tmp_path), "--witness"),
        ((bundle, "--witness-key", DirectoryWitness(tmp_path, []).key()), "--witness"),
        (("--all", "--output", bare, "--witness", ""), "--witness"),
    ):
        done = xray("audit", *arguments)
        assert (done.exit_code, field in done.output) == (2, True), (arguments, done.output)


def test_the_key_of_one_log_does_not_continue_another(logged: Path, tmp_path: Path) -> None:
    """A server trusts both keys, and the other log's owner has read the hashes of this one."""
    register(tmp_path / "other", "one")
    own, other = view_key(logged), view_key(tmp_path / "other")
    (tmp_path / "w").mkdir()
    witness, known, tree = DirectoryWitness(tmp_path / "w", [own, other]), read_log_checkpoint(logged), tree_of(logged)
    witness.key().require(known, witness.cosign(0, [], known))
    tree.add(b"x" * 32)
    private = (tmp_path / "other" / "keys" / "signing.pem").read_bytes()
    forged, proof = LogCheckpoint(known.origin, 4, tree.root(4)).signed(private), tree.consistency(3, 4)
    with pytest.raises(WitnessProblem, match="no trusted key"):
        witness.cosign(3, proof, forged)
    # As after a rotation, when the old key is no longer trusted.
    DirectoryWitness(tmp_path / "w", [other]).cosign(3, proof, forged)
