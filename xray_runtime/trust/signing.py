"""The private key of an output directory: where it is, who may use it, and its public half."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import (
    TrustedKey,
    load_public,
    load_signer,
    names_agent_key,
    new_private_key,
    public_half,
)
from xray_runtime.kernel.store.checkpoints import read_bounded

KEY_VARIABLE = "XRAY_SIGNING_KEY"
PRIVATE, PUBLIC = "signing.pem", "signing.pub"
NO_KEY = "must be an ECDSA key: a private one without a passphrase, or the public half of one that an SSH agent holds"


def signing_key(output: Path) -> Path:
    """The file of the private key: XRAY_SIGNING_KEY, or `output/keys/signing.pem`, made on first use.

    XRAY_SIGNING_KEY may also name a public key, whose private half an SSH agent holds.

    Its public half is kept as `output/keys/signing.pub`, which is enough to check signatures.

    Raises:
        ConfigError: XRAY_SIGNING_KEY is not an elliptic-curve key, or not this directory's, or missing
            where that is kept elsewhere; or users other than its owner can read or replace the key.
    """
    keys = output / "keys"
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    given = os.environ.get(KEY_VARIABLE)
    private = Path(given) if given else keys / PRIVATE
    if not given and not os.path.lexists(private):
        if (keys / PUBLIC).exists():
            raise ConfigError(f"{KEY_VARIABLE}: must name the key {keys / PUBLIC} belongs to, which is kept elsewhere")
        make_key(private)
    exposed = exposed_keys(output, Path(given) if given else None)
    if exposed:
        raise ConfigError(exposed[0])
    public = keys / PUBLIC
    content = public_bytes(private)
    if not public.exists():
        write_new(public, content, 0o644)
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
    paths = [private.parent, private] if os.path.lexists(private) else []
    if given is not None:
        # Everybody may read the public half of a key that an agent holds.
        paths = [] if held_by_agent(given) else [given]
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


def held_by_agent(private: Path) -> bool:
    """Whether the file of a key has its public half alone."""
    try:
        return names_agent_key(private.read_bytes())
    except OSError:
        return False


def require_agent(private: Path) -> Path:
    """The file of a key. Raises ConfigError where an SSH agent should hold the key and does not."""
    try:
        if held_by_agent(private):
            signer: Any = load_signer(private.read_bytes())
            signer.require()
    except OSError as error:
        raise ConfigError(f"{private}: {error}") from None
    return private


def require_signer() -> None:
    """Raises ConfigError where XRAY_SIGNING_KEY names what cannot sign: no such key, or one that an SSH agent lacks."""
    if given := os.environ.get(KEY_VARIABLE):
        public_bytes(Path(given))
        require_agent(Path(given))


def public_key(output: Path) -> Path:
    """The path of the public key of an output directory."""
    return output / "keys" / PUBLIC


def read_public(path: Path) -> TrustedKey:
    """The public key in a file. Raises ValueError where it is none that can be used, OSError as `read_bounded`."""
    try:
        return TrustedKey(load_public(read_bounded(path)), path=path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def make_key(private: Path) -> None:
    """Write a new private key, readable by its owner only, unless there is one."""
    write_new(private, new_private_key(), 0o600)


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a whole new file, or leave the one another process wrote in the meantime."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def public_bytes(private: Path, field: str = KEY_VARIABLE) -> bytes:
    """The public half of a key, in PEM. Raises ConfigError where it cannot be used; `field` names it."""
    try:
        return public_half(private.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else NO_KEY
        raise ConfigError(f"{field}: {str(private)!r} cannot be used: {reason}") from None
