"""Stage `prepare`: conversations → cleaned prompt/reply pairs, split by conversation into train and held-out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.config import DataConfig
from xray_runtime.data.pairs import Example, Messages, prompt_text, write_jsonl
from xray_runtime.data.preferences import is_held_out
from xray_runtime.data.sources import chat_pairs, chitchat_conversations, prompt_and_replies, read_records
from xray_runtime.stages.spec import Recorder, StageSpec


def run(spec: StageSpec, out: Path, recorder: Recorder) -> int:
    """Writes train.jsonl, heldout.jsonl and stats.json (what was kept, and what was dropped and why)."""
    config = DataConfig.model_validate(spec.sections["data"])
    counts: Counter[str] = Counter()
    train: list[Example] = []
    heldout: list[Example] = []
    for number, (conversation, turn, prompt, reply) in enumerate(_pairs(config)):
        if number % 5000 == 0:
            recorder.progress(number, 0, "pairs", "reading conversations")
        reason = _reason_to_drop(prompt, reply, config)
        if reason:
            counts[f"dropped_{reason}"] += 1
            continue
        example = Example(f"{conversation}-{turn}", conversation, prompt, reply)
        side = heldout if is_held_out(spec.seed, "conversations", conversation, config.heldout_fraction) else train
        side.append(example)
    seen = {prompt_text(example.prompt) for example in train}
    unseen = [example for example in heldout if prompt_text(example.prompt) not in seen]
    counts["dropped_heldout_prompt_seen_in_training"] = len(heldout) - len(unseen)
    counts["train_pairs"] = write_jsonl(out / "train.jsonl", train)
    counts["heldout_pairs"] = write_jsonl(out / "heldout.jsonl", unseen)
    counts["train_conversations"] = len({e.conversation for e in train})
    counts["heldout_conversations"] = len({e.conversation for e in unseen})
    if not train or not unseen:
        raise ValueError(
            f"data: {len(train)} training and {len(unseen)} held-out pairs are left after filtering; both must be at "
            f"least 1 (dropped: { {k: v for k, v in counts.items() if k.startswith('dropped')} })"
        )
    (out / "stats.json").write_text(json.dumps(dict(sorted(counts.items())), indent=2) + "\n")
    recorder.progress(len(train) + len(unseen), len(train) + len(unseen), "pairs", "written")
    recorder.metrics({f"data/{name}": float(value) for name, value in counts.items()}, step=0)
    recorder.table(
        "examples", ["prompt", "response"], [[prompt_text(e.prompt), e.response] for e in train[:: len(train) // 20 + 1]]
    )
    return 0


def _pairs(config: DataConfig) -> Iterator[tuple[str, int, Messages, str]]:
    """(conversation, turn, prompt, reply) of the whole source, in its order."""
    if config.source == "chitchat":
        for conversation in chitchat_conversations()[: config.max_conversations]:
            for turn, (prompt, reply) in enumerate(chat_pairs(conversation, config.context_messages)):
                yield conversation.id, turn, prompt, reply
        return
    for number, (where, record) in enumerate(read_records("data.source", config.source, config.split)):
        if config.max_conversations is not None and number >= config.max_conversations:
            return
        for turn, (prompt, reply) in enumerate(prompt_and_replies(where, record, config.context_messages)):
            # A record is a conversation of its own, unless it says which one it belongs to.
            yield str(record.get("conversation_id", number)), turn, prompt, reply


def _reason_to_drop(prompt: Messages, reply: str, config: DataConfig) -> str | None:
    text = prompt_text(prompt)
    if not text or not reply:
        return "empty"
    if min(len(text), len(reply)) < config.min_chars:
        return "too_short"
    if max(len(text), len(reply)) > config.max_chars:
        return "too_long"
    return None
