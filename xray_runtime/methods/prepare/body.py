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
from xray_runtime.data.pictures import FOLDER
from xray_runtime.data.reading.forms import renamed, usual
from xray_runtime.data.reading.json_values import check_json
from xray_runtime.data.reading.keys import Unread
from xray_runtime.data.reading.pictures import PictureFolder, keep_pictures_of
from xray_runtime.data.reading.record_files import Where
from xray_runtime.data.reading.records import conversation_id, left_out, prompt_and_replies
from xray_runtime.data.reading.sources import CHITCHAT, CHITCHAT_SIZE, chat_pairs, chitchat_conversations, read_records
from xray_runtime.data.reasoning import KEY
from xray_runtime.data.text_set import TextSet
from xray_runtime.data.withdrawn import WithdrawnTexts
from xray_runtime.methods.common.results import write_json

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import NoInputs, Recorder
    from xray_runtime.methods.prepare.config import DataConfig, MixedSource

T = TypeVar("T")

PROGRESS_EVERY = 500
"""Number of conversations between two progress reports."""

NUM_EXAMPLES_SHOWN = 20
REASONS = ("empty", "too_long", "too_short", "without_reply")
"""Reasons to drop a reply, or a record without replies."""
Pair = tuple[Messages, dict[str, Any] | None]
"""A prompt and a reply, or a prompt alone."""


class NumberedConversation(NamedTuple):
    """One conversation: its row in the source, counted from 1, its id, its pairs, further columns as JSON, position in
    the curriculum, and why its replies are not learned."""

    row: int
    id: str
    pairs: Sequence[Pair]
    columns: str = "{}"
    difficulty: float = 0.0
    left_out: str | None = None


