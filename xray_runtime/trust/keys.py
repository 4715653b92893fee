"""Which keys are trusted and until when; and how one key replaces another.

    keys/signing.pem, signing.pub     the key that signs today
    keys/retired/DIGEST.pub           one that signed before, by the first digits of its sha256
    keys/retired/DIGEST.json          which key replaced it, and when: a statement that both keys signed
    keys/trusted/*.pub                keys that a person trusts (`xray keys trust`, `xray import --public-key`)

Both keys sign the record, so a copy of either leads to the other. Trust goes back from a trusted key to those it
replaced, and forward only from a key that was given: a thief of a retired key cannot name a new one. What is to be
verified (a bundle, another output directory, a shared store) brings keys along, and none of them is trusted for that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import (
    InTotoRecord,
    SignatureProblem,
    TrustedKey,
    Verifier,
    load_public,
    read_envelope,
    read_record,
    require_signers,
    sign,
)
from xray_runtime.kernel.evidence.log import LOG, LogTail
from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.manifest import Sha256
from xray_runtime.kernel.store.seal import Seal
from xray_runtime.kernel.store.shared import SharedStore
from xray_runtime.trust.log import decide
from xray_runtime.trust.signing import (
    KEY_VARIABLE,
    PRIVATE,
    make_key,
    public_bytes,
    public_key,
    read_public,
    require_agent,
    signing_key,
)

RETIRED, TRUSTED = "retired", "trusted"
NEXT = "signing.next.pem"
DIGITS = 16
KEEP_EVERY = 500
"""New entries of the log after which its state is kept: reading and checking so many takes a quarter of a second."""


class Rotation(BaseModel):
    """One key replaced another."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    retired: Sha256
    successor: Sha256
    at: datetime
    by: str
    note: str


class _RotationRecord(InTotoRecord[Rotation]):
    predicate_type: Literal["urn:xray:rotation:v1"] = Field(default="urn:xray:rotation:v1", alias="predicateType")


def rotate(output: Path, *, by: str, note: str, new_key: Path | None = None) -> Rotation:
    """A new key signs from now on; earlier signatures stay valid. After a crash, the same call finishes it.

    Args:
        new_key: file of the new key, as of XRAY_SIGNING_KEY, for keys kept outside; made if it does not exist. By
            default it replaces `keys/signing.pem`. The old private key in `keys/` is removed either way.

    Raises:
        ConfigError: the present key, or `new_key`, cannot be used.
    """
    keys = output / "keys"
    if new_key is None and os.environ.get(KEY_VARIABLE):
        raise ConfigError(f"--new-key: is required where {KEY_VARIABLE} names the key that signs")
    private = new_key or keys / NEXT
    new = public_bytes(private, KEY_VARIABLE if new_key is None else "--new-key") if private.exists() else None
    taken_over = public_key(output).exists() and new == public_key(output).read_bytes()
    if taken_over and new_key is not None:
        raise ConfigError(f"--new-key: {str(new_key)!r} already is the signing key")
    if not taken_over:
        old = require_agent(signing_key(output))
        if not private.exists():
            make_key(private)
        require_agent(private)
        _record(output, old, private, by, note)
        write_atomic(public_key(output), public_bytes(private))
    if new_key is None:
        os.replace(private, keys / PRIVATE)
        private = keys / PRIVATE
    else:
        (keys / PRIVATE).unlink(missing_ok=True)
    successor = read_public(public_key(output)).sha256
    rotation = next(rotation for rotation in read_rotations(output)[0] if rotation.successor == successor)
    decide(output, private=private, action="rotate", checkpoint=successor, by=by, note=note)
    return rotation


