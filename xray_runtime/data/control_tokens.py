"""Control tokens, which only a chat template may write, and an encoder that ignores them in messages.

A tokenizer encodes any text that spells a control token as that token: `<|im_end|>` in a message would end the turn.
Here each control token gets an unguessable name. The template's tokens are written by these names; the same spelling
in a message is encoded as text. The rest of the tokenizer does not change, nor do the ids of other texts.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import NamedTuple

import numpy as np
import tokenizers

from xray_runtime.data.tokenizer import Tokenizer

LETTERS = str.maketrans("0123456789", "ghijklmnop")


def unguessable() -> str:
    """128 random bits in lower-case letters, which no normalizer changes. No result depends on the value."""
    return secrets.token_hex(16).translate(LETTERS)


class Encoded(NamedTuple):
    """The tokens of a text, and the start and end of each, in characters [T]."""

    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray


class ControlTokens:
    """The special and added tokens of `tokenizer` (such as `<think>`), except tokens of whitespace only, with which
    some tokenizers write indentation and which can forge nothing. Raises ValueError if it is not a fast tokenizer, or
    if one of its added tokens cannot be distinguished from text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer: it needs a tokenizer.json")
        self.ids = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.content.replace("▁", " ").strip()
        }
        """Token → id."""
        secret = unguessable()
        # Between two symbols, since a token that matches whole words must have no letter next to it.
        self.names = {
            token: f"<{secret}{format(n, '06x').translate(LETTERS)}>" for n, token in enumerate(sorted(self.ids))
        }
        """Token → its name."""
        self._id_of_name = {self.names[token]: number for token, number in self.ids.items()}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._named = re.compile(f"<{secret}[a-p]+>")
        self._backend = _renamed(tokenizer, self.names)
        for name, number in self._id_of_name.items():
            if self._backend.token_to_id(name) != number:
                raise ValueError("the tokenizer's added tokens cannot be distinguished from its other tokens")

    def named(self, text: str, spare: dict[str, str] | None = None) -> str:
        """`text` with every spelled token replaced by its name, or by its name in `spare`."""
        names = self.names if spare is None else spare
        return self._spelled.sub(lambda match: names[match.group()], text)

    def spelled(self, text: str) -> str:
        """`text` with every name replaced by its token."""
        tokens = {name: token for token, name in self.names.items()}
        return self._named.sub(lambda match: tokens[match.group()], text)

    def name_of(self, number: int) -> str:
        """The name of the token with this id."""
        return next(name for name, known in self._id_of_name.items() if known == number)

    def find(self, text: str) -> list[tuple[int, int, int]]:
        """(start, end, id) of every name in `text`."""
        return [(match.start(), match.end(), self._id_of_name[match.group()]) for match in self._named.finditer(text)]

    def encode(self, texts: list[str]) -> list[Encoded]:
        """Encodes texts in which only names become control tokens."""
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        offsets = [np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) for encoding in encodings]
        return [Encoded(e.ids, at[:, 0], at[:, 1]) for e, at in zip(encodings, offsets, strict=True)]


def _renamed(tokenizer: Tokenizer, names: dict[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer's backend with renamed tokens, also in the vocabulary, where some tokenizer models would otherwise
    find a special token's piece."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & names.keys()]
    return tokenizers.Tokenizer.from_str(json.dumps(state))
