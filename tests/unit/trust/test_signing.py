"""What a signature vouches for, and every way in which it does not."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from pydantic import Field

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import (
    EvidenceModel,
    InTotoRecord,
    SignatureProblem,
    TrustedKey,
    Verifier,
    load_public,
    load_signer,
    new_private_key,
    public_half,
    read_envelope,
    read_record,
    sign,
)
from xray_runtime.kernel.evidence.lines import LogRecord
from xray_runtime.trust.keys import adopt, read_rotations, retirement_files, root_keys, rotate, trusted_keys
from xray_runtime.trust.note import LogCheckpoint
from xray_runtime.trust.signing import (
    KEY_VARIABLE,
    exposed_keys,
    has_signing_key,
    make_key,
    public_bytes,
    public_key,
    read_public,
    signing_key,
)


def fingerprint(path: Path) -> str:
    return read_public(path).sha256


UNTIL = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Note(EvidenceModel):
    text: str


class NoteRecord(InTotoRecord[Note]):
    predicate_type: Literal["urn:test:note:v1"] = Field("urn:test:note:v1", alias="predicateType")


def note(*private: bytes, text: str = "a") -> bytes:
    """A signed note."""
    return sign(NoteRecord.of(Note(text=text), {"x": "0" * 64}), *private)


KEY = new_private_key()
OTHER = new_private_key()


def trusted(private: bytes, until: datetime | None = None) -> TrustedKey:
    return TrustedKey(load_public(public_half(private)), until)


def problem(line: bytes, key: TrustedKey, made: str | None = None) -> str | None:
    """Code of what is wrong with an envelope's signature; None where it holds."""
    try:
        assert Verifier([key]).check(read_envelope(line), made) == key.sha256
    except SignatureProblem as found:
        return found.code
    return None


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("2026-03-01T11:59:59+00:00", None),
        # Keys are retired to the second: what was made in it is still theirs.
        ("2026-03-01T12:00:00+00:00", None),
        ("2026-03-01T12:00:01+00:00", "retired"),
        ("2026-03-01T12:30:00+01:00", None),
        ("2026-03-01T11:30:00-01:00", "retired"),
        # Without a time zone nobody knows when that was.
        ("2026-01-01T00:00:00", "retired"),
        ("yesterday", "retired"),
        ("", "retired"),
        (None, "retired"),
    ],
)
def test_a_retired_key_vouches_for_what_was_made_before(made: str | None, expected: str | None) -> None:
    assert problem(note(KEY), trusted(KEY, UNTIL), made) == expected
    assert problem(note(KEY), trusted(KEY), made) is None


def edited(**values: object) -> bytes:
    return json.dumps(json.loads(note(KEY)) | values).encode()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (edited(signatures=[]), "missing"),
        (b"{", "malformed"),
        (b"[]", "malformed"),
        (b"{}", "malformed"),
        (b"[" * 100_000, "malformed"),
        (edited(signatures=[{"sig": "AA=="}]), "malformed"),
        (edited(signatures=7), "malformed"),
        (edited(signatures=[{"keyid": 7, "sig": "AA=="}]), "malformed"),
        (edited(signatures=[{"keyid": None, "sig": "AA=="}]), "malformed"),
        (edited(signatures=[{"keyid": trusted(KEY).sha256, "sig": "AA=="}]), "invalid"),
        (edited(payload=7), "malformed"),
        (edited(payloadType="text/plain"), "malformed"),
        (note(KEY, OTHER), "malformed"),
        (note(OTHER), "foreign"),
        # A signature of the other key that says it is of the trusted one.
        (note(OTHER).replace(trusted(OTHER).sha256.encode(), trusted(KEY).sha256.encode()), "invalid"),
        (edited(payload=json.loads(note(KEY, text="b"))["payload"]), "invalid"),
        (b'{"_type": "https://in-toto.io/Statement/v1"}', "malformed"),
    ],
)
def test_signature_faults_are_named(line: bytes, code: str) -> None:
    assert problem(line, trusted(KEY)) == code


def test_an_older_format_is_named() -> None:
    with pytest.raises(SignatureProblem, match="in the format of an older version of X-ray"):
        read_envelope(b'{"_type": "https://in-toto.io/Statement/v1", "subject": []}')


