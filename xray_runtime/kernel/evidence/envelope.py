"""The one format of everything that is signed: an in-toto Statement in a DSSE envelope, in one line of JSON.

    {"payload": statement in base64, "payloadType": "application/vnd.in-toto+json", "signatures": [{"keyid", "sig"}]}

`securesystemslib` signs and verifies it with elliptic-curve keys, and `in_toto_attestation` checks each statement that
is signed. The id of a key is the sha256 of its public half in PEM, as OpenSSF model signatures name it. See
https://in-toto.io/Statement/v1 and https://github.com/secure-systems-lab/dsse.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.store.manifest import Sha256

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import Signer, SSlibKey

OPENSSH = (b"ecdsa-", b"sk-", b"ssh-")
"""How public keys of OpenSSH begin."""
PAYLOAD_TYPE = "application/vnd.in-toto+json"
HOW_TO_TRUST = "ask its owner for a copy of the key, then: xray keys trust KEY.pub --output DIR"
OLD_FORMAT = "it is in the format of an older version of X-ray, which this one does not verify: run the lifecycle again"
P = TypeVar("P", bound=BaseModel)


class EvidenceModel(BaseModel):
    """Part of a statement."""

    # Otherwise pydantic writes null for NaN, and no later check sees it.
    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", populate_by_name=True, ser_json_inf_nan="constants"
    )


class Digests(EvidenceModel):
    sha256: Sha256


class StatementSubject(EvidenceModel):
    """One thing that a statement is about: a file, or without a name the line before an entry."""

    name: str = ""
    digest: Digests


class InTotoRecord(EvidenceModel, Generic[P]):
    """An in-toto Statement v1; each kind of record names its type of predicate."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(default="https://in-toto.io/Statement/v1", alias="_type")
    subject: list[StatementSubject]
    predicate: P

    @classmethod
    def of(cls, predicate: P, files: Mapping[str, str]) -> Self:
        """A statement; `files`: name → sha256 of its subjects."""
        subject = [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in files.items()]
        return cls.model_validate({"subject": subject, "predicate": predicate})

    @property
    def files(self) -> dict[str, str]:
        """Name → sha256 of the subjects that have a name."""
        return {subject.name: subject.digest.sha256 for subject in self.subject if subject.name}


R = TypeVar("R", bound=InTotoRecord[Any])


