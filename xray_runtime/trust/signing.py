"""Signatures by the `model-signing` package with a local elliptic-curve key.

The signed directory (the attestation) lists every weight file by its sha256: the signature covers the whole checkpoint,
and no weights are read twice.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.lines import SignatureProblem
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.seal import new_private_key, public_half

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

KEY_VARIABLE = "XRAY_SIGNING_KEY"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
PRIVATE, PUBLIC = "signing.pem", "signing.pub"


def signing_key(output: Path) -> Path:
    """The private key: XRAY_SIGNING_KEY (a PEM file), or `output/keys/signing.pem`, made on first use.

    Its public half is kept as `output/keys/signing.pub`, which is enough to check signatures.

    Raises:
        ConfigError: XRAY_SIGNING_KEY is not an elliptic-curve private key in PEM, or not this directory's; or users
            other than its owner can read or replace the key.
    """
    keys = output / "keys"
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    given = os.environ.get(KEY_VARIABLE)
    private = Path(given) if given else keys / PRIVATE
    if not given and not os.path.lexists(private):
        make_key(private)
    exposed = exposed_keys(output, Path(given) if given else None)
    if exposed:
        raise ConfigError(exposed[0])
    public = keys / PUBLIC
    content = public_bytes(private)
    if not public.exists():
        _write_new(public, content, 0o644)
    if public.read_bytes() != content:
        raise ConfigError(
            f"{KEY_VARIABLE}: {str(private)!r} is not the key {public} belongs to; records of one output directory "
            "have one key: `xray keys rotate` replaces it"
        )
    return private


def exposed_keys(output: Path, given: Path | None = None) -> list[str]:
    """Why users other than its owner can read or replace the private key: path, mode and remedy.

    Args:
        given: a private key kept elsewhere, whose own mode counts and not that of its directory.
    """
    private = output / "keys" / PRIVATE
    paths = [given] if given is not None else [private.parent, private] if os.path.lexists(private) else []
    found = []
    for path in paths:
        try:
            mode = (os.stat if path == given else os.lstat)(path).st_mode
        except OSError:
            # Reading the key gives the reason.
            continue
        allowed = 0o700 if stat.S_ISDIR(mode) else 0o600
        if stat.S_ISLNK(mode):
            found.append(f"{path}: a link is not allowed: put the file itself there, or set {KEY_VARIABLE}")
        elif stat.S_IMODE(mode) & 0o077:
            found.append(
                f"{path}: mode {stat.S_IMODE(mode):04o} is not allowed, others may have had the key: chmod "
                f"{allowed:04o}, then `xray keys rotate`"
            )
    return found


def has_signing_key(output: Path) -> bool:
    """Whether `signing_key` finds a key and need not make one."""
    return bool(os.environ.get(KEY_VARIABLE)) or (output / "keys" / PRIVATE).exists()


@dataclass(frozen=True)
class TrustedKey:
    """A public key whose signatures are accepted."""

    path: Path
    until: datetime | None = None
    """When another key replaced it; it signs nothing made later."""

    @cached_property
    def sha256(self) -> str:
        """Raises ValueError or OSError where it cannot be used."""
        return fingerprint(self.path)

    @cached_property
    def public(self) -> ec.EllipticCurvePublicKey:
        """As `sha256`."""
        return _load_public(self.path)


def public_key(output: Path) -> Path:
    """The path of the public key of an output directory."""
    return output / "keys" / PUBLIC


def fingerprint(public: Path) -> str:
    """sha256 of a public key as model-signing names it. Raises as `_load_public`."""
    from cryptography.hazmat.primitives import serialization

    key = _load_public(public)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key_digest(key.public_bytes(serialization.Encoding.PEM, form))


def _load_public(public: Path) -> ec.EllipticCurvePublicKey:
    """Raises ValueError where it is not an elliptic-curve public key in PEM, OSError where it cannot be read."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(read_bounded(public))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{public}: not a public key in PEM ({first_line(error)})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"{public}: not an elliptic-curve public key")
    return key


def key_digest(pem: bytes) -> str:
    """`fingerprint` of the PEM that `public_bytes` gives."""
    return hashlib.sha256(pem).hexdigest()


def sign(what: Path, signature: Path, private: Path) -> None:
    """Sign a directory or a file; the signature is a Sigstore bundle."""
    from model_signing import signing

    signing.Config().use_elliptic_key_signer(private_key=private).sign(what, signature)


