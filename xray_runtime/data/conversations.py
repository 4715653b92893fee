"""Conversations as rows of SFT: one row each, with a mask of what the assistant said in it.

A dataset holds a pair for each reply. Pairs of one conversation whose prompts begin with what an earlier pair ends with
are one conversation again: with `context_messages: null` all of it, else what the context leaves together. A reply that
was dropped is still read, and not learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.pairs import Example, Messages, Pairs
from xray_runtime.data.rows import Ragged, Rows
from xray_runtime.data.tokens import IDS, SHARD_ROWS, Report, Shard, in_shards, joined, stored
from xray_runtime.store.seal import Seal

PROMPT, REPLY = "prompt_too_long", "reply_too_long"
"""Why a reply is not learned: what stands before it, or itself."""
OPEN = 8
"""Beginnings of one conversation that a pair may go on from."""
SCHEMA = pa.schema([pa.field("input_ids", IDS, nullable=False), pa.field("spans", IDS, nullable=False)])
"""Of a row: its tokens, and the first and one past the last token of each reply, with the end of its turn."""


@dataclass
class Conversation:
    """Messages, and which of them are replies to learn."""

    messages: Messages
    replies: list[int]
    ids: list[str]
    """Of the pairs that the replies are of."""


def conversations(examples: Iterable[Example]) -> Iterator[Conversation]:
    """The pairs as conversations, in order of their first pairs. Pairs of one conversation follow one another."""
    open_ones: list[Conversation] = []
    name = None
    for example in examples:
        if example.conversation != name or len(open_ones) > OPEN:
            yield from open_ones
            open_ones, name = [], example.conversation
        prompt = example.prompt
        reply: dict[str, Any] = {"role": "assistant", "content": example.response}
        if example.tool_calls:
            reply["tool_calls"] = example.tool_calls
        found = next((one for one in open_ones if prompt[: len(one.messages)] == one.messages), None)
        if found is None:
            found = Conversation([], [], [])
            open_ones.append(found)
        found.replies.append(len(prompt))
        found.ids.append(example.id)
        found.messages = [*prompt, reply]
    yield from open_ones


class ConversationTokens:
    """Rows of tokens, one a conversation of a dataset's file: whole columns on disk, taken rows in memory.

    Args:
        pairs: the dataset's file of `Example`s.
        max_prompt: tokens before a reply; where there are more it is not learned.
        max_reply: tokens of a reply, the end of its turn included; where there are more, or fewer than 2, it is not
            learned.
        seal: of the run, whose tokens are read.
        report: told of progress where the tokens have to be made.

    Raises:
        ValueError: the file holds no such pairs, or is damaged, or the chat template refuses a conversation.
    """

    def __init__(
        self,
        pairs: Path,
        tokenizer: Any,
        max_prompt: int,
        max_reply: int,
        seal: Seal,
        report: Report = lambda done, total: None,
    ) -> None:
        shards = stored(
            pairs, "conversations", tokenizer, lambda: _encoded(Pairs(pairs, Example), tokenizer, report), seal
        )
        self._ids = [Shard(shard.column("input_ids")) for shard in shards]
        self._spans = [Shard(shard.column("spans")) for shard in shards]
        counts = joined([np.diff(shard.offsets) for shard in self._spans], np.int64) // 2
        spans = joined([shard.values[shard.offsets[0] : shard.offsets[-1]] for shard in self._spans], np.int64)
        starts, lengths = spans[::2], spans[1::2] - spans[::2]
        self._pairs, self._limits = pairs, (max_prompt, max_reply)
        fit = self._fit(starts, lengths)
        self.num_replies = int(fit.sum())
        """Replies that are learned."""
        self._too_long = {PROMPT: starts > max_prompt}
        self._too_long[REPLY] = ~fit & ~self._too_long[PROMPT]
        self.num_dropped = {reason: int(rows.sum()) for reason, rows in self._too_long.items()}
        """Why a reply is not learned → how many are not."""
        row_of = np.repeat(np.arange(len(counts)), counts)
        self._rows = np.unique(row_of[fit])

    def list_dropped(self, rows: DroppedRows) -> None:
        """Add what is not learned, by the ids of the dataset's pairs."""
        left = np.flatnonzero(self._too_long[PROMPT] | self._too_long[REPLY])
        ids = (name for one in conversations(Pairs(self._pairs, Example)) for name in one.ids)
        at = 0
        for row in left.tolist():
            name = next(islice(ids, row - at, None))
            at = row + 1
            rows.add(PROMPT if self._too_long[PROMPT][row] else REPLY, {"id": name})

    def __len__(self) -> int:
        """Conversations with something to learn."""
        return len(self._rows)

    def take(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """These conversations, each up to the last reply that is learned: `input_ids` ragged, `prompt_lengths` [B]
        (what stands before the first such reply) and, ragged over the tokens from there on, `response_mask` (bool)."""
        ids, prompt_lengths, masks = [], [], []
        for row in self._rows[np.asarray(rows, dtype=np.int64)].tolist():
            number, place = divmod(row, SHARD_ROWS)
            spans = self._spans[number].row(place).reshape(-1, 2)
            spans = spans[self._fit(spans[:, 0], spans[:, 1] - spans[:, 0])]
            begin, end = int(spans[0, 0]), int(spans[-1, 1])
            mask = np.zeros(end - begin, dtype=bool)
            for start, stop in spans - begin:
                mask[start:stop] = True
            ids.append(self._ids[number].row(place)[:end])
            prompt_lengths.append(begin)
            masks.append(mask)
        return {
            "input_ids": Ragged.of(ids),
            "prompt_lengths": np.array(prompt_lengths, dtype=np.int64),
            "response_mask": Ragged.of(masks, np.bool_),
        }

    def _fit(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        max_prompt, max_reply = self._limits
        fit: np.ndarray = (starts <= max_prompt) & (lengths >= 2) & (lengths <= max_reply)
        return fit


def _encoded(pairs: Pairs[Example], tokenizer: Any, report: Report) -> Iterator[pa.RecordBatch]:
    form, done = chat_format(tokenizer), 0
    for part in in_shards(conversations(pairs)):
        report(done, len(pairs))
        turns = form.turns([(one.messages, one.replies) for one in part])
        spans = [[place for span in one.spans for place in span] for one in turns]
        columns = [pa.array([one.ids for one in turns], IDS), pa.array(spans, IDS)]
        yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        done += sum(len(one.replies) for one in part)
    report(done, len(pairs))