class SignatureProblem(ValueError):
    """A signature that is not valid; `code` is `missing`, `malformed`, `foreign`, `invalid` or `retired`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class TrustedKey:
    """A public key whose signatures are accepted."""

    key: SSlibKey
    until: datetime | None = None
    """When another key replaced it; it signs nothing made later."""
    path: Path | None = None

    @property
    def sha256(self) -> str:
        return self.key.keyid

    @property
    def pem(self) -> bytes:
        return str(self.key.keyval["public"]).encode()


class Verifier:
    """Checks signatures against the public keys that are trusted."""

    def __init__(self, trusted: Sequence[TrustedKey]) -> None:
        self._keys = {key.sha256: key for key in trusted}

    @property
    def keys(self) -> dict[str, str | None]:
        """Every key, and until when it signed."""
        return {name: key.until.isoformat() if key.until is not None else None for name, key in self._keys.items()}

    @property
    def present(self) -> list[SSlibKey]:
        """The keys that no other replaced."""
        return [key.key for key in self._keys.values() if key.until is None]

    def check(self, envelope: Envelope, made: str | None = None) -> str:
        """The id of the key that signed an envelope.

        Args:
            made: when its content says it was made (ISO 8601): a retired key only signs what was made before.

        Raises:
            SignatureProblem: no trusted key signed it, or none that signed then.
        """
        from securesystemslib.exceptions import VerificationError

        if not envelope.signatures:
            raise SignatureProblem("missing", "there is no signature")
        if len(envelope.signatures) > 1 or envelope.payload_type != PAYLOAD_TYPE:
            raise SignatureProblem("malformed", "it must have one signature, over an in-toto statement")
        [keyid] = envelope.signatures
        key = self._keys.get(keyid)
        if key is None:
            raise SignatureProblem("foreign", f"it was signed with another key ({keyid[:12]}…)")
        try:
            envelope.verify([key.key], 1)
        except VerificationError:
            raise SignatureProblem("invalid", "the signature is not valid") from None
        if key.until is not None and not _is_before(made, key.until):
            text = f"key {keyid[:12]} was retired {key.until.isoformat()}; this says it was made {made}"
            raise SignatureProblem("retired", text)
        return keyid


def _is_before(made: str | None, until: datetime) -> bool:
    # Without a time zone a date cannot be compared.
    with contextlib.suppress(ValueError, TypeError):
        return made is not None and datetime.fromisoformat(made) <= until
    return False


def require_signers(envelope: Envelope, keys: Sequence[SSlibKey]) -> None:
    """Raises ValueError unless each of these keys signed an envelope."""
    from securesystemslib.exceptions import VerificationError

    try:
        envelope.verify(list(keys), len(keys))
    except VerificationError:
        raise SignatureProblem("invalid", "the signature is not valid") from None


def sign(record: InTotoRecord[Any], *private: bytes) -> bytes:
    """A statement in an envelope with a signature by each key: one line.

    Args:
        private: keys as `load_signer` takes them.

    Raises ValueError where in-toto's own tools would refuse the statement, or a key cannot be used; OSError where an
    agent does not sign.
    """
    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.v1.statement import Statement
    from securesystemslib.dsse import Envelope

    content = record.model_dump(mode="json", by_alias=True)
    # Its protobuf form holds every number as a double, so the payload is the JSON, and not what it would write.
    checked = Statement([], "", {})
    ParseDict(content, checked.pb)
    checked.validate()
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    envelope = Envelope(text.encode(), PAYLOAD_TYPE, {})
    for key in private:
        envelope.sign(load_signer(key))
    return json.dumps(envelope.to_dict(), sort_keys=True, separators=(",", ":")).encode() + b"\n"


def read_envelope(text: bytes, keyid: str | None = None) -> Envelope:
    """An envelope, unchecked. Raises SignatureProblem where the text is none.

    Args:
        keyid: of its signatures, where something beside it names the key.
    """
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import Error

    try:
        content = json.loads(text)
        if "payload" not in content and "_type" in content:
            raise SignatureProblem("malformed", OLD_FORMAT)
        if keyid is not None:
            content["signatures"] = [signature | {"keyid": keyid} for signature in content["signatures"]]
        envelope = Envelope.from_dict(content)
        if not all(isinstance(name, str) for name in envelope.signatures):
            raise TypeError
        return envelope
    except SignatureProblem:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Error) as error:
        raise SignatureProblem("malformed", f"the signature cannot be read ({type(error).__name__})") from None


def read_record(envelope: Envelope, record: type[R]) -> R:
    """The statement in an envelope, unchecked. Raises ValueError where it is no statement of this kind."""
    try:
        return record.model_validate_json(envelope.payload)
    except (ValidationError, RecursionError) as error:
        raise ValueError(f"not a statement ({first_line(error)})") from error


def load_public(pem: bytes) -> SSlibKey:
    """A public key. Raises ValueError where it is no elliptic-curve one in PEM, or in a line as OpenSSH writes it."""
    load = serialization.load_ssh_public_key if pem.startswith(OPENSSH) else serialization.load_pem_public_key
    try:
        key = load(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"not a public key in PEM ({first_line(error)})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic-curve public key")
    return _public(key)


def names_agent_key(private: bytes) -> bool:
    """Whether what should be a private key is a public one, so that an SSH agent must hold the private half."""
    return b"PRIVATE KEY-----" not in private


@lru_cache(maxsize=8)
def load_signer(private: bytes) -> Signer:
    """The signer of a private key in PEM; an SSH agent signs where it is a public key (PEM, or OpenSSH's).

    Raises ValueError or TypeError where it is no (unencrypted) elliptic-curve one.
    """
    from securesystemslib.signer import CryptoSigner

    if names_agent_key(private):
        from xray_runtime.kernel.evidence.agent import AgentSigner

        return AgentSigner(load_public(private))
    key = serialization.load_pem_private_key(private, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve private key")
    return CryptoSigner(key, _public(key.public_key()))


def new_private_key() -> bytes:
    """A new elliptic-curve private key in PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_key(signer: Signer) -> SSlibKey:
    """The public key of a signer of `load_signer`."""
    return cast("SSlibKey", signer.public_key)


def public_half(private: bytes) -> bytes:
    """The public half of a key, in PEM; errors and `private` are those of `load_signer`."""
    return TrustedKey(public_key(load_signer(private))).pem


def _public(key: ec.EllipticCurvePublicKey) -> SSlibKey:
    from securesystemslib.signer import SSlibKey

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = key.public_bytes(serialization.Encoding.PEM, form)
    return SSlibKey.from_crypto(key, keyid=hashlib.sha256(pem).hexdigest())
