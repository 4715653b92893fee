"""A teacher reads what its student reads: the same tokens of each prompt, or, where it may have another vocabulary, the
same messages and texts.

A template that is one token off costs more nats than most students are from their teachers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from xray_runtime.data.aligned_tokens import Aligned, aligned
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import Messages
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.data.tokenizing import decode_replies, encode_prompts
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards.reward_reader import replies_to

MOST_WHOLE = 8192
"""Tokens of the largest vocabulary that is compared whole."""
MOST_UNREAD = 16
"""From so many replies on, of which it read none, a teacher of another vocabulary is refused. Fewer say little: a reply
may be cut within a character."""


class TeacherPrompts:
    """The check of one teacher.

    Args:
        where: its name in errors.
        tokenizer: the student's.
        reads_texts: another vocabulary is allowed (`rows`).

    Raises:
        ValueError: it has another vocabulary; one line.
    """

    def __init__(self, where: str, teacher: Path, tokenizer: Tokenizer, *, reads_texts: bool = False) -> None:
        self._where, self._tokenizer, self._own = where, load_tokenizer(teacher), tokenizer
        self._unread = 0
        """Replies since the last that it read."""
        self.has_other_tokens = self._tokenizer.get_vocab() != tokenizer.get_vocab()
        if self.has_other_tokens and not reads_texts:
            raise ValueError(
                f"{where}: its tokenizer is not allowed: its vocabulary of {len(self._tokenizer):,} tokens is not the "
                f"policy's of {len(tokenizer):,}, whose tokens it would score"
            )
        has_other_template = self._tokenizer.chat_template != tokenizer.chat_template
        self.same_template = not self.has_other_tokens and not has_other_template

    def rows(
        self, prompts: Sequence[Messages], rows: TextBatch, stops: Collection[int]
    ) -> tuple[TextBatch, list[Aligned | None]]:
        """The student's `rows` in the tokens of another vocabulary, with what aligns each reply; a reply of which the
        two read other texts is replaced by the end of a turn, and aligned with nothing.

        Args:
            stops: the tokens that end a reply of the student's, each as the end of a turn does the teacher's.

        Raises:
            ValueError: it has read none of many replies.
        """
        encoded, end = self._encoded(prompts), chat_format(self._tokenizer).end_of_turn
        replies = [ids[n:].tolist() for ids, n in zip(rows.input_ids, rows.prompt_lengths, strict=True)]
        texts = decode_replies(self._own, [ids[:-1] if ids[-1] in stops else ids for ids in replies])
        found: list[Aligned | None] = []
        for ids, its in zip(replies, replies_to(self._tokenizer, prompts, texts), strict=True):
            num_ends = int(ids[-1] in stops)
            found.append(aligned(self._own, ids, self._tokenizer, its if num_ends else its[:-1], num_ends=num_ends))
        self._unread = 0 if any(found) else self._unread + len(found)
        if self._unread >= MOST_UNREAD:
            raise ValueError(
                f"{self._where}: its tokenizer is not allowed: it reads none of {self._unread} replies as the policy's "
                f"text, such as {texts[0][:40]!r}"
            )
        read = [[end] if each is None else each.ids for each in found]
        return TextBatch.of(encoded, read), found

    def check(self, prompts: Iterable[tuple[Messages, list[int]]]) -> None:
        """Raises ValueError if it cannot read one of the prompts, messages with the student's tokens, or, of the same
        vocabulary, reads one as other tokens."""
        if self.same_template:
            return
        given = list(prompts)
        found = self._encoded([messages for messages, _ in given])
        if self.has_other_tokens:
            return
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

    def _encoded(self, prompts: Sequence[Messages]) -> list[list[int]]:
        try:
            return encode_prompts(self._tokenizer, prompts)
        except ValueError as error:  # such as a picture, of which it reads none
            raise ValueError(f"{self._where}: cannot read a prompt: {error}") from error


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
