"""Recorded answers as questions for a judge: two answers to one prompt where there are two, else one.

A verdict is feedback as applications send it: `better` about the answer that lost, a thumb about an answer alone, a
correction. It is a row of the signed store, encrypted with the keys of the judge and of the person who was answered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.recorded import RecordedReader, SegmentWriter, recorded_lock
from xray_runtime.kernel.history.recorded_rows import KEYS, RECORDED, UserKeys, about, feedback_row
from xray_runtime.kernel.seeding import derive_seed

MAX_ROWS = 5000
"""Newest rows from which questions are made."""
NEVER_EXPIRES_DAYS = 36500
"""A verdict removes no old segments: the next recording does, by its own rule."""
PAIR_KEYS = {"1": "the left is better", "2": "the right is better", "t": "a tie", "b": "both are bad"}
SINGLE_KEYS = {"1": "good", "b": "bad"}


@dataclass(frozen=True)
class ReviewedAnswer:
    id: str
    model: str
    """sha256."""
    text: str
    user: str
    """Pseudonym of the person who was answered."""


@dataclass(frozen=True)
class RecordedQuestion:
    """One or two answers to a prompt, in the order in which the judge sees them."""

    prompt: str
    answers: tuple[ReviewedAnswer, ...]

    @property
    def id(self) -> str:
        return "-".join(answer.id for answer in self.answers)

    @property
    def keys(self) -> dict[str, str]:
        """Key → its meaning."""
        return PAIR_KEYS if len(self.answers) == 2 else SINGLE_KEYS


def recorded_questions(output: Path, judge: str) -> list[RecordedQuestion]:
    """The questions that `judge` has not answered, newest first; answers kept for one application are not shown.

    Raises:
        ConfigError: nothing was recorded, or it cannot be read.
    """
    if not (output / RECORDED).is_dir():
        raise ConfigError(f"--output: {str(output)!r} has no recorded answers: record some with `xray serve --record`")
    try:
        rows = list(RecordedReader(output).rows(None, (), MAX_ROWS))
        name = UserKeys(output / RECORDED / KEYS, writable=False).pseudonym(judge)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--output: {error}; see `xray recorded`") from None
    judged = {row["answer"] for row in rows if row["kind"] == "feedback" and row["user"] == name}
    by_prompt: dict[str, list[ReviewedAnswer]] = {}
    for row in rows:
        if row["kind"] == "answer" and row["texts"] is not None and not row["application"] and row["complete"]:
            prompt, text = prompt_of(row["texts"]), answer_of(row["texts"])
            if prompt and text:
                by_prompt.setdefault(prompt, []).append(ReviewedAnswer(row["id"], row["model"], text, row["user"]))
    questions = []
    for prompt, answers in by_prompt.items():
        for pair in _pairs(answers):
            if not any(answer.id in judged for answer in pair):
                coin = random.Random(derive_seed(0, "recorded", judge, *sorted(a.id for a in pair)))
                questions.append(RecordedQuestion(prompt, tuple(coin.sample(pair, len(pair)))))
    return questions


def _pairs(answers: Sequence[ReviewedAnswer]) -> list[list[ReviewedAnswer]]:
    """Each answer beside the next that says something else, or alone."""
    distinct = list({answer.text: answer for answer in answers}.values())
    return [distinct[i : i + 2] for i in range(0, len(distinct), 2)]


def prompt_of(texts: dict[str, Any]) -> str:
    """The last turn of a recorded request and what came before it, as text."""
    request = texts.get("request", {})
    prompt = request.get("messages") or request.get("input") or request.get("prompt") or ""
    if isinstance(prompt, str):
        return prompt
    parts = [m for m in prompt if isinstance(m, dict)]
    return "\n\n".join(f"{m.get('role', '')}: {_plain(m.get('content'))}" for m in parts)


def answer_of(texts: dict[str, Any]) -> str:
    """The text of a recorded answer; empty where it has none."""
    answer = texts.get("answer", {})
    for choice in answer.get("choices", ()):
        message = choice.get("message") or {}
        return _plain(message.get("content") or choice.get("text"))
    return "".join(_plain(item.get("content")) for item in answer.get("output", ()) if isinstance(item, dict))


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def signals_of(
    question: RecordedQuestion, key: str, correction: str | None
) -> list[tuple[ReviewedAnswer, dict[str, Any]]]:
    """A verdict as feedback, by answer. Raises ConfigError for a key that is not allowed here."""
    if key not in question.keys:
        raise ConfigError(f"key: {key!r} is not allowed: must be one of {', '.join(question.keys)}")
    first, last = question.answers[0], question.answers[-1]
    signals: dict[ReviewedAnswer, dict[str, Any]] = {}
    if first is last:
        signals[first] = {"thumb": "up" if key == "1" else "down"}
    elif key in ("1", "2"):
        won, lost = (first, last) if key == "1" else (last, first)
        signals = {lost: {"better": won.text}}
    elif key == "b":
        signals = {answer: {"thumb": "down"} for answer in question.answers}
    else:
        signals = {first: {"text": f"a tie with {last.id}"}}
    if correction:
        for answer in question.answers:
            signals[answer] = signals.get(answer, {}) | {"correction": correction}
    return list(signals.items())


def keep_feedback(
    output: Path, application: str, feedback: Sequence[tuple[ReviewedAnswer, str, dict[str, Any]]]
) -> None:
    """Write feedback into the signed store; it is on disk when this returns.

    Args:
        feedback: (answer, name of the judge, signals).

    Raises:
        ConfigError: `xray serve --record` is writing to the store.
    """
    with recorded_lock(output):
        keys, rows = UserKeys(output / RECORDED / KEYS, writable=True), []
        for answer, judge, signals in feedback:
            user = keys.pseudonym(judge)
            identity = keys.feedback_id(application, user, answer.id, signals)
            texts = keys.encrypt(
                user, {"feedback": signals}, about("feedback", identity, answer.model), also=answer.user
            )
            rows.append(feedback_row(identity, answer.id, user, application, answer.model, texts))
        writer = SegmentWriter(output, None, NEVER_EXPIRES_DAYS)
        writer.write(rows, {}, {})
        writer.anchor()
