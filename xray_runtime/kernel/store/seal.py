"""Seals: files that a run keeps and reads again are signed, so that planted or edited ones are not read.

A digest beside a file proves nothing: an intruder who can write one can write both. A seal is a signature (ECDSA over
SHA-256, deterministic after RFC 6979) by the output directory's key over a content's purpose and sha256.

    sft-1-ab12…/answers.json         a file
    sft-1-ab12…/answers.json.seal    its seal, for a file of this name in a directory of this name
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.identity import file_sha256

SEALED = ".seal"
MAX_SEAL_BYTES = 4096


class Seal:
    """Makes and checks seals.

    Args:
        private: PEM of the key that makes them; None: they are only checked.
        trusted: PEM of the keys whose seals count.
    """

    def __init__(self, private: bytes | None, trusted: Sequence[bytes]) -> None:
        self._private = serialization.load_pem_private_key(private, password=None) if private is not None else None
        keys = [serialization.load_pem_public_key(pem) for pem in trusted]
        self._trusted = [key for key in keys if isinstance(key, ec.EllipticCurvePublicKey)]

    def sign(self, purpose: str, sha256: str) -> str:
        """The seal of a content with this sha256 for this purpose."""
        assert isinstance(self._private, ec.EllipticCurvePrivateKey)
        algorithm = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
        return base64.b64encode(self._private.sign(_signed(purpose, sha256), algorithm)).decode()

    def holds(self, purpose: str, sha256: str, seal: object) -> bool:
        """Whether `seal` is by a trusted key, for this content and this purpose."""
        try:
            signature = base64.b64decode(str(seal), validate=True)
        except ValueError:
            return False
        for key in self._trusted:
            try:
                key.verify(signature, _signed(purpose, sha256), ec.ECDSA(hashes.SHA256()))
            except InvalidSignature:
                continue
            return True
        return False

    def seal_file(self, path: Path, written: Path | None = None) -> None:
        """Write the seal of the file `path`; until it is renamed, its content is in `written`."""
        content = written or path
        self.seal_content(path, file_sha256(content), content.stat().st_size)

    def seal_content(self, path: Path, sha256: str, size: int) -> None:
        """Write the seal of a file whose content, here or soon, has this digest and so many bytes."""
        write_atomic(_seal_path(path), f"{size} {sha256} {self.sign(_purpose(path, size), sha256)}")

    def is_sealed(self, path: Path) -> bool:
        """Whether a file is unchanged since it was sealed under its name; reads all of it if its size is right."""
        return self.sealed_sha256(path) is not None

    def sealed_sha256(self, path: Path) -> str | None:
        """Digest of a file that is unchanged since it was sealed under its name; None if it is not."""
        size, sha256 = self._sealed(path)
        try:
            # Links are not followed.
            status = os.lstat(path)
            unchanged = stat.S_ISREG(status.st_mode) and status.st_size == size and file_sha256(path, size) == sha256
        except OSError:
            return None
        return sha256 if unchanged else None

    def read_sealed(self, path: Path) -> bytes | None:
        """The bytes of a small file that is unchanged since it was sealed under its name; None if it is not."""
        try:
            content = read_bounded(path)
        except (OSError, ValueError):
            return None
        return content if hashlib.sha256(content).hexdigest() == self._sealed(path)[1] else None

    def _sealed(self, path: Path) -> tuple[int, str]:
        """(bytes, sha256) that a valid seal says a file has; (-1, "") without one."""
        try:
            text = read_bounded(_seal_path(path), MAX_SEAL_BYTES).decode("ascii")
            digits, sha256, signature = text.split(" ")
            size = int(digits)
        except (OSError, ValueError):
            return -1, ""
        return (size, sha256) if self.holds(_purpose(path, size), sha256, signature) else (-1, "")


@functools.cache
def process_seal() -> Seal:
    """A seal of this process alone, for stages outside of a run: it trusts no file of another process."""
    private = new_private_key()
    return Seal(private, [public_half(private)])


def new_private_key() -> bytes:
    """A new elliptic-curve private key in PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_half(private: bytes) -> bytes:
    """The public half of a private key, both in PEM. Raises ValueError where that is no elliptic-curve key."""
    key = serialization.load_pem_private_key(private, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve private key")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def _seal_path(path: Path) -> Path:
    return path.with_name(path.name + SEALED)


def _purpose(path: Path, size: int) -> str:
    return f"{path.parent.name}/{path.name} of {size} bytes"


def _signed(purpose: str, sha256: str) -> bytes:
    return f"xray seal 1\n{purpose}\n{sha256}".encode("utf-8", "surrogateescape")
