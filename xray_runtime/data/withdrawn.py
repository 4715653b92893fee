"""Texts that people withdrew, as salted hashes: data stages leave out the rows that have one of them.

    withdrawn/texts.json    {"salt": hex, "texts": [HMAC-SHA256 of a text, …]}; readable by its owner only

Texts of fewer than MIN_CHARS characters ("yes", "thank you") could be anybody's, and are not withdrawn from data.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from xray_runtime.data.pairs import Messages
from xray_runtime.kernel.files import write_atomic

FOLDER, TEXTS = "withdrawn", "texts.json"
"""Below the output directory."""
MIN_CHARS = 16


class WithdrawnTexts:
    """A set of texts that cannot be read from it."""

    def __init__(self, salt: str, hashes: Iterable[str]) -> None:
        self._salt, self._hashes = salt, set(hashes)

    @classmethod
    def read(cls, path: Path) -> WithdrawnTexts:
        """The file's texts; none without the file. Raises ValueError if it is damaged."""
        try:
            content = json.loads(path.read_bytes())
            return cls(str(content["salt"]), map(str, content["texts"]))
        except FileNotFoundError:
            return cls(secrets.token_hex(32), ())
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: is damaged, or not a file of withdrawn texts ({type(error).__name__})") from None

    def add(self, texts: Iterable[str]) -> None:
        """Add texts; short ones are left out."""
        self._hashes |= {self._hash(text) for text in texts if len(text.strip()) >= MIN_CHARS}

    def write(self, path: Path) -> None:
        """Write them for data stages to read."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path, json.dumps({"salt": self._salt, "texts": sorted(self._hashes)}, indent=1) + "\n", 0o600)

    def __contains__(self, text: str) -> bool:
        return bool(self._hashes) and len(text.strip()) >= MIN_CHARS and self._hash(text) in self._hashes

    def touches(self, prompt: Messages, *replies: str) -> bool:
        """Whether a message of the prompt, its reasoning, or a reply was withdrawn."""
        texts = [text for m in prompt for text in (m["content"], m.get("reasoning_content", ""))]
        return any(text in self for text in (*texts, *replies))

    def _hash(self, text: str) -> str:
        key = self._salt.encode()
        return hmac.new(key, text.strip().encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
