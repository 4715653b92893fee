"""Single replies, one per row, from preference pairs and from verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xray_runtime.data.batch import TextBatch
from xray_runtime.data.batching import permuted
from xray_runtime.data.pairs import Messages, prompt_text, reply_message
from xray_runtime.data.text_set import TextSet
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.data.tokenizing import encode_prompts, encode_replies_to
from xray_runtime.data.tokens import Tokens

SIDES = ("input_ids", "rejected_ids")
"""The column of each side of a pair, the chosen one first."""
DESIRABLE = {"a": (True, False), "b": (False, True), "tie": (True, True), "bad": (False, False)}
"""Verdict → whether the replies `a` and `b` are desirable. A tie means two good replies: `bad` is for two bad ones."""
RATED = {"up": (True,), "down": (False,)}
"""Verdict on the reply `a` alone → whether it is desirable."""


@dataclass(frozen=True)
class Replies:
    """Replies that are selected by index."""

    size: int
    take: Callable[[np.ndarray], TextBatch]


def both_sides(pairs: Tokens, size: int | None = None) -> Replies:
    """Replies of the first `size` pairs: reply 2i is the chosen one of pair i, reply 2i + 1 the rejected one."""

    def read(numbers: np.ndarray) -> TextBatch:
        pair, side = np.divmod(np.asarray(numbers, dtype=np.int64), 2)
        rows, n = pairs.take(pair), len(pair)
        sides = [TextBatch(input_ids=ids, prompt_lengths=rows.prompt_lengths) for ids in rows.sides()]
        return TextBatch.concat(sides).take(np.arange(n) + n * side)

    return Replies(2 * (len(pairs) if size is None else min(size, len(pairs))), read)


class LabelledReply(NamedTuple):
    """A reply with its label."""

    prompt: Messages
    reply: str
    desirable: bool


def from_verdicts(
    records: Iterable[Mapping[str, Any]], held_out: TextSet
) -> tuple[list[LabelledReply], dict[str, float]]:
    """The two replies of each verdict (a line of judgements.jsonl) except skips, and counts. Verdicts on `held_out`
    prompts are dropped."""
    replies: list[LabelledReply] = []
    counts = {"skipped": 0.0, "dropped_prompt_held_out": 0.0, "dropped_same": 0.0}
    for record in records:
        desirable = (DESIRABLE | RATED).get(record["verdict"])
        if desirable is None:
            counts["skipped"] += 1
        elif prompt_text(record["prompt"]) in held_out:
            counts["dropped_prompt_held_out"] += 1
        elif len(desirable) == 2 and desirable[0] != desirable[1] and record["a"] == record["b"]:
            counts["dropped_same"] += 1
        else:
            replies += [
                LabelledReply(record["prompt"], record[side], d) for side, d in zip("ab", desirable, strict=False)
            ]
    return replies, counts


def encoded(labelled: Sequence[LabelledReply], tokenizer: Tokenizer) -> Replies:
    """The tokens of these replies, in memory, since human verdicts are few."""
    prompts = encode_prompts(tokenizer, [one.prompt for one in labelled])
    given = [(one.prompt, reply_message(one.reply)) for one in labelled]
    replies = encode_replies_to(tokenizer, given, sampled=True)
    return Replies(len(labelled), TextBatch.of(prompts, replies).take)


def within(labelled: Sequence[LabelledReply], tokenizer: Tokenizer, max_tokens: int | None) -> list[LabelledReply]:
    """Those with at most `max_tokens`, prompt and reply together; None: all."""
    if max_tokens is None or not labelled:
        return list(labelled)
    lengths = encoded(labelled, tokenizer).take(np.arange(len(labelled))).input_ids.lengths
    return [one for one, length in zip(labelled, lengths, strict=True) if length <= max_tokens]


def joined(parts: Sequence[Replies]) -> Replies:
    """The concatenated replies of all parts."""
    bounds = np.cumsum([0, *(part.size for part in parts)])

    def read(numbers: np.ndarray) -> TextBatch:
        numbers = np.asarray(numbers, dtype=np.int64)
        owners = np.searchsorted(bounds, numbers, side="right") - 1
        places = {part: np.flatnonzero(owners == part).tolist() for part in sorted(set(owners.tolist()))}
        rows = [parts[part].take(numbers[at] - bounds[part]) for part, at in places.items()]
        return TextBatch.join(rows, list(places.values()))

    return Replies(int(bounds[-1]), read)


def mismatched(replies: Replies, seed: int, max_tokens: int | None = None) -> Replies:
    """Each prompt with the reply after its own in a seeded cyclic order, cut to `max_tokens` in all."""
    order = permuted(np.arange(replies.size), replies.size, seed)
    following = np.empty_like(order)
    following[order] = np.roll(order, -1)

    def read(numbers: np.ndarray) -> TextBatch:
        own, other = replies.take(numbers), replies.take(following[np.asarray(numbers, dtype=np.int64)])
        prompts = [ids[:n] for ids, n in zip(own.input_ids, own.prompt_lengths, strict=True)]
        answers = [ids[n:] for ids, n in zip(other.input_ids, other.prompt_lengths, strict=True)]
        if max_tokens is not None:
            # A reply has a token at least, and each prompt had room for its own.
            answers = [ids[: max_tokens - len(prompt)] for prompt, ids in zip(prompts, answers, strict=True)]
        return TextBatch.of(prompts, answers)

    return Replies(replies.size, read)
