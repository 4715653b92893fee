"""The tokens that only a chat template may write, and an encoder that finds them nowhere else.

A tokenizer makes the token out of every text that spells it: whoever writes `<|im_end|>` in a message has ended the
turn. Here each such token gets a name that nobody can guess. What the template wrote is given by those names; whatever
a person or a model spells is text like any other. All the rest of the tokenizer stays as it is, and so do the ids of
a text that spells none of them.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

LETTERS = str.maketrans("0123456789", "ghijklmnop")


def unguessable() -> str:
    """128 random bits in lower-case letters, which no normalizer changes. Nothing depends on which."""
    return secrets.token_hex(16).translate(LETTERS)


class Encoded(NamedTuple):
    """The tokens of a text, and where in it each begins and ends, in characters [T]."""

    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray


class ControlTokens:
    """The special tokens of `tokenizer`, and others that were added to it (`<think>`); not those of whitespace alone,
    which are how some tokenizers write indentation, and can forge nothing.

    Raises:
        ValueError: it is no fast tokenizer, or one of its tokens cannot be told from text.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer: it needs a tokenizer.json")
        self.ids = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.content.replace("▁", " ").strip()
        }
        """Token → id."""
        secret = unguessable()
        # Between two signs: a token that must stand alone still finds no letter beside it.
        self.names = {token: f"<{secret}{_letters(n)}>" for n, token in enumerate(sorted(self.ids))}
        """Token → its name."""
        self._id_of_name = {self.names[token]: number for token, number in self.ids.items()}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._named = re.compile(f"<{secret}[a-p]+>")
        self._backend = _renamed(tokenizer, self.names)
        for name, number in self._id_of_name.items():
            if self._backend.token_to_id(name) != number:
                raise ValueError("the tokenizer's added tokens cannot be told from its other ones")

    def named(self, text: str, spare: dict[str, str] | None = None) -> str:
        """`text` with every token that it spells under its name, or under that in `spare`."""
        names = self.names if spare is None else spare
        return self._spelled.sub(lambda found: names[found.group()], text)

    def name_of(self, number: int) -> str:
        """The name of the token with this id."""
        return next(name for name, own in self._id_of_name.items() if own == number)

    def find(self, text: str) -> list[tuple[int, int, int]]:
        """(start, end, id) of every name in `text`."""
        return [(found.start(), found.end(), self._id_of_name[found.group()]) for found in self._named.finditer(text)]

    def encode(self, texts: list[str]) -> list[Encoded]:
        """Tokens of texts in which names, and nothing else, are these tokens."""
        found = self._backend.encode_batch(texts, add_special_tokens=False)
        offsets = [np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) for encoding in found]
        return [Encoded(e.ids, at[:, 0], at[:, 1]) for e, at in zip(found, offsets, strict=True)]


def _letters(number: int) -> str:
    return f"{number:06x}".translate(LETTERS)


def _renamed(tokenizer: Any, names: dict[str, str]) -> Tokenizer:
    """The tokenizer's backend with the tokens under other names, also in the vocabulary: some models would find a
    special token's piece there by themselves."""
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
    return Tokenizer.from_str(json.dumps(state))
