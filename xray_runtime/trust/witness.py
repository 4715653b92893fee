"""A witness keeps the last checkpoint of a log, and cosigns only a later one that begins with it.

    DIR/witness.pem          its key (Ed25519), made on first use
    DIR/ORIGIN.checkpoint    the last checkpoint that it cosigned of a log; ORIGIN without its "xray.log/"
    DIR/trusted/*.pub        keys of the logs that it cosigns for others over HTTP

A witness is such a directory, which the log's owner should not be able to write to; a server that has one (`xray
witness serve`, or any other by https://c2sp.org/tlog-witness); or the copy of a checkpoint that a person kept.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from filelock import FileLock

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import SignatureProblem
from xray_runtime.kernel.evidence.log import COSIGNED, END
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.trust.merkle import MerkleTree, is_consistent
from xray_runtime.trust.note import LogCheckpoint, SignatureLine, WitnessKey, cosign, parse_line
from xray_runtime.trust.signing import read_public, write_new

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from securesystemslib.signer import SSlibKey

PRIVATE, TRUSTED = "witness.pem", "trusted"
PATH = "/add-checkpoint"
TIMEOUT_S = 5.0
MAX_BYTES = 65536
"""The size of a request and of an answer."""


class WitnessProblem(ValueError):
    """A witness does not cosign a checkpoint, or cannot be asked."""


class LogContradicted(WitnessProblem):
    """The log is not one that continues what a witness knows."""


class WitnessAhead(WitnessProblem):
    """The last checkpoint that a witness cosigned has another `size` than the one that a proof begins with."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the witness knows {size} entries")
        self.size = size


class Witness(Protocol):
    def cosign(self, old: int, proof: Sequence[bytes], checkpoint: LogCheckpoint) -> SignatureLine | None:
        """Cosign a checkpoint, given the proof from the `old` size; None: a person's file cosigns nothing.

        Raises WitnessAhead where it does not know `old` as the log's last size; WitnessProblem.
        """


class DirectoryWitness:
    """A witness in a directory; `keys`: those that may sign checkpoints, by default those in its `trusted/`."""

    def __init__(self, directory: Path, keys: Sequence[SSlibKey] | None = None) -> None:
        self.directory = directory
        trusted = sorted((directory / TRUSTED).glob("*.pub"))
        self._keys = [read_public(path).key for path in trusted] if keys is None else keys

    def key(self) -> WitnessKey:
        """Its public key. Raises OSError, ValueError: its private key cannot be read."""
        public = self._private().public_key().public_bytes_raw()
        return WitnessKey(f"xray.witness/{hashlib.sha256(public).hexdigest()[:16]}", public)

    def cosign(self, old: int, proof: Sequence[bytes], checkpoint: LogCheckpoint) -> SignatureLine:
        try:
            checkpoint.require_signer(self._keys)
            path = self._path(checkpoint.origin)
            # A log may name any directory: an audit makes nothing there.
            if not (self.directory / PRIVATE).is_file():
                raise WitnessProblem(f"there is no witness in {self.directory}")
            with FileLock(self.directory / "witness.lock"):
                return self._cosign(path, old, proof, checkpoint)
        except WitnessProblem:
            raise
        except (OSError, ValueError) as error:
            raise WitnessProblem(f"{self.directory} cannot be used ({first_line(error)})") from None

    def _cosign(self, path: Path, old: int, proof: Sequence[bytes], checkpoint: LogCheckpoint) -> SignatureLine:
        known = LogCheckpoint.parse(read_bounded(path).decode()) if os.path.lexists(path) else None
        size, root = (known.size, known.root) if known is not None else (0, b"")
        if old != size:
            raise WitnessAhead(size)
        if not is_consistent(old, root, checkpoint.size, checkpoint.root, proof):
            raise LogContradicted(f"the log does not begin with the {size} entries that the witness knows")
        private = self._private()
        line = cosign(checkpoint, self.key().name, private)
        if known is None or known.size < checkpoint.size:
            write_atomic(path, f"{checkpoint}{line}")
        return line

    def _path(self, origin: str) -> Path:
        name = origin.rpartition("/")[2]
        if not name.isalnum():
            raise WitnessProblem(f"{origin!r} is not the origin of a log")
        return self.directory / f"{name}.checkpoint"

    def _private(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        path = self.directory / PRIVATE
        if not os.path.lexists(path):
            encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
            write_new(
                path, Ed25519PrivateKey.generate().private_bytes(encoding, form, serialization.NoEncryption()), 0o600
            )
        try:
            key = serialization.load_pem_private_key(read_bounded(path), None)
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"{path} is not an Ed25519 key")
        return key


