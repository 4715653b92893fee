"""Keys that only an SSH agent holds: a real ssh-agent signs, dies and refuses."""

from __future__ import annotations

import logging
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.trust.agents import Agent, needs_agent, ssh_agent
from xray.cli.main import app
from xray.tasks.lost_runs import close_lost_runs
from xray.tasks.run_summary import RunSummary
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import may_retry
from xray_runtime.kernel.evidence import agent as module
from xray_runtime.kernel.evidence.agent import AgentError
from xray_runtime.kernel.evidence.envelope import load_signer
from xray_runtime.kernel.evidence.log import LIFECYCLE, view
from xray_runtime.kernel.evidence.view import Left, RunBegan
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.kernel.store.snapshots import Snapshots
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.keys import trusted_keys
from xray_runtime.trust.log import append
from xray_runtime.trust.note import LogCheckpoint
from xray_runtime.trust.signing import KEY_VARIABLE, public_key, signing_key

pytestmark = needs_agent
TOKENS = Path("/usr/lib/softhsm/libsofthsm2.so")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    with ssh_agent() as running:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(running.socket))
        yield running


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.0)


@pytest.fixture
def output(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output directory that an agent's key signs."""
    monkeypatch.setenv(KEY_VARIABLE, str(agent.key("run")))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    append(tmp_path / "run", Left(note="first"))
    return tmp_path / "run"


def problems(output: Path) -> list[str]:
    return [str(one) for one in audit(open_lineage_store(output, None)).broken]


@pytest.mark.parametrize("bits", [256, 384, 521])
def test_an_agent_signs_with_every_curve(bits: int, agent: Agent) -> None:
    public = agent.key(f"p{bits}", bits=bits).read_bytes()
    signer = load_signer(public)
    checkpoint = LogCheckpoint("a.log", 1, bytes(32)).signed(public)
    assert checkpoint.require_signer([signer.public_key]) == signer.public_key
    # r and s are shorter now and then.
    for number in range(50):
        signer.public_key.verify_signature(signer.sign(bytes([number])), bytes([number]))


def test_openssl_verifies_what_an_agent_signs(agent: Agent, tmp_path: Path) -> None:
    public = agent.key("run")
    (tmp_path / "text").write_bytes(b"text")
    (tmp_path / "signature").write_bytes(bytes.fromhex(load_signer(public.read_bytes()).sign(b"text").signature))
    pem = subprocess.run(["ssh-keygen", "-e", "-m", "PKCS8", "-f", public], capture_output=True, check=True).stdout
    (tmp_path / "key.pem").write_bytes(pem)
    command = ["openssl", "dgst", "-sha256", "-verify", "key.pem", "-signature", "signature", "text"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).stdout == b"Verified OK\n"


def test_the_output_directory_has_no_private_key(output: Path, agent: Agent) -> None:
    assert [path.name for path in (output / "keys").iterdir()] == ["signing.pub"]
    assert signing_key(output) == agent.folder / "run.pub"
    assert problems(output) == []
    # The copy of the public key in PEM names it as well.
    assert load_signer(public_key(output).read_bytes()).public_key == trusted_keys(output)[0].key
    (agent.folder / "run.pub").chmod(0o644)
    assert signing_key(output) == agent.folder / "run.pub"


def test_an_agent_that_comes_back_signs_what_waited(
    output: Path, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.end()

    def come_back() -> None:
        agent.start()
        agent.run("ssh-add", agent.folder / "run")

    timer = threading.Timer(0.5, come_back)
    timer.start()
    with caplog.at_level(logging.ERROR):
        append(output, Left(note="second"))
    timer.join()
    [line] = caplog.messages
    assert line == f"the SSH agent at {agent.socket} does not answer (Connection refused); it is asked again for 60 s"
    assert len(view(output).heads) == 2
    assert problems(output) == []


def test_nothing_is_lost_where_it_does_not_come_back(output: Path, agent: Agent, impatient: None) -> None:
    before = {path: path.read_bytes() for path in output.glob("log.*")}
    agent.end()
    with pytest.raises(AgentError, match="does not answer") as caught:
        append(output, Left(note="second"))
    assert may_retry(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    agent.start()
    agent.run("ssh-add", agent.folder / "run")
    append(output, Left(note="second"))
    assert problems(output) == []


def _lock(agent: Agent) -> None:
    command = ["ssh-add", "-x"]
    environment = {"PATH": "/usr/bin:/bin", "SSH_AUTH_SOCK": str(agent.socket), "SSH_ASKPASS_REQUIRE": "force",
                   "SSH_ASKPASS": "/bin/pwd"}  # fmt: skip
    subprocess.run(command, env=environment, check=True, capture_output=True)


@pytest.mark.parametrize("change", [lambda agent: agent.run("ssh-add", "-D"), _lock], ids=["removed", "locked"])
def test_a_key_that_an_agent_does_not_have_signs_nothing(
    change: Callable[[Agent], object], output: Path, agent: Agent, impatient: None
) -> None:
    change(agent)
    with pytest.raises(AgentError, match="refuses: it is locked, lacks the key, or a person said no"):
        append(output, Left(note="second"))
    with pytest.raises(ConfigError, match=r"does not have the key [0-9a-f]{12}: `ssh-add` it"):
        evidence().prepare(output, None)


def test_a_run_without_an_agent_does_not_begin(output: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.end()
    with pytest.raises(ConfigError, match=r"run\.pub: the SSH agent at .* does not answer"):
        evidence().prepare(output, None)
    monkeypatch.delenv("SSH_AUTH_SOCK")
    with pytest.raises(ConfigError, match="SSH_AUTH_SOCK is not set: no SSH agent can sign"):
        evidence().prepare(output, None)


def _gone(agent: Agent) -> Path:
    key = agent.key("run")
    agent.end()
    return key


def _not_held(agent: Agent) -> Path:
    key = agent.key("run")
    agent.run("ssh-add", "-d", key)
    return key


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (_gone, "does not answer"),
        (_not_held, "does not have the key"),
        (lambda agent: agent.key("rsa", "rsa", 2048), "must be an ECDSA key"),
        (lambda agent: agent.folder / "missing.pub", "No such file"),
    ],
    ids=["gone", "not held", "rsa", "missing"],
)
def test_a_key_that_cannot_sign_is_bad_input(
    given: Callable[[Agent], Path], reason: str, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and an output directory is neither made nor bound to the key."""
    monkeypatch.setenv(KEY_VARIABLE, str(given(agent)))
    output = tmp_path / "run"
    done = CliRunner().invoke(app, ["run", "configs/tiny.yaml", "--output", str(output)])
    assert (done.exit_code, reason in " ".join(done.output.split())) == (2, True), done.output
    assert not output.exists()
    with pytest.raises(ConfigError, match=reason):
        evidence().prepare(output, None)
    assert not output.exists()


def test_a_first_entry_that_nobody_signs_leaves_no_log(
    agent: Agent, tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(_gone(agent)))
    with pytest.raises(AgentError):
        append(tmp_path, Left(note="first"))
    assert not (tmp_path / "log.jsonl").exists()


def test_a_snapshot_that_nobody_signs_says_why(output: Path, agent: Agent, impatient: None) -> None:
    snapshots = Snapshots(output / "snapshots" / "sft-1", 1, evidence().seal(output))
    agent.end()
    with pytest.raises(AgentError, match="does not answer"), snapshots.writing(1, {}):
        pass
    assert snapshots.latest() is None


def test_the_end_of_a_lost_run_waits_for_no_agent(
    output: Path, agent: Agent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is that of the run, and the next call ends it."""
    monkeypatch.setattr(module, "WAIT_S", 1e9)
    facts = {"run_directory": "", "facts": {"seed": 7}, "tags": {}, "tracking": "", "experiment": "e", "name": "n"}
    append(output, RunBegan.model_validate(facts | {"run_id": "lost", "params": "0" * 64}))
    RunSummary(output, output, {"seed": 7}, "lost", None, "#")
    agent.end()
    close_lost_runs([output])
    [line] = caplog.messages
    assert "the end of the run is not signed" in line
    assert LIFECYCLE not in view(output).files
    agent.start()
    agent.run("ssh-add", agent.folder / "run")
    close_lost_runs([output])
    assert LIFECYCLE in view(output).files


@pytest.mark.parametrize(
    "answer", [b"", b"\0\0\0\1\x0e", b"\0\0\0\x05\x0e\0\0\0\0", b"\xff\xff\xff\xff\x0e" + bytes(64)]
)
def test_an_answer_that_is_no_signature_is_refused(
    answer: bytes, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSH_AUTH_SOCK", "liar.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("liar.sock")
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(2**16)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(AgentError, match=r"closed the connection|answers with what is no signature"):
            append(output, Left(note="second"))
        thread.join()


@pytest.mark.parametrize("answer", [b"", b"\0\0\0\1", b"\0\0\0\1\0\0\0\x09key"])
def test_an_answer_that_is_no_list_of_keys_is_refused(
    answer: bytes, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ask", lambda *_: answer)
    with pytest.raises(ConfigError, match=r"run\.pub: the SSH agent at .* answers with what is no list of keys"):
        evidence().prepare(output, None)


def test_a_signature_by_another_key_is_refused(
    output: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    other = load_signer(agent.key("other").read_bytes())
    ask = module._ask
    blob = other._blob  # type: ignore[attr-defined]
    own = load_signer((agent.folder / "run.pub").read_bytes())._blob  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "_ask", lambda kind, content, want: ask(kind, content.replace(own, blob), want))
    with pytest.raises(AgentError, match="no signature by"):
        append(output, Left(note="second"))


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_keys_that_model_signatures_do_not_know_are_refused(
    kind: str, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(agent.key(kind, kind, 2048)))
    with pytest.raises(ConfigError, match=f"{kind}.pub' cannot be used: must be an ECDSA key"):
        signing_key(tmp_path)


def test_a_directory_moves_to_an_agent_and_back(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "run"
    (output / "checkpoints").mkdir(parents=True)
    append(output, Left(note="with a key of its own"))
    moved = agent.key("run")
    command = ["keys", "rotate", "--output", str(output), "--note", "an agent", "--new-key"]
    result = CliRunner().invoke(app, [*command, str(moved)])
    assert result.exit_code == 0, result.output
    assert not (output / "keys" / "signing.pem").exists()
    monkeypatch.setenv(KEY_VARIABLE, str(moved))
    append(output, Left(note="by the agent"))
    assert CliRunner().invoke(app, [*command, str(tmp_path / "new.pem")]).exit_code == 0
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "new.pem"))
    append(output, Left(note="by the new file"))
    assert problems(output) == []
    assert len(trusted_keys(output)) == 3


@pytest.mark.skipif(not TOKENS.exists() or shutil.which("pkcs11-tool") is None, reason="needs softhsm2 and opensc")
def test_a_token_signs_by_pkcs11(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The private key is made in the token and cannot leave it; ssh-agent loads its module."""
    (tmp_path / "tokens").mkdir()
    (tmp_path / "conf").write_text(f"directories.tokendir = {tmp_path / 'tokens'}")
    (tmp_path / "pin").write_text("#!/bin/sh\necho 1234\n")
    (tmp_path / "pin").chmod(0o700)
    monkeypatch.setenv("SOFTHSM2_CONF", str(tmp_path / "conf"))
    run: dict[str, Any] = {"check": True, "capture_output": True}
    subprocess.run(
        ["softhsm2-util", "--init-token", "--free", "--label", "xray", "--pin", "1234", "--so-pin", "5678"], **run
    )
    make = f"pkcs11-tool --module {TOKENS} --login --pin 1234 --keypairgen --key-type EC:prime256v1 --id 01 --label run"
    subprocess.run(make.split(), **run)
    with ssh_agent() as agent:
        environment = {"PATH": "/usr/bin:/bin", "SSH_AUTH_SOCK": str(agent.socket), "SSH_ASKPASS_REQUIRE": "force",
                       "SSH_ASKPASS": str(tmp_path / "pin")}  # fmt: skip
        subprocess.run(["ssh-add", "-s", TOKENS], env=environment, **run)
        listed = subprocess.run(["ssh-add", "-L"], env=environment, **run)
        (tmp_path / "run.pub").write_bytes(listed.stdout)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
        monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "run.pub"))
        output = tmp_path / "run"
        (output / "checkpoints").mkdir(parents=True)
        append(output, Left(note="by a token"))
        assert problems(output) == []


def test_a_string_of_the_protocol_is_read_as_it_is_written() -> None:
    assert module._string(b"abc") == struct.pack(">I", 3) + b"abc" == b"\0\0\0\x03abc"