def trusted_keys(output: Path, public: Path | Sequence[Path] | None = None) -> list[TrustedKey]:
    """Every key that is trusted in an output directory, and until when.

    Args:
        public: copies of keys kept elsewhere, trusted instead of those in `keys/`.

    Raises ValueError or OSError where a public key cannot be used.
    """
    given = [public] if isinstance(public, Path) else public
    roots = {key.sha256: key for key in map(read_public, given or root_keys(output))}
    rotations = read_rotations(output, roots)[0]
    keys = _known(output) | roots
    successor = {rotation.retired: rotation.successor for rotation in rotations}
    reached = set(roots)
    for root in roots:
        while (root := successor.get(root, "")) and root not in reached:
            reached.add(root)
    reached |= _replaced_by(reached, rotations)
    until = {rotation.retired: rotation.at for rotation in rotations}
    return [replace(keys[sha], until=until.get(sha)) for sha in sorted(reached)]


def trusted_view(output: Path) -> LogView:
    """The state that the log describes up to the first entry that is not sound; empty without a trusted key.

    `kernel.evidence.log.view` reads what an intruder may have appended as well: it is for pages and for an audit.
    """
    try:
        return _tail(output, tuple(trusted_keys(output))).view()
    except (OSError, ValueError):
        return LogView()


def sound_view(output: Path, public: Path | None = None) -> LogView:
    """The state that the log describes. Raises ValueError unless every entry is sound; OSError or ValueError: a key
    cannot be used."""
    return _tail(output, tuple(trusted_keys(output, public))).sound_view()


def keep_log_state(output: Path) -> None:
    """Keep the state of a log that has become long, so that other processes need not read all of it."""
    with contextlib.suppress(OSError, ValueError):
        _tail(output, tuple(trusted_keys(output))).keep(signing_key(output).read_bytes(), KEEP_EVERY)


@functools.lru_cache(maxsize=4)
def _tail(output: Path, keys: tuple[TrustedKey, ...]) -> LogTail:
    return LogTail(output / LOG, Verifier(keys))


def _replaced_by(keys: Iterable[str], rotations: Sequence[Rotation]) -> set[str]:
    """The keys that these replaced, and those that were replaced before."""
    found, before = set(keys), -1
    while before != len(found):
        before = len(found)
        found |= {rotation.retired for rotation in rotations if rotation.successor in found}
    return found - set(keys)


def seal_of(output: Path) -> Seal:
    """Seals and checks the files that runs of an output directory keep; seals of retired keys do not count."""
    # The first call makes the keys.
    private = signing_key(output).read_bytes()
    return Seal(private, [key.pem for key in trusted_keys(output) if key.until is None])


def root_keys(output: Path) -> list[Path]:
    """The public key of an output directory, and those that a person trusts in it."""
    others = output / "keys" / TRUSTED
    imported = [] if others.is_symlink() else sorted(others.glob("*.pub"))
    own_key = public_key(output)
    return imported if imported and not own_key.exists() else [own_key, *imported]


def known_keys(output: Path) -> list[Path]:
    """The public keys that an output directory trusts: its own, and those that a person named."""
    # The first call makes its own.
    signing_key(output)
    return root_keys(output)


def read_rotations(
    output: Path, more: Mapping[str, TrustedKey] | None = None
) -> tuple[list[Rotation], list[tuple[str, str]]]:
    """(rotations that both keys signed, (file, reason) of other records); `more`: further public keys by digest."""
    known, found, problems = _known(output) | dict(more or {}), [], []
    for name in sorted({path.name.split(".")[0] for path in retirement_files(output)}):
        path = output / "keys" / RETIRED / f"{name}.json"
        try:
            envelope = read_envelope(read_bounded(path))
            rotation = read_record(envelope, _RotationRecord).predicate
            if not rotation.retired.startswith(name) or rotation.at.tzinfo is None:
                raise ValueError("it concerns another key, or has no time")
            if missing := {rotation.retired, rotation.successor} - known.keys():
                raise ValueError(f"the public key {min(missing)[:12]} is missing")
            require_signers(envelope, [known[sha].key for sha in (rotation.retired, rotation.successor)])
        except (OSError, ValueError) as error:
            reason = str(error) if isinstance(error, SignatureProblem) else type(error).__name__
            problems.append((f"keys/{RETIRED}/{path.name}", reason))
        else:
            found.append(rotation)
    return found, problems


