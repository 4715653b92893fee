"""One cycle's recorded feedback as a dataset: a checkpoint of kind `feedback`, signed and recorded like any other.

    feedback.jsonl   the feedback in its segments: judge, asker, application, prompt, reply, model, and the signals
    answers.jsonl    the answers in its segments: asker, prompt, reply, model
    people.json      pseudonym → rows with it: whose withdrawal concerns this checkpoint
    stats.json       counts, and what could not be used, by reason

Texts are plain in it, so it only uses sound segments, and only texts of people whose key still exists.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import Messages
from xray_runtime.data.reading.records import prompt_of
from xray_runtime.data.reasoning import with_reasoning
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.graph.artifacts import ANSWERS, FEEDBACK, PEOPLE, Feedback
from xray_runtime.kernel.history.audit_check import CHECKS, Audited, read_log
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.recorded import ChainView, read_chain
from xray_runtime.kernel.history.recorded_rows import KEYS, RECORDED, UserKeys, about, read_segment, segment_name
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.identity import digest
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.live.feedback.answers import parse_feedback
from xray_runtime.live.feedback.dataset import publish_dataset, require_tracking
from xray_runtime.live.withdrawal import refusal

STAGE = "feedback"
"""Stage and kind of the checkpoint, which no run computes."""


@dataclass
class _Read:
    """Rows that can be used, and reason → number of the others."""

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By id; those of segments before the cycle too."""
    new: list[str] = field(default_factory=list)
    """Ids of this cycle's answers."""
    feedback: list[dict[str, Any]] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)


def sound_chain(lineage: LineageStore, *, hashing: bool = True) -> ChainView:
    """The chain of segments, every one of which was checked; an empty one if nothing was ever recorded.

    Args:
        hashing: without it the bytes of the segments are not read.

    Raises:
        ConfigError: a segment was edited, removed, replayed or put there.
    """
    output = lineage.output
    verifier = evidence().verifier(output)
    lines, damages = read_log(output, verifier)
    audited = Audited(
        store=lineage,
        log=lines.folded.view,
        is_log_sound=not damages,
        nodes=(),
        changed=(),
        verifier=verifier,
        public_keys=(),
        heads={},
        whole=True,
        hashing=hashing,
        since_verified=False,
    )
    check = CHECKS.get("recorded").run
    assert check is not None
    findings = sorted(set(check(audited)))
    if findings:
        raise ConfigError(f"--output: {findings[0].subject}: {findings[0].detail}; see `xray recorded`")
    chain = ChainView()
    for line in read_chain(output):
        chain.add(line)
    return chain


