"""The files of what `xray serve --record` keeps: segments of rows, and the keys of people's texts.

    recorded/00000001.parquet    a segment: one row for each answer and each feedback
    recorded/chain.jsonl         the signed digest of each segment (`kernel.history.recorded`)
    recorded/keys/pseudonyms     makes pseudonyms of users
    recorded/keys/PSEUDONYM      encrypts the texts of one user

Texts are encrypted (AES-256-GCM) with a key for each user: once the key is deleted nobody can read them, while the
bytes of the segments, and so their signatures, stay as they are. Segments hold no user's name, only the pseudonym:
HMAC-SHA256 of the name with a key of this store.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pyarrow import parquet

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.files import sync, write_atomic

RECORDED = "recorded"
"""Directory below the output directory."""
KEYS, PSEUDONYMS = "keys", "pseudonyms"
DIGITS, ID_DIGITS = 8, 32
KEY_BYTES, NONCE_BYTES = 32, 12
TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "bytes": pa.binary()}


@dataclass(frozen=True)
class RecordedRow:
    """One answer, or one feedback about an answer."""

    kind: Literal["answer", "feedback"]
    id: str
    answer: str
    """`id` of the answer that a feedback is about; an answer's own."""
    at_ms: int
    """Milliseconds since 1970."""
    user: str
    """Pseudonym."""
    application: str
    """Name of the application that may judge the answer, or has; empty: each may."""
    model: str
    """sha256 of the model that answered."""
    route: str
    streamed: bool
    complete: bool
    """False: the client left, or the engine failed, before the answer's end."""
    latency_s: float
    """Seconds to the end of the answer."""
    first_s: float
    """Seconds to its first bytes."""
    prompt_tokens: int
    reply_tokens: int
    texts: bytes
    """Encrypted; see `UserKeys`."""
    canary: str = ""
    """sha256 of the candidate whose canary assigned this request at random; empty: none did."""


def feedback_row(id: str, answer: str, user: str, application: str, model: str, texts: bytes) -> RecordedRow:
    """The row of a feedback that comes now; the arguments are fields of a `RecordedRow`."""
    return RecordedRow(
        kind="feedback",
        id=id,
        answer=answer,
        at_ms=time.time_ns() // 1_000_000,
        user=user,
        application=application,
        model=model,
        route="/v1/feedback",
        streamed=False,
        complete=True,
        latency_s=0.0,
        first_s=0.0,
        prompt_tokens=0,
        reply_tokens=0,
        texts=texts,
    )


SCHEMA = pa.schema(pa.field(f.name, TYPES.get(str(f.type), pa.string()), nullable=False) for f in fields(RecordedRow))


def segment_name(number: int) -> str:
    """File name of a segment; the first is number 1."""
    return f"{number:0{DIGITS}d}.parquet"


def segment_bytes(number: int, rows: Iterable[RecordedRow], about: dict[str, str]) -> bytes:
    """A segment's file, with further metadata. Equal rows give equal bytes."""
    columns = [asdict(row) for row in rows]
    table = pa.Table.from_pylist(columns, schema=SCHEMA.with_metadata({"segment": str(number), **about}))
    out = pa.BufferOutputStream()
    parquet.write_table(table, out, compression="zstd")
    return bytes(out.getvalue())


def read_segment(path: Path, columns: list[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a segment. Raises ValueError if it is damaged, or is not the one its name says."""
    try:
        table = parquet.read_table(path, columns=columns, partitioning=None)
        number = int((table.schema.metadata or {})[b"segment"])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(f"{path}: damaged, or not a segment of recorded answers ({reason})") from error
    if segment_name(number) != path.name:
        raise ValueError(f"{path}: is segment {number} under another name")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


class UserKeys:
    """Pseudonyms of users, and the keys of their texts, in `recorded/keys`; if `writable`, missing keys are made."""

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self._directory, self._writable = directory, writable
        self._known: dict[str, bytes] = {}

    def pseudonym(self, user: str) -> str:
        """A user's pseudonym. Raises OSError if the key that makes them is missing and cannot be made."""
        return self.digest(user)[:ID_DIGITS]

    def digest(self, text: str) -> str:
        """HMAC-SHA256 of a text, which only holders of this store's key can compute."""
        return hmac.new(self._key(PSEUDONYMS), text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()

    def feedback_id(self, application: str, user: str, answer: str, signals: dict[str, Any]) -> str:
        """The id of a feedback: the same for the same feedback sent again."""
        return self.digest(json.dumps([application, user, answer, signals], sort_keys=True))[:ID_DIGITS]

    def encrypt(self, user: str, texts: dict[str, Any], about: str, also: str | None = None) -> bytes:
        """`texts` that only the key of the pseudonym `user` can read; nonce and ciphertext.

        Args:
            about: bound to the ciphertext: it cannot be moved to another row.
            also: another pseudonym whose key is needed too: the person who was answered, in what others say of it.
        """
        if also not in (None, user):
            texts = {"of": also, "sealed": self.encrypt(str(also), texts, about).hex()}
        nonce = secrets.token_bytes(NONCE_BYTES)
        plain = zlib.compress(json.dumps(texts, ensure_ascii=False).encode("utf-8", "surrogatepass"), 1)
        return nonce + AESGCM(self._key(user)).encrypt(nonce, plain, about.encode())

    def decrypt(self, user: str, content: bytes, about: str) -> dict[str, Any] | None:
        """The texts; None if the user's key was deleted, or is another. Raises ValueError if they are damaged."""
        try:
            plain = AESGCM(self._key(user)).decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], about.encode())
        except (FileNotFoundError, InvalidTag):
            return None
        texts: dict[str, Any] = json.loads(zlib.decompress(plain).decode("utf-8", "surrogatepass"))
        if texts.keys() == {"of", "sealed"}:
            return self.decrypt(texts["of"], bytes.fromhex(texts["sealed"]), about)
        return texts

    def _key(self, name: str) -> bytes:
        path = self._directory / name
        # A user who withdrew, and whose key was deleted, gets a new one.
        if self._writable and not path.exists():
            self._known.pop(name, None)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, secrets.token_bytes(KEY_BYTES), 0o600)
            sync(path.parent)
        if name not in self._known:
            self._known[name] = path.read_bytes()
        return self._known[name]


def about(kind: str, id: str, model: str) -> str:
    """The text that `UserKeys.encrypt` binds a row's ciphertext to."""
    return f"{kind}:{id}:{model}"
