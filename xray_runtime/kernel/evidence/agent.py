"""Signatures by an SSH agent: it holds the private key, and the processes that ask it cannot read that.

The agent (ssh-agent, gpg-agent, one for a hardware token, which ssh-agent also loads by PKCS#11) listens at
SSH_AUTH_SOCK. Two requests of https://datatracker.ietf.org/doc/draft-ietf-sshm-ssh-agent are enough: the list of its
keys, and a signature.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import socket
import struct
import time

from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import Key, SecretsHandler, Signature, Signer, SSlibKey

LOGGER = logging.getLogger(__name__)
SOCKET_VARIABLE = "SSH_AUTH_SOCK"
LIST, KEYS, SIGN, SIGNED = 11, 12, 13, 14
"""Types of messages: the first of two asks, the second answers."""
MAX_BYTES = 2**18
TIMEOUT_S = 30.0
"""For an answer: a person may have to confirm it."""
WAIT_S = 60.0
"""How long an agent that died or refuses is asked again."""
MAX_PAUSE_S = 8.0


class AgentError(OSError):
    """The agent does not sign. It may later, so a stage is attempted again."""


class AgentSigner(Signer):
    """Signs with an elliptic-curve key that an agent holds. It verifies what the agent answers."""

    def __init__(self, key: SSlibKey) -> None:
        self._key = key
        public = load_pem_public_key(str(key.keyval["public"]).encode())
        self._name, encoded = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()
        self._blob = base64.b64decode(encoded)

    @property
    def public_key(self) -> SSlibKey:
        return self._key

    @classmethod
    def from_priv_key_uri(
        cls, priv_key_uri: str, public_key: Key, secrets_handler: SecretsHandler | None = None
    ) -> AgentSigner:
        raise NotImplementedError

    def require(self) -> None:
        """Raises AgentError unless the agent has the key."""
        answer = io.BytesIO(_ask(LIST, b"", KEYS))
        try:
            [count] = struct.unpack(">I", answer.read(4))
            # Each key has a comment behind it.
            held = [(_read(answer), _read(answer))[0] for _ in range(count)]
        except struct.error:
            raise AgentError(f"{_place()} answers with what is no list of keys") from None
        if self._blob not in held:
            raise AgentError(f"{_place()} does not have the key {self._key.keyid[:12]}: `ssh-add` it")

    def sign(self, payload: bytes) -> Signature:
        """Raises AgentError: the agent does not sign for a minute."""
        deadline, pause = time.monotonic() + WAIT_S, 1.0
        while True:
            try:
                return self._sign(payload)
            except AgentError as problem:
                if time.monotonic() + pause > deadline:
                    raise
                if pause == 1.0:
                    LOGGER.error("%s; it is asked again for %.0f s", problem, WAIT_S)
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    def _sign(self, payload: bytes) -> Signature:
        answer = _ask(SIGN, _string(self._blob) + _string(payload) + bytes(4), SIGNED)
        try:
            inner = io.BytesIO(_read(io.BytesIO(answer)))
            name, numbers = _read(inner), io.BytesIO(_read(inner))
            r, s = (int.from_bytes(_read(numbers)) for _ in range(2))
            signature = Signature(self._key.keyid, encode_dss_signature(r, s).hex())
            self._key.verify_signature(signature, payload)
        except (struct.error, UnverifiedSignatureError):
            raise AgentError(f"{_place()} answers with what is no signature by {self._key.keyid[:12]}") from None
        assert name == self._name
        return signature


def _ask(kind: int, content: bytes, expected: int) -> bytes:
    """The content of an agent's answer to a message. Raises AgentError."""
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        raise AgentError(f"{SOCKET_VARIABLE} is not set: no SSH agent can sign")
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(path)
            connection.sendall(_string(bytes([kind]) + content))
            with connection.makefile("rb") as stream:
                answer = _read(stream)
    except (OSError, struct.error) as error:
        reason = (error.strerror or "no answer") if isinstance(error, OSError) else "it closed the connection"
        raise AgentError(f"{_place()} does not answer ({reason})") from None
    if answer[:1] != bytes([expected]):
        raise AgentError(f"{_place()} refuses: it is locked, lacks the key, or a person said no")
    return answer[1:]


def _place() -> str:
    return f"the SSH agent at {os.environ.get(SOCKET_VARIABLE)}"


def _string(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def _read(stream: io.BufferedIOBase) -> bytes:
    """A string, as the protocol writes one. Raises struct.error where it is cut short, or too long."""
    [size] = struct.unpack(">I", stream.read(4))
    content = stream.read(min(size, MAX_BYTES))
    if len(content) < size:
        raise struct.error
    return content