def collect(lineage: LineageStore, project: str, by: str, first: int, last: int) -> CheckpointRef:
    """Publish the feedback in the segments `first` to `last`, unless this dataset exists already.

    Args:
        project: MLflow's experiment.
        by: name of the person, on record.

    Raises:
        ConfigError: what was recorded is not sound; see `sound_chain`.
    """
    require_tracking(lineage)
    chain = sound_chain(lineage)
    # Replies of a withdrawn model must not be trained on either.
    nodes = lineage.graph.nodes if view(lineage.output).state(Withdrawals) else {}
    is_refused = cache(lambda sha: sha in nodes and refusal(lineage, nodes[sha]) is not None)
    read = _read(lineage.output, chain, first, last, is_refused)
    answers = [read.answers[id] for id in read.new]
    models = sorted({row["model"] for row in [*answers, *read.feedback]} & lineage.graph.nodes.keys())
    parents = {f"policy-{number}": lineage.graph.nodes[sha] for number, sha in enumerate(models, start=1)}
    config = {"first": first, "last": last, "feedback": digest(read.feedback), "answers": digest(answers)}

    def write(built: Path) -> None:
        for name, rows in ((FEEDBACK, read.feedback), (ANSWERS, answers)):
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (built / name).write_text("".join(lines), encoding="utf-8")
        people = Counter(row[who] for row in [*answers, *read.feedback] for who in ("judge", "asker") if who in row)
        stats = {"answers": len(answers), "feedback": len(read.feedback)}
        stats |= {f"unused_{reason}": count for reason, count in sorted(read.unused.items())}
        for name, content in ((PEOPLE, people), ("stats.json", stats)):
            (built / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    return publish_dataset(lineage, project, by, STAGE, Feedback, config, parents, write)[0]


def _read(output: Path, chain: ChainView, first: int, last: int, is_refused: Callable[[str], bool]) -> _Read:
    read, keys = _Read(), UserKeys(output / RECORDED / KEYS, writable=False)
    feedback: list[dict[str, Any]] = []
    for number in (n for n in chain.segments if n <= last):
        for row in read_segment(output / RECORDED / segment_name(number)):
            if row["kind"] == "feedback":
                feedback += [row] if number >= first else []
                continue
            answer, reason = (None, "of_a_withdrawn_model") if is_refused(row["model"]) else _answer(row, keys)
            if answer is not None:
                read.answers[row["id"]] = answer
            if number >= first and reason is None:
                read.new.append(row["id"])
            elif number >= first:
                read.unused[f"answer_{reason}"] += 1
    for row in feedback:
        texts = keys.decrypt(row["user"], row["texts"], about(row["kind"], row["id"], row["model"]))
        signals = signals_of(row, texts)
        answer = read.answers.get(row["answer"])
        if signals is None:
            read.unused["feedback_withdrawn" if texts is None else "feedback_unreadable"] += 1
        elif answer is None:
            read.unused["feedback_on_an_unused_answer"] += 1
        else:
            sent = {"id": row["id"], "judge": row["user"], "application": row["application"], "signals": signals}
            read.feedback.append(answer | sent)
    return read


def _answer(row: Mapping[str, Any], keys: UserKeys) -> tuple[dict[str, Any] | None, str | None]:
    """(asker, prompt, reply and model of an answer, why there are none)."""
    texts = keys.decrypt(row["user"], row["texts"], about(row["kind"], row["id"], row["model"]))
    if texts is None:
        return None, "withdrawn"
    if not row["complete"]:
        return None, "broken_off"
    try:
        prompt, reply = _conversation(row["route"], texts["request"], texts["answer"])
    # A client, and a redaction, may have sent anything.
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None, "not_one_text"
    if not reply.strip():
        return None, "empty"
    known = {"id": row["id"], "asker": row["user"], "model": row["model"], "at_ms": row["at_ms"]}
    return known | {"prompt": prompt, "reply": reply}, None


def _conversation(route: str, request: dict[str, Any], answer: dict[str, Any]) -> tuple[Messages, str]:
    """(prompt, reply). Raises ValueError, or an error of a lookup, where they are not texts of one chat."""
    if route == "/v1/chat/completions":
        [choice] = answer["choices"]
        messages, message = request["messages"], choice["message"]
        reply = with_reasoning(message.get("reasoning") or None, _text(message["content"]))
    elif route == "/v1/responses":
        given = request["input"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if request.get("instructions"):
            messages = [{"role": "system", "content": request["instructions"]}, *messages]
        reply = "".join(_text(item["content"]) for item in answer["output"] if item["type"] == "message")
    else:
        raise ValueError("a completion is not a chat")
    plain = [{"role": message["role"], "content": _text(message["content"])} for message in messages]
    return prompt_of("the request", {"prompt": plain}), _text(reply)


def _text(content: Any) -> str:
    """Text, or the parts of one. Raises ValueError for anything else, such as an image."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("neither text nor parts")
    parts = [part["text"] for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("a part is not text")
    return "".join(parts)


def signals_of(row: Mapping[str, Any], texts: dict[str, Any] | None) -> dict[str, Any] | None:
    """The signals of a recorded feedback; None where its texts are gone, or are not feedback."""
    if texts is None:
        return None
    try:
        return parse_feedback(json.dumps(texts["feedback"] | {"answer": row["answer"]}).encode()).signals()
    except (ConfigError, KeyError, TypeError):
        return None