def test_a_statement_that_in_toto_refuses_is_not_signed() -> None:
    with pytest.raises(ValueError, match="At least one subject required"):
        sign(NoteRecord.of(Note(text="a"), {}), KEY)


def test_a_statement_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="not a statement"):
        read_record(read_envelope(note(KEY)), LogRecord)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_every_curve_signs(curve: ec.EllipticCurve) -> None:
    private = ec.generate_private_key(curve).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    assert problem(note(private), trusted(private)) is None
    checkpoint = LogCheckpoint("a.log", 1, bytes(32)).signed(private)
    LogCheckpoint.parse(str(checkpoint)).require_signer([load_signer(private).public_key])


def test_a_private_key_is_its_owners_alone_and_is_never_written_over(tmp_path: Path) -> None:
    private = signing_key(tmp_path)
    assert private.stat().st_mode & 0o777 == 0o600
    assert private.parent.stat().st_mode & 0o777 == 0o700
    before = private.read_bytes(), public_key(tmp_path).read_bytes()
    make_key(private)
    assert signing_key(tmp_path) == private
    assert (private.read_bytes(), public_key(tmp_path).read_bytes()) == before
    assert sorted(path.name for path in private.parent.iterdir()) == ["signing.pem", "signing.pub"]


@pytest.mark.parametrize(
    ("expose", "said"),
    [
        (lambda keys: (keys / "signing.pem").chmod(0o644), r"signing\.pem: mode 0644 is not allowed"),
        (lambda keys: (keys / "signing.pem").chmod(0o620), r"signing\.pem: mode 0620 is not allowed"),
        (lambda keys: keys.chmod(0o777), r"keys: mode 0777 is not allowed.*chmod 0700"),
        (lambda keys: _linked(keys / "signing.pem"), r"signing\.pem: a link is not allowed"),
    ],
)
def test_a_key_that_others_can_use_signs_nothing(expose: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    keys = signing_key(tmp_path).parent
    assert exposed_keys(tmp_path) == []
    expose(keys)
    with pytest.raises(ConfigError, match=said):
        signing_key(tmp_path)
    assert len(exposed_keys(tmp_path)) == 1


def test_a_key_kept_elsewhere_is_its_owners_alone_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to it is how secrets are mounted."""
    given = tmp_path / "given.pem"
    make_key(given)
    (tmp_path / "link.pem").symlink_to(given)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "link.pem"))
    assert signing_key(tmp_path / "out") == tmp_path / "link.pem"
    given.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640 is not allowed"):
        signing_key(tmp_path / "out")


def _linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere.pem")
    path.symlink_to(path.parent.parent / "elsewhere.pem")


def test_a_key_that_was_handed_over_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_signing_key(tmp_path)
    signing_key(tmp_path)
    assert has_signing_key(tmp_path)
    make_key(tmp_path / "own.pem")
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "own.pem"))
    assert has_signing_key(tmp_path / "other")
    assert signing_key(tmp_path / "other") == tmp_path / "own.pem"
    assert not (tmp_path / "other" / "keys" / "signing.pem").exists()
    # Of one directory there is one key.
    with pytest.raises(ConfigError, match=r"own\.pem' is not the key "):
        signing_key(tmp_path)


def test_keys_of_what_was_imported_are_trusted_beside_the_own(tmp_path: Path) -> None:
    own, other = public_key(tmp_path), tmp_path / "elsewhere" / "other.pub"
    other.parent.mkdir()
    make_key(tmp_path / "other.pem")
    other.write_bytes(public_bytes(tmp_path / "other.pem"))
    # There is none yet; the name is where it will be.
    assert root_keys(tmp_path) == [own]
    adopt(tmp_path, [other], tmp_path)
    [imported] = (tmp_path / "keys" / "trusted").iterdir()
    for folder in (imported.parent, imported.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert root_keys(tmp_path) == [imported]
    signing_key(tmp_path)
    assert root_keys(tmp_path) == [own, imported]
    assert {key.sha256 for key in trusted_keys(tmp_path)} == {fingerprint(own), fingerprint(other)}
    # Whoever can put a link there cannot have other keys trusted.
    shutil.rmtree(imported.parent)
    imported.parent.symlink_to(other.parent)
    assert root_keys(tmp_path) == [own]


def test_a_key_that_cannot_sign_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    with pytest.raises(ConfigError, match=r"key\.pem' cannot be used: must be an ECDSA key"):
        public_bytes(path)
    path.write_text("no key")
    with pytest.raises(ConfigError, match=r"cannot be used: must be an ECDSA key"):
        public_bytes(path)
    with pytest.raises(ConfigError, match=r"cannot be used: No such file or directory$"):
        public_bytes(tmp_path / "none.pem")


def test_an_envelope_is_signed_as_dsse_has_it() -> None:
    content = json.loads(note(KEY))
    payload, [found] = base64.b64decode(content["payload"]), content["signatures"]
    assert content["payloadType"] == "application/vnd.in-toto+json"
    assert json.loads(payload) == {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "x", "digest": {"sha256": "0" * 64}}],
        "predicateType": "urn:test:note:v1",
        "predicate": {"text": "a"},
    }
    assert found["keyid"] == hashlib.sha256(public_half(KEY)).hexdigest()
    public = serialization.load_pem_public_key(public_half(KEY))
    assert isinstance(public, ec.EllipticCurvePublicKey)
    # The pre-authentication encoding: lengths in bytes, before the type and before the payload.
    signature, algorithm = base64.b64decode(found["sig"]), ec.ECDSA(hashes.SHA256())
    public.verify(signature, b"DSSEv1 28 application/vnd.in-toto+json %d %b" % (len(payload), payload), algorithm)
    with pytest.raises(InvalidSignature):
        public.verify(signature, payload, algorithm)


# Rotations


@pytest.fixture
def rotated(tmp_path: Path) -> Path:
    """An output directory whose first key was taken over from."""
    signing_key(tmp_path)
    rotate(tmp_path, by="a person", note="")
    assert [len(found) for found in read_rotations(tmp_path)] == [1, 0]
    return tmp_path


def retired_file(output: Path, suffix: str) -> Path:
    [path] = (output / "keys" / "retired").glob(f"*{suffix}")
    return path


@pytest.mark.parametrize("which", [0, 1])
def test_a_rotation_needs_the_signatures_of_both_keys(rotated: Path, which: int) -> None:
    path = retired_file(rotated, ".json")
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(content | {"signatures": [content["signatures"][which]]}))
    rotations, problems = read_rotations(rotated)
    assert (rotations, len(problems)) == ([], 1)
    # Nobody vouches for the retired key any more.
    assert [key.sha256 for key in trusted_keys(rotated, None)] == [fingerprint(public_key(rotated))]


def test_a_rotation_named_for_another_key_is_ignored(rotated: Path) -> None:
    path = retired_file(rotated, ".json")
    path.rename(path.with_name("0" * 16 + path.name[16:]))
    rotations, problems = read_rotations(rotated)
    assert rotations == []
    assert sorted(name for name, _ in problems)[0] == f"keys/retired/{'0' * 16}.json"


def test_links_among_what_was_retired_are_not_read(rotated: Path) -> None:
    folder, elsewhere = rotated / "keys" / "retired", rotated / "elsewhere"
    (folder / "folder.json").mkdir()
    assert len(retirement_files(rotated)) == 2
    for path in retirement_files(rotated):
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        assert path not in retirement_files(rotated)
        path.unlink()
        elsewhere.rename(path)
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert retirement_files(rotated) == []


def test_a_retired_key_is_trusted_until_it_was_taken_over_from(rotated: Path) -> None:
    [rotation] = read_rotations(rotated)[0]
    keys = {key.sha256: key.until for key in trusted_keys(rotated)}
    assert keys == {rotation.retired: rotation.at, rotation.successor: None}
    assert rotation.successor == fingerprint(public_key(rotated))
    # Of two keys that are elsewhere, a stranger's leads to none of these…
    stranger = rotated / "stranger.pub"
    make_key(rotated / "stranger.pem")
    stranger.write_bytes(public_bytes(rotated / "stranger.pem"))
    assert [key.sha256 for key in trusted_keys(rotated, stranger)] == [fingerprint(stranger)]
    # …and from a copy of the old one of these one comes to the new one.
    old = shutil.copy(retired_file(rotated, ".pub"), rotated / "old.pub")
    assert {key.sha256: key.until for key in trusted_keys(rotated, Path(old))} == keys
