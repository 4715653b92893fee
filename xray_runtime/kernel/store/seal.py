"""Seals: files that a run keeps and reads again are signed, so that planted or edited ones are not read.

A digest beside a file proves nothing: an intruder who can write one can write both. A seal is a signed statement
(`kernel.evidence.envelope`) by the output directory's key over the name, size and sha256 of a content.

    sft-1-ab12…/answers.json         a file
    sft-1-ab12…/answers.json.seal    its seal, for a file of this name in a directory of this name
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from xray_runtime.kernel.evidence.envelope import (
    EvidenceModel,
    InTotoRecord,
    TrustedKey,
    Verifier,
    load_public,
    new_private_key,
    public_half,
    read_envelope,
    read_record,
    sign,
)
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.identity import file_sha256

SEALED = ".seal"
MAX_SEAL_BYTES = 4096


class Kept(EvidenceModel):
    """A content that a run keeps; the statement's subject is its name."""

    size: int
    """Bytes."""


class KeptRecord(InTotoRecord[Kept]):
    predicate_type: Literal["urn:xray:kept:v1"] = Field(default="urn:xray:kept:v1", alias="predicateType")


class Seal:
    """Makes and checks seals.

    Args:
        private: PEM of the key that makes them; None: they are only checked.
        trusted: PEM of the keys whose seals count.
    """

    def __init__(self, private: bytes | None, trusted: Sequence[bytes]) -> None:
        self._private = private
        self._verifier = Verifier([TrustedKey(load_public(pem)) for pem in trusted])

    def sign(self, name: str, content: bytes) -> str:
        """The seal of a content under a name."""
        return self._sign(name, hashlib.sha256(content).hexdigest(), len(content))

    def holds(self, name: str, content: bytes, seal: object) -> bool:
        """Whether `seal` is by a trusted key, for this content under this name."""
        size, sha256 = self._read(name, str(seal).encode(errors="replace"))
        return size == len(content) and sha256 == hashlib.sha256(content).hexdigest()

    def seal_file(self, path: Path, written: Path | None = None) -> None:
        """Write the seal of the file `path`; until it is renamed, its content is in `written`."""
        content = written or path
        self.seal_content(path, file_sha256(content), content.stat().st_size)

    def seal_content(self, path: Path, sha256: str, size: int) -> None:
        """Write the seal of a file whose content, here or soon, has this digest and so many bytes."""
        write_atomic(_seal_path(path), self._sign(_name(path), sha256, size))

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

    def _sign(self, name: str, sha256: str, size: int) -> str:
        assert self._private is not None
        return sign(KeptRecord.of(Kept(size=size), {name: sha256}), self._private).decode()

    def _sealed(self, path: Path) -> tuple[int, str]:
        """(bytes, sha256) that a valid seal says a file has; (-1, "") without one."""
        try:
            return self._read(_name(path), read_bounded(_seal_path(path), MAX_SEAL_BYTES))
        except (OSError, ValueError):
            return -1, ""

    def _read(self, name: str, seal: bytes) -> tuple[int, str]:
        """(bytes, sha256) that a seal says the content of this name has; (-1, "") where no trusted key says so."""
        try:
            envelope = read_envelope(seal)
            self._verifier.check(envelope)
            record = read_record(envelope, KeptRecord)
        except ValueError:
            return -1, ""
        return record.predicate.size, record.files.get(name, "")


@functools.cache
def process_seal() -> Seal:
    """A seal of this process alone, for stages outside of a run: it trusts no file of another process."""
    private = new_private_key()
    return Seal(private, [public_half(private)])


def _seal_path(path: Path) -> Path:
    return path.with_name(path.name + SEALED)


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