def run(stage: Stage[DataConfig, NoInputs], out: Path, recorder: Recorder) -> int:
    """Writes train.arrow, heldout.arrow, validation.arrow if configured, stats.json (numbers of kept and dropped
    pairs), dropped.jsonl (the dropped rows of the source) and dataset.json.

    Reads the source once; memory use is 16 bytes per pair and conversation.

    Raises:
        ValueError: the source cannot be read, or filtering leaves one side of the split empty.
    """
    config, unread = stage.config, Unread()
    with DroppedRows(out) as left_out:
        counts = _write_sides(stage, out, recorder, left_out, unread)
    if kept := keep_pictures_of(out / FOLDER, (out / side for side in (TRAIN, HELDOUT, VALIDATION))):
        counts["pictures"] = kept
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
    write_json(out / "stats.json", {**counts, **unread.counts()})
    facts = {"max_prompt_tokens": config.max_prompt_tokens, "context_messages": config.context_messages}
    facts |= {"in_order": config.curriculum is not None}
    (out / "dataset.json").write_text(json.dumps(facts, sort_keys=True) + "\n", encoding="utf-8")
    read, kept = counts["read_records"], counts["train_pairs"] + counts["heldout_pairs"]
    recorder.progress(read, read, "conversations", "; ".join(filter(None, [f"{kept:,} pairs kept", str(unread)])))
    recorder.metrics({f"data/{name}": float(value) for name, value in counts.items()} | unread.metrics("data"), step=0)
    recorder.table("data_counts", ["what", "count"], [[name, count] for name, count in sorted(counts.items())])
    shown = Pairs(out / TRAIN, Example)[:: -(-counts["train_pairs"] // NUM_EXAMPLES_SHOWN)]
    examples = [[prompt_text(e.prompt), e.text] for e in shown]
    recorder.table("data_examples", ["prompt", "response"], examples)
    return 0


def _write_sides(
    stage: Stage[DataConfig, NoInputs], out: Path, recorder: Recorder, left_out: DroppedRows, unread: Unread
) -> Counter[str]:
    """Write the sides of the split; returns counts of read and kept pairs."""
    config = stage.config
    counts = Counter(dict.fromkeys(("read_records", "read_pairs", *(f"dropped_{reason}" for reason in REASONS)), 0))
    everyone, trained, prompts = TextSet(), TextSet(), TextSet()
    chosen: set[str] = set()
    difficulties, absent = array("d"), set(config.columns)
    withdrawn = WithdrawnTexts("", ()) if config.withdrawn is None else WithdrawnTexts.read(Path(config.withdrawn))
    total, source = _read(config, absent, unread, PictureFolder(out / FOLDER, config.pictures))
    unchecked = {side: out / f"{side}.unchecked" for side in (HELDOUT, VALIDATION)}
    with ExitStack() as files:
        train = files.enter_context(PairsWriter(out / TRAIN, Example))
        held = {side: files.enter_context(PairsWriter(path, Example)) for side, path in unchecked.items()}
        for number, (part, (row, conversation, pairs, columns, difficulty, skipped)) in enumerate(source):
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
            if skipped or not pairs:
                left_out.add(skipped or "without_reply", at)
            if config.sources:
                counts[f"read_conversations_source_{part}"] += 1
            for place, (prompt, reply) in enumerate(pairs):
                text = prompt_text(prompt)
                reason = _reason_to_drop(prompt, text, reply, withdrawn, config)
                if reason:
                    left_out.add(reason, at | {"reply": place})
                    continue
                example = _example(f"{name}-{place}", conversation, prompt, reply, columns)
                if reply is None:
                    counts["prompts_without_reply"] += 1
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


def _read(
    config: DataConfig, absent: set[str], unread: Unread, pictures: PictureFolder
) -> tuple[int, Iterator[tuple[int, NumberedConversation]]]:
    """(number of conversations or records, (number of its source, conversation) for each, in order).

    Removes columns that occur from `absent`.
    """
    if not config.sources:
        total, rows = _read_one("data", config, config, absent, unread, pictures)
        return total, ((0, one) for one in rows)
    given = config, absent, unread, pictures
    read = [_read_one(f"data.sources.{n}", one, *given) for n, one in enumerate(config.sources)]
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
    field: str,
    part: DataConfig | MixedSource,
    config: DataConfig,
    absent: set[str],
    unread: Unread,
    pictures: PictureFolder,
) -> tuple[int, Iterator[NumberedConversation]]:
    if part.source == CHITCHAT:
        return CHITCHAT_SIZE, (
            NumberedConversation(n, c.id, list(chat_pairs(c, config.context_messages)))
            for n, c in enumerate(chitchat_conversations(), start=1)
        )
    total, records = read_records(f"{field}.source", part.source, part.split)
    names, unseen = part.rename_columns, set(part.rename_columns)

    def read() -> Iterator[NumberedConversation]:
        for where, given in records:
            record = renamed(f"{field}.rename_columns", where, given, names, unseen)
            try:
                one = _conversation(where, pictures.store(where, record), config, unread)
            except ValueError as error:
                raise ValueError(f"{error}{_unseen(field, unseen)}") from error
            absent.difference_update(record)
            yield one
        if unseen:
            raise ValueError(f"{field}.rename_columns: {min(unseen)!r} has a value in no record of {part.source!r}")

    return total, read()


def _unseen(field: str, names: set[str]) -> str:
    return f" ({field}.rename_columns: no record had {min(names)!r} so far)" if names else ""


def _conversation(where: Where, record: dict[str, Any], config: DataConfig, unread: Unread) -> NumberedConversation:
    carried = [*config.columns, *([config.curriculum] if config.curriculum is not None else [])]
    conversation = usual(where, record, carried=carried, unread=unread)
    pairs: list[Pair] = list(prompt_and_replies(where, conversation, config.context_messages, unread))
    reason = left_out(where, conversation) if any(reply is not None for _, reply in pairs) else None
    return NumberedConversation(
        where.row,
        conversation_id(where, conversation),
        [] if reason else pairs,
        _columns(where, record, config.columns),
        0.0 if config.curriculum is None else _difficulty(where, record, config.curriculum),
        reason,
    )


def _columns(where: Where, record: dict[str, Any], names: list[str]) -> str:
    values = {name: check_json(where, name, record.get(name)) for name in names}
    return json.dumps(values, sort_keys=True)


def _difficulty(where: object, record: dict[str, Any], column: str) -> float:
    value = record.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: column {column!r} must be a finite number (data.curriculum), not {value!r}")
    return float(value)


def _reorder(path: Path, order: np.ndarray) -> None:
    unordered = path.with_suffix(".unordered")
    path.rename(unordered)
    pairs = Pairs(unordered, Example)
    write_pairs(path, Example, (pairs[row] for row in order.tolist()))
    unordered.unlink()


def _example(name: str, conversation: str, prompt: Messages, reply: dict[str, Any] | None, columns: str) -> Example:
    message = reply or {"content": ""}
    calls, reasoning = message.get("tool_calls"), message.get("reasoning_content")
    return Example(name, conversation, prompt, message["content"], calls, columns, reasoning)


def _reason_to_drop(
    prompt: Messages, text: str, reply: dict[str, Any] | None, withdrawn: WithdrawnTexts, config: DataConfig
) -> str | None:
    if withdrawn.touches(prompt if reply is None else [*prompt, reply]):
        return "withdrawn"
    texts = [_whole_text(message) for message in prompt if message["role"] != "tool"]
    lengths = [len(text)]
    if reply is not None:
        texts.append(_whole_text(reply))
        lengths.append(len(texts[-1]))
    if not all(map(str.strip, texts)):
        return "empty"
    if min(lengths) < config.min_chars:
        return "too_short"
    if config.max_chars is not None and max(lengths) > config.max_chars:
        return "too_long"
    return None


def _whole_text(message: dict[str, Any]) -> str:
    """A message's text with its reasoning and its calls."""
    return message_text(message["content"], message.get("tool_calls"), message.get(KEY))