def envelope(payload: bytes, payload_type: str, private: Path) -> str:
    """A DSSE envelope in one line of JSON, signed with ECDSA over SHA-256, as in-toto's own tools read it.

    See https://github.com/secure-systems-lab/dsse, protocol.md.
    """
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    keyid = key_digest(public_bytes(private))
    key = serialization.load_pem_private_key(private.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    signature = key.sign(_signed_bytes(payload, payload_type), ec.ECDSA(hashes.SHA256()))
    content = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": [{"keyid": keyid, "sig": base64.b64encode(signature).decode()}],
    }
    return json.dumps(content, sort_keys=True)


def _signed_bytes(payload: bytes, payload_type: str) -> bytes:
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def signer_of(signature: Path) -> str:
    """The `fingerprint` of the key that a signature names, unchecked. Raises ValueError; OSError if there is none."""
    try:
        return str(json.loads(read_bounded(signature))["verificationMaterial"]["publicKey"]["hint"])
    except (KeyError, TypeError, RecursionError):
        raise ValueError(f"{signature}: not a signature") from None


class Verifier:
    """Checks signatures against the public keys that are trusted. Raises ValueError or OSError as `fingerprint`."""

    def __init__(self, trusted: Sequence[TrustedKey]) -> None:
        self._keys = {key.sha256: key for key in trusted}

    def check(self, what: Path, signature: Path, made: str | None = None) -> str:
        """The digest of the key that signed `what`.

        Args:
            made: when `what` says it was made (ISO 8601): a retired key only signs what was made before.

        Raises:
            SignatureProblem: `signature` is not by a trusted key, or does not cover every byte of `what`.
        """
        from model_signing import verifying

        if not os.path.lexists(signature):
            raise SignatureProblem("missing", "there is no signature")
        try:
            hint = signer_of(signature)
        except (ValueError, OSError) as error:
            raise SignatureProblem("malformed", f"the signature cannot be read ({type(error).__name__})") from None
        key = self._key(hint)
        try:
            verifying.Config().use_elliptic_key_verifier(public_key=key.path).verify(what, signature)
        # The library lets through what its parsers raise; each error means the same here.
        except Exception as error:
            lines = str(error).splitlines()
            raise SignatureProblem("invalid", lines[0] if lines else "the signature is not valid") from None
        _check_retired(key, made)
        return hint

    def check_envelope(self, text: bytes, made: str | None = None) -> str:
        """As `check`, for a DSSE envelope as `envelope` writes it."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            content = json.loads(text)
            [signature] = content["signatures"]
            hint, payload_type = str(signature["keyid"]), str(content["payloadType"])
            payload, given = base64.b64decode(content["payload"]), base64.b64decode(signature["sig"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SignatureProblem("malformed", f"the signature cannot be read ({type(error).__name__})") from None
        key = self._key(hint)
        try:
            key.public.verify(given, _signed_bytes(payload, payload_type), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise SignatureProblem("invalid", "the signature is not valid") from None
        _check_retired(key, made)
        return hint

    def _key(self, hint: str) -> TrustedKey:
        if hint not in self._keys:
            raise SignatureProblem("foreign", f"it was signed with another key ({hint[:12]}…)")
        return self._keys[hint]


def _check_retired(key: TrustedKey, made: str | None) -> None:
    """Raises SignatureProblem where the key had been replaced when this was made."""
    if key.until is None:
        return
    # Without a time zone a date cannot be compared.
    with contextlib.suppress(ValueError, TypeError):
        if made is not None and datetime.fromisoformat(made) <= key.until:
            return
    text = f"key {key.sha256[:12]} was retired {key.until.isoformat()}; this says it was made {made}"
    raise SignatureProblem("retired", text)


def make_key(private: Path) -> None:
    """Write a new private key, readable by its owner only, unless there is one."""
    _write_new(private, new_private_key(), 0o600)


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a whole new file, or leave the one another process wrote in the meantime."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def public_bytes(private: Path) -> bytes:
    """The public half of a private key, in PEM. Raises ConfigError where it cannot be used."""
    try:
        return public_half(private.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not an unencrypted elliptic-curve private key"
        raise ConfigError(f"{KEY_VARIABLE}: {str(private)!r} cannot be used: {reason}") from None