def retirement_files(output: Path) -> list[Path]:
    """Records and public halves of retired keys."""
    folder = output / "keys" / RETIRED
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())


def adopt(output: Path, public: Iterable[Path], source: Path) -> None:
    """Trust public keys in `output` that a person named.

    Args:
        source: an output directory, whose records of keys that these (or trusted ones) replaced are kept too.
    """
    # mkdir(parents=True) would ignore the mode.
    (output / "keys").mkdir(mode=0o700, parents=True, exist_ok=True)
    own_digest = read_public(public_key(output)).sha256 if public_key(output).exists() else ""
    for path in public:
        if (sha256 := read_public(path).sha256) != own_digest:
            _keep(output / "keys" / TRUSTED / f"{sha256[:DIGITS]}.pub", path)
    roots = _readable(root_keys(output))
    replaced = {sha256[:DIGITS] for sha256 in _replaced_by(roots, read_rotations(source, roots)[0])}
    for path in retirement_files(source):
        if path.name.split(".")[0] in replaced:
            _keep(output / "keys" / RETIRED / path.name, path)


def trust(output: Path, public: Path) -> str:
    """Trust a public key in `output`, as a person says; returns its digest. Raises ConfigError where it is none."""
    try:
        sha256 = read_public(public).sha256
    except (OSError, ValueError) as error:
        raise ConfigError(f"KEY: {str(public)!r} is not allowed: {first_line(error)}") from None
    signing_key(output)
    adopt(output, [public], output)
    return sha256


def _keep(target: Path, path: Path) -> None:
    target.parent.mkdir(mode=0o700, exist_ok=True)
    if not target.exists():
        target.write_bytes(read_bounded(path))


def exchange_keys(output: Path, shared: SharedStore | None) -> None:
    """Copy the public keys of `output` to the shared store, and from there the records of keys that trusted ones
    replaced. Whoever writes to the store can put keys there: none is trusted for that."""
    if shared is None:
        return
    for path in [*root_keys(output), *retirement_files(output)]:
        folder = RETIRED if path.parent.name == RETIRED else TRUSTED
        name = path.name if folder == RETIRED else f"{read_public(path).sha256[:DIGITS]}.pub"
        if shared.read(f"keys/{folder}/{name}") is None:
            shared.write(f"keys/{folder}/{name}", read_bounded(path))
    with tempfile.TemporaryDirectory() as temporary:
        there = Path(temporary) / "keys" / RETIRED
        there.mkdir(parents=True)
        for name in shared.names(f"keys/{RETIRED}"):
            (there / name).write_bytes(shared.read(f"keys/{RETIRED}/{name}") or b"")
        adopt(output, [], Path(temporary))


def _known(output: Path) -> dict[str, TrustedKey]:
    """Digest → every public key that lies in `keys/`, trusted or not."""
    retired = [path for path in retirement_files(output) if path.suffix == ".pub"]
    return _readable([*retired, *root_keys(output)])


def _readable(paths: Iterable[Path]) -> dict[str, TrustedKey]:
    found = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            key = read_public(path)
            found[key.sha256] = key
    return found


def _record(output: Path, old: Path, new: Path, by: str, note: str) -> None:
    """Write which key replaced which, signed by both."""
    folder = output / "keys" / RETIRED
    folder.mkdir(mode=0o700, exist_ok=True)
    retired, successor = read_public(public_key(output)), load_public(public_bytes(new)).keyid
    name = retired.sha256[:DIGITS]
    write_atomic(folder / f"{name}.pub", read_bounded(public_key(output)))
    now = datetime.now(UTC).replace(microsecond=0)
    rotation = Rotation(retired=retired.sha256, successor=successor, at=now, by=by, note=note)
    record = _RotationRecord.of(rotation, {"signing.pub": successor})
    write_atomic(folder / f"{name}.json", sign(record, old.read_bytes(), new.read_bytes()))
