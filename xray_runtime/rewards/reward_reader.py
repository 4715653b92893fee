"""How a reward model reads a prompt and a reply, without the reply's reasoning: in its own tokens, as it was trained.

A reward model trained here reads the prompt under the chat template, then the reply and the end token; with the
policy's tokenizer, it reads the sampled tokens themselves. An imported one reads the whole conversation under its own
chat template, with the reply as the assistant's last turn.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from xray_runtime.data.batch import TextBatch
from xray_runtime.data.pairs import Messages, reply_message
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.reasoning import answers_of, reasoning_of
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.data.tokenizing import encode_conversations, encode_prompts, encode_replies_to
from xray_runtime.models.causal_lm import load_tokenizer, max_positions

READS, CONVERSATION = "reads", "conversation"
"""Entry of reward.json and its value; models trained here do not have it."""


class RewardReader:
    """Builds the input rows of one reward model.

    Args:
        directory: its checkpoint.
        where: its name in errors.
        tokenizer: the policy's; None if only texts are scored.
    """

    def __init__(self, directory: Path, where: str, tokenizer: Tokenizer | None = None) -> None:
        self._where, self._tokenizer = where, load_tokenizer(directory)
        self.summary: dict[str, Any] = json.loads((directory / "reward.json").read_text())
        """The content of its reward.json."""
        self._whole = self.summary.get(READS) == CONVERSATION
        self.takes_tokens = not self._whole and tokenizer is not None and _same(self._tokenizer, tokenizer)
        """Whether it reads the policy's own tokens."""
        config = json.loads((directory / "config.json").read_text()) if self._whole else {}
        self._padding, self._limit = config.get("pad_token_id"), max_positions(directory)

    def rows(self, prompts: Sequence[Messages], replies: Sequence[str], tokens: TextBatch | None = None) -> TextBatch:
        """Rows of which the head reads the last token.

        Args:
            tokens: the same prompts and replies in the policy's tokens, the end token last (`answer_rows`).

        Raises:
            ValueError: the chat template rejects a conversation, or one is longer than the model's context.
        """
        scores = self._rows(prompts, replies, tokens)
        longest = int(scores.input_ids.lengths.max(initial=0))
        if self._limit is not None and longest > self._limit:
            raise ValueError(
                f"{self._where}: a conversation of {longest} tokens is not allowed: the model reads at most "
                f"{self._limit}; lower max_prompt_tokens or max_new_tokens"
            )
        return scores

    def _rows(self, prompts: Sequence[Messages], replies: Sequence[str], tokens: TextBatch | None) -> TextBatch:
        if self.takes_tokens and tokens is not None:
            return tokens
        replies = answers_of(replies)
        if not self._whole:
            return TextBatch.of(encode_prompts(self._tokenizer, prompts), replies_to(self._tokenizer, prompts, replies))
        try:
            ids = encode_conversations(self._tokenizer, prompts, replies)
        except ValueError as error:
            raise ValueError(f"{self._where}: {error}") from error
        ids = [self._read(row) for row in ids]
        shared = _shared_lengths(prompts, ids)
        whole = list(zip(ids, shared, strict=True))
        return TextBatch.of([row[:length] for row, length in whole], [row[length:] for row, length in whole])

    def _read(self, ids: list[int]) -> list[int]:
        # transformers reads the score at the last token that is not padding; it skips an end token used as padding.
        length = len(ids)
        while length > 1 and ids[length - 1] == self._padding:
            length -= 1
        return ids[:length]


def replies_to(tokenizer: Tokenizer, prompts: Sequence[Messages], replies: Sequence[str]) -> list[list[int]]:
    """Token ids of sampled replies after their prompts, with the end of the turn."""
    given = [(prompt, reply_message(reply)) for prompt, reply in zip(prompts, replies, strict=True)]
    return encode_replies_to(tokenizer, given, sampled=True)


def answer_rows(
    tokenizer: Tokenizer, prompts: Sequence[Messages], replies: Sequence[str], rows: TextBatch
) -> TextBatch:
    """`rows` (the policy's tokens of these prompts and replies) for reward models: a reply with reasoning is replaced
    by its answer."""
    places = [row for row, reasoning in enumerate(reasoning_of(replies)) if reasoning is not None]
    if not places:
        return rows
    answers = replies_to(tokenizer, [prompts[i] for i in places], answers_of([replies[i] for i in places]))
    ids, lengths = list(rows.input_ids), rows.prompt_lengths
    for row, answer in zip(places, answers, strict=True):
        ids[row] = np.array([*ids[row][: lengths[row]], *answer])
    return rows.with_columns(input_ids=Ragged.of(ids))


def _shared_lengths(prompts: Sequence[Messages], ids: Sequence[list[int]]) -> list[int]:
    """For each conversation, the number of tokens that begin all conversations of its prompt; 0 if it is alone."""
    keys = [json.dumps(prompt) for prompt in prompts]
    groups = defaultdict[str, list[list[int]]](list)
    for key, row in zip(keys, ids, strict=True):
        groups[key].append(row)
    lengths = {key: len(commonprefix(rows)) if len(rows) > 1 else 0 for key, rows in groups.items()}
    return [lengths[key] for key in keys]


def _same(one: Any, other: Any) -> bool:
    ends = one.eos_token_id == other.eos_token_id and one.chat_template == other.chat_template
    return bool(ends and one.get_vocab() == other.get_vocab())
