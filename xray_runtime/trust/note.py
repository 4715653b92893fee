"""Signed notes: the log's checkpoint, and a witness's cosignature of it.

    log.checkpoint   xray.log/0123456789abcdef            the log's origin: the first digits of its first line's sha256
                     12                                   its number of lines
                     base64 of the Merkle root            see `merkle`

                     — xray.log/… base64 of key hash and signature (ECDSA, as transparency logs of Sigstore sign)
    log.cosigned     the last one that the witness signed, with the line of its cosignature

The forms are https://c2sp.org/tlog-checkpoint, https://c2sp.org/signed-note and https://c2sp.org/tlog-cosignature.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from xray_runtime.kernel.evidence.envelope import SignatureProblem, load_signer, public_key

if TYPE_CHECKING:
    from securesystemslib.signer import SSlibKey

COSIGNATURE = b"\x04"
"""The type of a witness's key."""
FRESH_S = 3600
"""A cosignature of another time, by the clock here, may be one that somebody kept and repeats."""


class SignatureLine(NamedTuple):
    name: str
    key_hash: bytes
    """4 bytes."""
    signature: bytes

    def __str__(self) -> str:
        return f"— {self.name} {_text(self.key_hash + self.signature)}\n"


@dataclass(frozen=True)
class LogCheckpoint:
    """The state of a log, with signatures that have not been checked."""

    origin: str
    size: int
    root: bytes
    signatures: tuple[SignatureLine, ...] = ()

    @property
    def body(self) -> bytes:
        """The text that is signed."""
        return f"{self.origin}\n{self.size}\n{_text(self.root)}\n".encode()

    def __str__(self) -> str:
        return f"{self.body.decode()}\n{''.join(map(str, self.signatures))}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises SignatureProblem: it is no checkpoint with a signature."""
        try:
            body, _, tail = text.partition("\n\n")
            origin, size, root = body.split("\n")
            checkpoint = cls(origin, int(size), base64.b64decode(root, validate=True), tuple(_lines(tail)))
        except ValueError:
            raise SignatureProblem("malformed", "it is not a checkpoint of a log") from None
        is_complete = checkpoint.size > 0 and len(checkpoint.root) == hashlib.sha256().digest_size
        if not checkpoint.signatures or str(checkpoint) != text or not is_complete:
            raise SignatureProblem("malformed", "it is not a checkpoint of a log")
        return checkpoint

    def signed(self, private: bytes) -> Self:
        """This checkpoint with a signature by a key, as `load_signer` takes it."""
        signer = load_signer(private)
        signature = bytes.fromhex(signer.sign(self.body).signature)
        line = SignatureLine(self.origin, _key_hash(public_key(signer)), signature)
        return type(self)(self.origin, self.size, self.root, (*self.signatures, line))

    def require_signer(self, keys: Iterable[SSlibKey]) -> SSlibKey:
        """The one of these keys that signed it. Raises SignatureProblem: none did."""
        from securesystemslib.exceptions import UnverifiedSignatureError
        from securesystemslib.signer import Signature

        by_hash = {_key_hash(key): key for key in keys}
        for line in self.signatures:
            key = by_hash.get(line.key_hash)
            if key is not None and line.name == self.origin:
                try:
                    key.verify_signature(Signature(key.keyid, line.signature.hex()), self.body)
                except UnverifiedSignatureError:
                    raise SignatureProblem("invalid", "the signature is not valid") from None
                return key
        raise SignatureProblem("foreign", "no trusted key signed it")


class WitnessKey(NamedTuple):
    """The name and public key of a witness, written as NAME+HASH+KEY."""

    name: str
    public: bytes

    @property
    def key_hash(self) -> bytes:
        return hashlib.sha256(self.name.encode() + b"\n" + COSIGNATURE + self.public).digest()[:4]

    def __str__(self) -> str:
        return f"{self.name}+{self.key_hash.hex()}+{_text(COSIGNATURE + self.public)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        try:
            name, _, encoded = text.split("+", 2)
            key = cls(name, base64.b64decode(encoded, validate=True)[1:])
            Ed25519PublicKey.from_public_bytes(key.public)
            if str(key) == text:
                return key
        except ValueError:
            pass
        raise ValueError(f"{text!r} is not allowed: must be NAME+HASH+KEY, as the witness prints it")

    def require(self, checkpoint: LogCheckpoint, line: SignatureLine, *, is_fresh: bool = False) -> None:
        """Raises SignatureProblem unless a line is this witness's cosignature of a checkpoint, perhaps one made now."""
        stamp, signature = line.signature[:8], line.signature[8:]
        if (line.name, line.key_hash) != (self.name, self.key_hash):
            raise SignatureProblem("foreign", f"another witness cosigned it ({line.name})")
        try:
            key = Ed25519PublicKey.from_public_bytes(self.public)
            key.verify(signature, _cosigned(int.from_bytes(stamp), checkpoint))
        except InvalidSignature:
            raise SignatureProblem("invalid", "the cosignature is not valid") from None
        if is_fresh and abs(int.from_bytes(stamp) - time.time()) > FRESH_S:
            raise SignatureProblem("invalid", "the cosignature is not of the last hour (or a clock is wrong)")


def cosign(checkpoint: LogCheckpoint, name: str, private: Ed25519PrivateKey) -> SignatureLine:
    """A witness's cosignature now."""
    now = int(time.time())
    signature = private.sign(_cosigned(now, checkpoint))
    return SignatureLine(name, WitnessKey(name, private.public_key().public_bytes_raw()).key_hash,
                         now.to_bytes(8) + signature)  # fmt: skip


def parse_line(text: str) -> SignatureLine:
    """Raises SignatureProblem where the text is not one line of a signature."""
    try:
        [line] = _lines(text)
        return line
    except ValueError:
        raise SignatureProblem("malformed", "it is not a signature of a checkpoint") from None


def _lines(text: str) -> Iterable[SignatureLine]:
    for line in text.splitlines():
        mark, name, encoded = line.split(" ")
        content = base64.b64decode(encoded, validate=True)
        if mark != "—" or len(content) < 5:
            raise ValueError(line)
        yield SignatureLine(name, content[:4], content[4:])


def _cosigned(seconds: int, checkpoint: LogCheckpoint) -> bytes:
    return f"cosignature/v1\ntime {seconds}\n".encode() + checkpoint.body


def _key_hash(key: SSlibKey) -> bytes:
    pem = str(key.keyval["public"]).splitlines()
    return hashlib.sha256(base64.b64decode("".join(pem[1:-1]))).digest()[:4]


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
