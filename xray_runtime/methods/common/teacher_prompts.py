"""A teacher reads what its student reads: the same vocabulary, and the same tokens of each prompt.

A template that is one token off costs more nats than most students are from their teachers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from xray_runtime.data.pairs import Messages
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.data.tokenizing import encode_prompts
from xray_runtime.models.causal_lm import load_tokenizer

MOST_WHOLE = 8192
"""Tokens of the largest vocabulary that is compared whole."""


class TeacherPrompts:
    """The check of one teacher.

    Args:
        where: its name in errors.
        tokenizer: the student's.

    Raises:
        ValueError: it has another vocabulary; one line.
    """

    def __init__(self, where: str, teacher: Path, tokenizer: Tokenizer) -> None:
        self._where, self._tokenizer = where, load_tokenizer(teacher)
        if self._tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"{where}: its tokenizer is not allowed: its vocabulary of {len(self._tokenizer):,} tokens is not the "
                f"policy's of {len(tokenizer):,}, whose tokens it would score"
            )
        self.same_template = self._tokenizer.chat_template == tokenizer.chat_template

    def check(self, prompts: Iterable[tuple[Messages, list[int]]]) -> None:
        """Raises ValueError if it reads one of the prompts, messages with the student's tokens, as other tokens."""
        if self.same_template:
            return
        given = list(prompts)
        found = encode_prompts(self._tokenizer, [messages for messages, _ in given])
        for (messages, own), its in zip(given, found, strict=True):
            if list(own) != list(its):
                at = next(
                    (i for i, (a, b) in enumerate(zip(own, its, strict=False)) if a != b), min(map(len, (own, its)))
                )
                raise ValueError(
                    f"{self._where}: its chat template is not allowed: it reads the prompt "
                    f"{str(messages[-1]['content'])[:40]!r} as other tokens than the policy from token {at} on; give "
                    "both the same template"
                )


def compared_tokens(stage: str, policy: Path, beta: float | None, top_k: int | None) -> tuple[int, int]:
    """(how many of the teacher's likeliest tokens are compared, tokens that the policy scores). Raises ValueError: too
    many."""
    content = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    count = int(content.get("text_config", content)["vocab_size"])
    if beta is not None and top_k is None and count > MOST_WHOLE:
        raise ValueError(
            f"{stage}: top_k = None must be a number with a vocabulary of {count:,} tokens: the whole one is sent for "
            f"each token, so at most {MOST_WHOLE:,} are allowed"
        )
    return 0 if beta is None else min(top_k or count, count), count
