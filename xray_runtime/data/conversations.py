"""Conversations as rows for SFT: one row each, with a mask of the assistant's tokens; more rows where the chat
template writes earlier turns otherwise than they were sampled (`ChatFormat.turns`).

A dataset has one pair per reply. Pairs of one conversation are joined if a prompt continues an earlier pair: with
`context_messages: null` the whole conversation, else the parts within the context. A dropped reply stays in the context
but is not trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from xray_runtime.data.batch import TextBatch
from xray_runtime.data.chat_format import Turns, chat_format
from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.pairs import Example, Messages, Pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.data.tokens import IDS, SHARD_ROWS, Report, TokenColumn, by_pair, in_shards, joined, stored
from xray_runtime.kernel.store.seal import Seal

PROMPT, REPLY = "prompt_too_long", "reply_too_long"
"""Reasons to skip a reply: its prompt, or the reply itself, is too long."""
OPEN = 8
"""Maximum number of open prefixes of one conversation that a pair may continue."""
SCHEMA = pa.schema([pa.field("input_ids", IDS, nullable=False), pa.field("spans", IDS, nullable=False)])
"""A row's tokens, and (first, one past the last) token of each reply, with the end of its turn."""


@dataclass
class Conversation:
    """Messages, and the indices of the replies to train on."""

    messages: Messages
    replies: list[int]
    ids: list[str]
    """Row of each reply's pair in the dataset."""


def conversations(examples: Iterable[Example]) -> Iterator[Conversation]:
    """The pairs as conversations, in order of their first pairs. Pairs of one conversation are adjacent. Prompts
    without a reply are left out."""
    open_ones: list[Conversation] = []
    name = None
    for example in examples:
        if example.conversation != name or len(open_ones) > OPEN:
            yield from open_ones
            open_ones, name = [], example.conversation
        prompt = example.prompt
        if not example.has_reply:
            continue
        conversation = next((one for one in open_ones if prompt[: len(one.messages)] == one.messages), None)
        if conversation is None:
            conversation = Conversation([], [], [])
            open_ones.append(conversation)
        conversation.replies.append(len(prompt))
        conversation.ids.append(example.id)
        conversation.messages = [*prompt, example.reply]
    yield from open_ones


class ConversationTokens:
    """Rows of tokens of a dataset's conversations: columns stay on disk, selected rows are read.

    Args:
        max_prompt: maximum number of tokens before a reply to train on.
        max_reply: maximum number of tokens of a reply to train on, with the end of its turn; the minimum is 2.

    Raises:
        ValueError: as `Tokens`, or the chat template refuses a conversation.
    """

    def __init__(
        self,
        pairs: Path,
        tokenizer: Tokenizer,
        max_prompt: int,
        max_reply: int,
        seal: Seal,
        report: Report = lambda done, total: None,
    ) -> None:
        shards = stored(
            pairs, "conversations", tokenizer, lambda: _encoded(Pairs(pairs, Example), tokenizer, report), seal
        )
        self._ids = [TokenColumn(shard.column("input_ids")) for shard in shards]
        self._spans = [TokenColumn(shard.column("spans")) for shard in shards]
        counts = joined([np.diff(shard.offsets) for shard in self._spans], np.int64) // 2
        spans = joined([shard.values[shard.offsets[0] : shard.offsets[-1]] for shard in self._spans], np.int64)
        starts, lengths = spans[::2], spans[1::2] - spans[::2]
        self._pairs, self._limits = pairs, (max_prompt, max_reply)
        self.num_all = len(starts)
        """Number of replies of the dataset, with those that are too long."""
        fit = self._fit(starts, lengths)
        self.num_replies = int(fit.sum())
        """Number of replies to train on."""
        self._too_long = {PROMPT: starts > max_prompt}
        self._too_long[REPLY] = ~fit & ~self._too_long[PROMPT]
        self.num_dropped = {reason: int(rows.sum()) for reason, rows in self._too_long.items()}
        """Reason → number of skipped replies."""
        row_of = np.repeat(np.arange(len(counts)), counts)
        self._rows = np.unique(row_of[fit])
        self._starts, self._lengths = starts, lengths
        self.ends = np.where(fit, starts + lengths, 0)
        """Tokens of a row up to the end of each reply of the dataset; 0 for those that are skipped."""

    def list_dropped(self, rows: DroppedRows) -> None:
        """Report skipped replies, by the ids of the dataset's pairs, with the tokens of what is too long."""
        left = np.flatnonzero(self._too_long[PROMPT] | self._too_long[REPLY])
        ids, at = self._names(), 0
        for row in left.tolist():
            name = next(islice(ids, row - at, None))
            at = row + 1
            reason, tokens = (PROMPT, self._starts) if self._too_long[PROMPT][row] else (REPLY, self._lengths)
            rows.add(reason, {"id": name, "tokens": int(tokens[row])})

    def id(self, reply: int) -> str:
        """The id of the pair of a reply of the dataset."""
        return next(islice(self._names(), reply, None))

    def _names(self) -> Iterator[str]:
        """The id of each reply's pair."""
        return (name for one in conversations(Pairs(self._pairs, Example)) for name in one.ids)

    def __len__(self) -> int:
        """Number of rows with a reply to train on."""
        return len(self._rows)

    def take(self, rows: Sequence[int] | np.ndarray) -> TextBatch:
        """These rows, each up to its last trained reply; the prompt is what stands before the first one, and
        `response_mask` tells which tokens after it are trained."""
        ids, prompt_lengths, masks = [], [], []
        for row in self._rows[np.asarray(rows, dtype=np.int64)].tolist():
            number, position = divmod(row, SHARD_ROWS)
            spans = self._spans[number].row(position).reshape(-1, 2)
            spans = spans[self._fit(spans[:, 0], spans[:, 1] - spans[:, 0])]
            begin, end = int(spans[0, 0]), int(spans[-1, 1])
            mask = np.zeros(end - begin, dtype=bool)
            for start, stop in spans - begin:
                mask[start:stop] = True
            ids.append(self._ids[number].row(position)[:end])
            prompt_lengths.append(begin)
            masks.append(mask)
        return TextBatch(
            input_ids=Ragged.of(ids),
            prompt_lengths=np.array(prompt_lengths, dtype=np.int64),
            response_mask=Ragged.of(masks, np.bool_),
        )

    def _fit(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        max_prompt, max_reply = self._limits
        fit: np.ndarray = (starts <= max_prompt) & (lengths >= 2) & (lengths <= max_reply)
        return fit


def _encoded(pairs: Pairs[Example], tokenizer: Tokenizer, report: Report) -> Iterator[pa.RecordBatch]:
    for rows in in_shards(_rows(pairs, tokenizer, report)):
        spans = [[position for span in row.spans for position in span] for row in rows]
        yield pa.RecordBatch.from_pydict({"input_ids": [row.ids for row in rows], "spans": spans}, schema=SCHEMA)


def _rows(pairs: Pairs[Example], tokenizer: Tokenizer, report: Report) -> Iterator[Turns]:
    form, done = chat_format(tokenizer), 0
    for part in in_shards(conversations(pairs)):
        report(done, len(pairs))
        yield from by_pair(part, _name, lambda some: form.turns([(one.messages, one.replies) for one in some]))
        done += sum(len(one.replies) for one in part)
    report(done, len(pairs))


def _name(conversation: Conversation) -> str:
    """The row of the conversation's last reply."""
    return conversation.ids[-1]
