"""Stage `prepare`: conversations → cleaned prompt/reply pairs, split by conversation into train and held-out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.data.heldout import is_held_out
from xray_runtime.data.pairs import Example, Messages, prompt_text, write_jsonl
from xray_runtime.data.sources import (
    chat_pairs,
    chitchat_conversations,
    conversation_id,
    prompt_and_replies,
    read_records,
)

if TYPE_CHECKING:
    from xray_runtime.config.prepare import DataConfig
    from xray_runtime.stages.kind import NoInputs, Recorder, Stage

PROGRESS_EVERY = 500
"""Conversations between two reports of progress."""

NUM_EXAMPLES_SHOWN = 20

ConversationPairs = tuple[str, list[tuple[Messages, str]]]
"""A conversation's id and its (prompt, reply) pairs."""


def run(stage: Stage[DataConfig, NoInputs], out: Path, recorder: Recorder) -> int:
    """Writes train.jsonl, heldout.jsonl, stats.json (what was kept, and what was dropped and why) and dataset.json.

    Raises:
        ValueError: the source cannot be read, or filtering leaves one side of the split empty.
    """
    config = stage.config
    counts = Counter(dict.fromkeys(("read_without_reply", "dropped_empty", "dropped_too_short", "dropped_too_long"), 0))
    train: list[Example] = []
    heldout: list[Example] = []
    turns: Counter[str] = Counter()
    total, source = _read(config)
    for number, (conversation, pairs) in enumerate(source):
        if number % PROGRESS_EVERY == 0:
            recorder.progress(number, total, "conversations", "reading")
        if conversation not in turns and len(turns) == config.max_conversations:
            break
        side = heldout if is_held_out(stage.seed, "conversations", conversation, config.heldout_fraction) else train
        # A conversation may come in several records: its turns are counted on.
        turns.setdefault(conversation, 0)
        counts["read_without_reply"] += not pairs
        for prompt, reply in pairs:
            example = Example(f"{conversation}-{turns[conversation]}", conversation, prompt, reply)
            turns[conversation] += 1
            reason = _reason_to_drop(prompt, reply, config)
            if reason:
                counts[f"dropped_{reason}"] += 1
            else:
                side.append(example)
    seen = {prompt_text(example.prompt) for example in train}
    unseen = [example for example in heldout if prompt_text(example.prompt) not in seen]
    counts["dropped_heldout_prompt_seen_in_training"] = len(heldout) - len(unseen)
    counts["read_conversations"] = len(turns)
    counts["read_pairs"] = turns.total()
    counts["train_pairs"] = write_jsonl(out / "train.jsonl", train)
    counts["heldout_pairs"] = write_jsonl(out / "heldout.jsonl", unseen)
    counts["train_conversations"] = len({e.conversation for e in train})
    counts["heldout_conversations"] = len({e.conversation for e in unseen})
    if not train or not unseen:
        dropped = {name: count for name, count in sorted(counts.items()) if name.startswith("dropped") and count}
        raise ValueError(
            f"data: {len(train)} training and {len(unseen)} held-out pairs are left of {turns.total()}; both must be "
            f"at least 1: read more conversations, or change min_chars, max_chars or heldout_fraction (dropped: "
            f"{dropped})"
        )
    (out / "stats.json").write_text(json.dumps(dict(sorted(counts.items())), indent=2) + "\n", encoding="utf-8")
    facts = {"max_prompt_tokens": config.max_prompt_tokens, "context_messages": config.context_messages}
    (out / "dataset.json").write_text(json.dumps(facts, sort_keys=True) + "\n", encoding="utf-8")
    recorder.progress(total, total, "conversations", f"{len(train) + len(unseen):,} pairs kept")
    recorder.metrics({f"data/{name}": float(value) for name, value in counts.items()}, step=0)
    recorder.table("data_counts", ["what", "count"], [[name, count] for name, count in sorted(counts.items())])
    shown = train[:: -(-len(train) // NUM_EXAMPLES_SHOWN)]
    recorder.table("data_examples", ["prompt", "response"], [[prompt_text(e.prompt), e.response] for e in shown])
    return 0


def _read(config: DataConfig) -> tuple[int, Iterator[ConversationPairs]]:
    """(number of conversations or records, their pairs in the source's order)."""
    context = config.context_messages
    if config.source == "chitchat":
        conversations = chitchat_conversations()
        return len(conversations), ((c.id, list(chat_pairs(c, context))) for c in conversations)
    total, records = read_records("data.source", config.source, config.split)
    return total, (
        (conversation_id(record), list(prompt_and_replies(where, record, context))) for where, record in records
    )


def _reason_to_drop(prompt: Messages, reply: str, config: DataConfig) -> str | None:
    text = prompt_text(prompt)
    if not reply or not all(message["content"] for message in prompt):
        return "empty"
    if min(len(text), len(reply)) < config.min_chars:
        return "too_short"
    if max(len(text), len(reply)) > config.max_chars:
        return "too_long"
    return None
