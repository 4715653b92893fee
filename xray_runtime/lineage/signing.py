"""Signatures by the `model-signing` package with a local elliptic-curve key.

What is signed is a small directory or file (the attestation), which lists every weight file by its sha256: the
signature covers the whole checkpoint, and no weights are read twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from xray_runtime.checkpoints.store import read_bounded
from xray_runtime.config_io import ConfigError

KEY_VARIABLE = "XRAY_SIGNING_KEY"
PRIVATE, PUBLIC, TRUSTED = "signing.pem", "signing.pub", "trusted"


class SignatureProblem(ValueError):
    """A signature that does not hold; `code` is `missing`, `malformed`, `foreign` or `invalid`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def signing_key(output: Path) -> Path:
    """The private key: XRAY_SIGNING_KEY (a PEM file), or `output/keys/signing.pem`, made on first use.

    Its public half is kept as `output/keys/signing.pub`, which is all that checking needs.

    Raises:
        ConfigError: XRAY_SIGNING_KEY is not an elliptic-curve private key in PEM, or not this directory's.
    """
    keys = output / "keys"
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    given = os.environ.get(KEY_VARIABLE)
    private = Path(given) if given else keys / PRIVATE
    if not given and not private.exists():
        _make(private)
    public = keys / PUBLIC
    content = _public_bytes(private)
    if not public.exists():
        _write_new(public, content, 0o644)
    if public.read_bytes() != content:
        raise ConfigError(
            f"{KEY_VARIABLE}: {str(private)!r} is not the key {public} belongs to; records of one output directory "
            "have one key"
        )
    return private


def public_key(output: Path) -> Path:
    """Where the public key of an output directory lies."""
    return output / "keys" / PUBLIC


def trusted_keys(output: Path) -> list[Path]:
    """The public key of an output directory, and those of what was imported into it."""
    others = output / "keys" / TRUSTED
    imported = [] if others.is_symlink() else sorted(others.glob("*.pub"))
    own = public_key(output)
    return imported if imported and not own.exists() else [own, *imported]


def trust(output: Path, public: Path) -> None:
    """Trust another public key in `output`."""
    folder = output / "keys" / TRUSTED
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / f"{fingerprint(public)[:16]}.pub").write_bytes(read_bounded(public))


def fingerprint(public: Path) -> str:
    """sha256 of a public key as model-signing names it.

    Raises:
        ValueError: it is not there, or no elliptic-curve public key.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(read_bounded(public))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{public}: not a public key in PEM ({str(error).splitlines()[0]})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"{public}: not an elliptic-curve public key")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.PEM, form)).hexdigest()


def sign(what: Path, signature: Path, private: Path) -> None:
    """Sign a directory or a file; the signature is a Sigstore bundle."""
    from model_signing import signing

    signing.Config().use_elliptic_key_signer(private_key=private).sign(what, signature)


class Verifier:
    """Checks signatures against the public keys that are trusted.

    Raises:
        ValueError: a public key cannot be used.
        OSError: it cannot be read.
    """

    def __init__(self, public: Sequence[Path]) -> None:
        self._keys = {fingerprint(path): path for path in public}

    def check(self, what: Path, signature: Path) -> None:
        """Raises SignatureProblem unless `signature` is a trusted key's and covers every byte of `what`."""
        from model_signing import verifying

        try:
            bundle = json.loads(read_bounded(signature))
            hint = bundle["verificationMaterial"]["publicKey"]["hint"]
        except FileNotFoundError:
            raise SignatureProblem("missing", "there is no signature") from None
        except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
            code = "malformed" if signature.is_symlink() or signature.exists() else "missing"
            raise SignatureProblem(code, f"the signature cannot be read ({type(error).__name__})") from None
        if not isinstance(hint, str) or hint not in self._keys:
            raise SignatureProblem("foreign", f"it was signed with another key ({str(hint)[:12]}…)")
        try:
            verifying.Config().use_elliptic_key_verifier(public_key=self._keys[hint]).verify(what, signature)
        # The library lets whatever its parsers raise through; each means the same here.
        except Exception as error:
            lines = str(error).splitlines()
            raise SignatureProblem("invalid", lines[0] if lines else "the signature is not valid") from None


def _make(private: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    content = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_new(private, content, 0o600)


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a whole new file, or leave the one another process wrote in the meantime."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def _public_bytes(private: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(private.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not an unencrypted PEM private key"
        raise ConfigError(f"{KEY_VARIABLE}: {str(private)!r} cannot be used: {reason}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{KEY_VARIABLE}: {str(private)!r} is not an elliptic-curve key")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)