class ServerWitness:
    """A witness at an address."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")

    def cosign(self, old: int, proof: Sequence[bytes], checkpoint: LogCheckpoint) -> SignatureLine:
        import httpx

        from xray_runtime.kernel.bounded_http import PLAIN, certificates, read

        content = request_text(old, proof, checkpoint)
        try:
            with (
                httpx.Client(verify=certificates(), timeout=TIMEOUT_S) as client,
                client.stream("POST", self._address + PATH, content=content, headers=PLAIN) as response,
            ):
                status, text = response.status_code, read(response, TIMEOUT_S).decode(errors="replace")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WitnessProblem(f"{self._address} does not answer ({type(error).__name__})") from None
        if status == 409 and re.fullmatch("[0-9]{1,18}", text.strip()):
            raise WitnessAhead(int(text))
        if status == 422:
            raise LogContradicted(" ".join(text.split())[:200])
        if status != 200:
            raise WitnessProblem(f"{self._address} answers {status} {' '.join(text.split())[:200]}")
        try:
            return parse_line(text)
        except SignatureProblem as problem:
            raise WitnessProblem(f"{self._address}: {problem}") from None


class KeptCheckpoint:
    """The copy of a checkpoint that a person kept."""

    def __init__(self, path: Path) -> None:
        try:
            self._kept = LogCheckpoint.parse(read_bounded(path).decode())
        except (OSError, ValueError) as error:
            raise WitnessProblem(f"{path}: {first_line(error)}") from None

    def cosign(self, old: int, proof: Sequence[bytes], checkpoint: LogCheckpoint) -> None:
        kept = self._kept
        if checkpoint.origin != kept.origin:
            raise LogContradicted(f"the log is {checkpoint.origin}, but the kept checkpoint is of {kept.origin}")
        if old != kept.size:
            raise WitnessAhead(kept.size)
        if not is_consistent(old, kept.root, checkpoint.size, checkpoint.root, proof):
            raise LogContradicted(f"the log does not begin with the {kept.size} entries of the kept checkpoint")


def is_server(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def open_witness(address: str, keys: Sequence[SSlibKey]) -> Witness:
    """The witness at an address (http:// or https://), in a directory, or in a person's file.

    Args:
        keys: those that may sign checkpoints; a server knows them by itself.

    Raises WitnessProblem: a person's file cannot be used.
    """
    if is_server(address):
        return ServerWitness(address)
    path = Path(address)
    return KeptCheckpoint(path) if path.is_file() else DirectoryWitness(path, keys)


def read_log_checkpoint(output: Path, name: str = END) -> LogCheckpoint:
    """The checkpoint of an output directory's log, unchecked. Raises WitnessProblem."""
    try:
        return LogCheckpoint.parse(read_bounded(output / name, MAX_BYTES).decode())
    except (OSError, ValueError) as error:
        raise WitnessProblem(f"{name} cannot be read ({first_line(error)})") from None


def present(
    witness: Witness, tree: MerkleTree, checkpoint: LogCheckpoint, known: int, *, is_new: bool = False
) -> SignatureLine | None:
    """Have a witness cosign the checkpoint of a log.

    Args:
        known: the size that it probably knows.
        is_new: whether the log may be new to it.

    Raises WitnessProblem: it knows another or a longer log, or none; or cannot be asked.
    """
    size = checkpoint.size
    if size > len(tree):
        raise WitnessProblem(f"its checkpoint is of {size} entries, and {len(tree)} can be read")
    for _ in range(2):
        try:
            return witness.cosign(known, tree.consistency(known, size), checkpoint)
        except WitnessAhead as ahead:
            known = ahead.size
        if known == 0 and not is_new:
            raise WitnessProblem(f"it has never cosigned {checkpoint.origin}")
        if known > size:
            raise LogContradicted(f"the log has {size} entries, and the witness knows {known}")
    raise WitnessProblem("another process has it cosign this log's checkpoints at the same time")


def cosign_log(
    output: Path,
    tree: MerkleTree,
    checkpoint: LogCheckpoint,
    witness: Witness,
    key: WitnessKey,
    *,
    is_new: bool = False,
) -> None:
    """Write `log.cosigned`. Raises WitnessProblem."""
    known = 0
    with contextlib.suppress(WitnessProblem):
        known = read_log_checkpoint(output, COSIGNED).size
    line = present(witness, tree, checkpoint, min(known, checkpoint.size), is_new=is_new)
    if line is None:
        raise WitnessProblem("a file cosigns nothing: name a directory or a server")
    try:
        key.require(checkpoint, line)
    except SignatureProblem as problem:
        raise WitnessProblem(str(problem)) from None
    try:
        write_atomic(output / COSIGNED, f"{checkpoint}{line}")
    except OSError as error:
        raise WitnessProblem(f"{COSIGNED} cannot be written ({error.strerror})") from None


def request_text(old: int, proof: Sequence[bytes], checkpoint: LogCheckpoint) -> str:
    """The body of a request to cosign."""
    hashes = "".join(f"{base64.b64encode(one).decode()}\n" for one in proof)
    return f"old {old}\n{hashes}\n{checkpoint}"


def read_request(text: str) -> tuple[int, list[bytes], LogCheckpoint]:
    """The arguments of `Witness.cosign`. Raises ValueError."""
    head, _, rest = text.partition("\n\n")
    old, *hashes = head.split("\n")
    word, _, size = old.partition(" ")
    if word != "old" or not size.isdecimal():
        raise ValueError("it must begin with the old size")
    return int(size), [base64.b64decode(one, validate=True) for one in hashes], LogCheckpoint.parse(rest)


def respond(witness: DirectoryWitness, body: bytes) -> tuple[int, str]:
    """(status, text) of the answer to a request."""
    try:
        request = read_request(body.decode())
    except (ValueError, SignatureProblem) as error:
        return 400, f"{first_line(error)}\n"
    try:
        return 200, str(witness.cosign(*request))
    except WitnessAhead as ahead:
        return 409, f"{ahead.size}\n"
    except WitnessProblem as problem:
        return 422 if isinstance(problem, LogContradicted) else 403, f"{problem}\n"
