"""Stage `prepare`: prompt/reply pairs from conversations, split by conversation into train and held-out."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.heldout import is_held_out
from xray_runtime.data.pairs import (
    HELDOUT,
    TRAIN,
    VALIDATION,
    Example,
    Messages,
    Pairs,
    PairsWriter,
    message_text,
    prompt_text,
    write_pairs,
)
from xray_runtime.data.reasoning import KEY
from xray_runtime.data.records import conversation_id, prompt_and_replies, usual
from xray_runtime.data.sources import CHITCHAT, chat_pairs, chitchat_conversations, read_records
from xray_runtime.data.text_set import TextSet
from xray_runtime.data.withdrawn import WithdrawnTexts

if TYPE_CHECKING:
    from xray_runtime.config.prepare import DataConfig, MixedSource
    from xray_runtime.graph.kind import NoInputs, Recorder, Stage

T = TypeVar("T")

PROGRESS_EVERY = 500
"""Number of conversations between two progress reports."""

NUM_EXAMPLES_SHOWN = 20
REASONS = ("empty", "too_long", "too_short", "without_reply")
"""Reasons to drop a reply, or a record without replies."""


class Conversation(NamedTuple):
    """One conversation: its row in the source, counted from 1, its id, (prompt, reply) pairs, further columns as JSON,
    and position in the curriculum."""

    row: int
    id: str
    pairs: list[tuple[Messages, dict[str, Any]]]
    columns: str = "{}"
    difficulty: float = 0.0


def run(stage: Stage[DataConfig, NoInputs], out: Path, recorder: Recorder) -> int:
    """Writes train.arrow, heldout.arrow, validation.arrow if configured, stats.json (numbers of kept and dropped
    pairs), dropped.jsonl (the dropped rows of the source) and dataset.json.

    Reads the source once; memory use is 16 bytes per pair and conversation.

    Raises:
        ValueError: the source cannot be read, or filtering leaves one side of the split empty.
    """
    config = stage.config
    with DroppedRows(out) as left_out:
        counts = _write_sides(stage, out, recorder, left_out)
    counts.update({f"dropped_{reason}": count for reason, count in left_out.counts.items()})
    if config.validation_fraction and not counts["validation_pairs"]:
        raise ValueError("data: no validation pairs are left: raise validation_fraction, or read more conversations")
    if not counts["train_pairs"] or not counts["heldout_pairs"]:
        dropped = {name: count for name, count in sorted(counts.items()) if name.startswith("dropped") and count}
        raise ValueError(
            f"data: {counts['train_pairs']} training and {counts['heldout_pairs']} held-out pairs are left of "
            f"{counts['read_pairs']}; both must be at least 1: read more conversations, or change min_chars, max_chars "
            f"or heldout_fraction (dropped: {dropped})"
        )
    (out / "stats.json").write_text(json.dumps(dict(sorted(counts.items())), indent=2) + "\n", encoding="utf-8")
    facts = {"max_prompt_tokens": config.max_prompt_tokens, "context_messages": config.context_messages}
    facts |= {"in_order": config.curriculum is not None}
    (out / "dataset.json").write_text(json.dumps(facts, sort_keys=True) + "\n", encoding="utf-8")
    read, kept = counts["read_records"], counts["train_pairs"] + counts["heldout_pairs"]
    recorder.progress(read, read, "conversations", f"{kept:,} pairs kept")
    recorder.metrics({f"data/{name}": float(value) for name, value in counts.items()}, step=0)
    recorder.table("data_counts", ["what", "count"], [[name, count] for name, count in sorted(counts.items())])
    shown = Pairs(out / TRAIN, Example)[:: -(-counts["train_pairs"] // NUM_EXAMPLES_SHOWN)]
    examples = [[prompt_text(e.prompt), e.text] for e in shown]
    recorder.table("data_examples", ["prompt", "response"], examples)
    return 0


def _write_sides(
    stage: Stage[DataConfig, NoInputs], out: Path, recorder: Recorder, left_out: DroppedRows
) -> Counter[str]:
    """Write the sides of the split; returns counts of read and kept pairs."""
    config = stage.config
    counts = Counter(dict.fromkeys(("read_records", "read_pairs", *(f"dropped_{reason}" for reason in REASONS)), 0))
    everyone, trained, prompts = TextSet(), TextSet(), TextSet()
    chosen: set[str] = set()
    difficulties, absent = array("d"), set(config.columns)
    withdrawn = WithdrawnTexts("", ()) if config.withdrawn is None else WithdrawnTexts.read(Path(config.withdrawn))
    total, source = _read(config, absent)
    unchecked = {side: out / f"{side}.unchecked" for side in (HELDOUT, VALIDATION)}
    with ExitStack() as files:
        train = files.enter_context(PairsWriter(out / TRAIN, Example))
        held = {side: files.enter_context(PairsWriter(path, Example)) for side, path in unchecked.items()}
        for number, (part, (row, conversation, pairs, columns, difficulty)) in enumerate(source):
            if number % PROGRESS_EVERY == 0:
                recorder.progress(number, total, "conversations", "reading")
            if config.max_conversations is not None and conversation not in chosen:
                if len(chosen) == config.max_conversations:
                    break
                chosen.add(conversation)
            everyone.add(conversation)
            held_out = _held_out(stage.seed, conversation, config)
            counts["read_records"] += 1
            counts["read_pairs"] += len(pairs)
            at = {"source": part, "row": row} if config.sources else {"row": row}
            name = "-".join(map(str, at.values()))
            if not pairs:
                left_out.add("without_reply", at)
            if config.sources:
                counts[f"read_conversations_source_{part}"] += 1
            for place, (prompt, reply) in enumerate(pairs):
                text, calls = prompt_text(prompt), reply.get("tool_calls")
                reason = _reason_to_drop(prompt, text, message_text(reply["content"], calls), config)
                if withdrawn.touches(prompt, reply["content"]):
                    reason = "withdrawn"
                if reason:
                    left_out.add(reason, at | {"reply": place})
                    continue
                example = Example(
                    f"{name}-{place}", conversation, prompt, reply["content"], calls, columns, reply.get(KEY)
                )
                (held[held_out] if held_out else train).append(example)
                if config.sources:
                    counts[f"kept_pairs_source_{part}"] += 1
                if not held_out:
                    difficulties.append(difficulty)
                    trained.add(conversation)
                    prompts.add(text)
    if absent:
        read = ", ".join(repr(part.source) for part in config.sources) or repr(config.source)
        raise ValueError(f"data.columns: {min(absent)!r} has a value in no record of {read}")
    if config.curriculum is not None:
        _reorder(out / TRAIN, np.argsort(np.array(difficulties), kind="stable"))
    counts["train_pairs"] = train.count
    counts.update(_write_unseen(out, unchecked, config, prompts, left_out))
    counts["read_conversations"], counts["train_conversations"] = len(everyone), len(trained)
    counts["heldout_conversations"] = len(TextSet(pair.conversation for pair in Pairs(out / HELDOUT, Example)))
    return counts


def _write_unseen(
    out: Path, unchecked: Mapping[str, Path], config: DataConfig, prompts: TextSet, left_out: DroppedRows
) -> dict[str, int]:
    """Write the held-out and validation sides without pairs whose prompt is among `prompts`; returns counts.

    A held-out conversation may begin like a training conversation, or a validation one like a held-out one.
    """
    counts = {}
    for side, path in unchecked.items():
        name = side.partition(".")[0]
        if side == HELDOUT or config.validation_fraction:
            reason = f"{name}_prompt_seen_in_training"
            counts[f"dropped_{reason}"] = 0
            with PairsWriter(out / side, Example) as kept:
                for pair in Pairs(path, Example):
                    if prompt_text(pair.prompt) in prompts:
                        left_out.add(reason, {"id": pair.id})
                    else:
                        kept.append(pair)
            counts[f"{name}_pairs"] = kept.count
            for text in Pairs(out / side, Example).prompt_texts():
                prompts.add(text)
        path.unlink()
    return counts


def _held_out(seed: int, conversation: str, config: DataConfig) -> str | None:
    """`HELDOUT` or `VALIDATION`; None if the conversation is for training."""
    if is_held_out(seed, "conversations", conversation, config.heldout_fraction):
        return HELDOUT
    return VALIDATION if is_held_out(seed, "validation", conversation, config.validation_fraction) else None


def _read(config: DataConfig, absent: set[str]) -> tuple[int, Iterator[tuple[int, Conversation]]]:
    """(number of conversations or records, (number of its source, conversation) for each, in order).

    Removes columns that occur from `absent`.
    """
    if not config.sources:
        total, pairs = _read_one("data.source", config.source, config.split, config, absent)
        return total, ((0, one) for one in pairs)
    read = [
        _read_one(f"data.sources.{n}.source", one.source, one.split, config, absent)
        for n, one in enumerate(config.sources)
    ]
    return sum(total for total, _ in read), mixed(config.sources, [rows for _, rows in read])


def mixed(sources: Sequence[MixedSource], rows: Sequence[Iterator[T]]) -> Iterator[tuple[int, T]]:
    """(index of the source, row): always from the source furthest behind its share, the first one at a tie.

    After n rows each source has its share, to within one row for up to three sources. A source at its limit leaves
    further rows to the others, by weight. An exhausted source ends the mixture, so that the shares stay as configured.
    """
    # Exact fractions: 0.1 is a tenth, without rounding.
    weights = [Fraction(str(source.weight)) for source in sources]
    behind, drawn = [Fraction(0)] * len(sources), [0] * len(sources)
    active = list(range(len(sources)))
    while active:
        for n in active:
            behind[n] += weights[n]
        chosen = max(active, key=lambda n: behind[n])
        behind[chosen] -= sum(weights[n] for n in active)
        row = next(rows[chosen], None)
        if row is None:
            return
        yield chosen, row
        drawn[chosen] += 1
        if drawn[chosen] == sources[chosen].limit:
            active.remove(chosen)


def _read_one(
    field: str, source: str, split: str, config: DataConfig, absent: set[str]
) -> tuple[int, Iterator[Conversation]]:
    context = config.context_messages
    if source == CHITCHAT:
        conversations = chitchat_conversations()
        return len(conversations), (
            Conversation(n, c.id, list(chat_pairs(c, context))) for n, c in enumerate(conversations, start=1)
        )
    total, records = read_records(field, source, split)
    return total, (
        Conversation(
            where.number,
            conversation_id(record),
            list(prompt_and_replies(where, record, context)),
            _columns(record, config.columns, absent),
            0.0 if config.curriculum is None else _difficulty(where, record, config.curriculum),
        )
        for where, record in ((where, usual(where, record)) for where, record in records)
    )


def _columns(record: dict[str, Any], names: list[str], absent: set[str]) -> str:
    absent.difference_update(record)
    # `default=str` writes dates and the like as text.
    return json.dumps({name: record.get(name) for name in names}, default=str)


def _difficulty(where: object, record: dict[str, Any], column: str) -> float:
    value = record.get(column)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: column {column!r} must be a finite number (data.curriculum), not {value!r}")
    return float(value)


def _reorder(path: Path, order: np.ndarray) -> None:
    unordered = path.with_suffix(".unordered")
    path.rename(unordered)
    pairs = Pairs(unordered, Example)
    write_pairs(path, Example, (pairs[row] for row in order.tolist()))
    unordered.unlink()


def _reason_to_drop(prompt: Messages, text: str, reply: str, config: DataConfig) -> str | None:
    texts = [message_text(m["content"], m.get("tool_calls")) for m in prompt if m["role"] != "tool"]
    if not reply.strip() or not all(map(str.strip, texts)):
        return "empty"
    if min(len(text), len(reply)) < config.min_chars:
        return "too_short"
    if config.max_chars is not None and max(len(text), len(reply)) > config.max_chars:
        return "too_long"
    return None
