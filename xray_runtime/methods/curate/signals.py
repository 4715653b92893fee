"""Judgements of people on replies, from recorded feedback and from verdicts, in one form."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from xray_runtime.data.pairs import Messages, prompt_text
from xray_runtime.data.spans import words_of

Label = Literal["up", "down", "a", "b", "tie", "bad", "better", "correction"]
RATINGS, VERDICTS = ("up", "down"), ("a", "b", "tie", "bad")
TEXTS: tuple[Literal["better", "correction"], ...] = ("better", "correction")


class Signal(NamedTuple):
    """One judgement of one person."""

    id: str
    cycle: int
    """Number of the collection, the oldest first."""
    judge: str
    asker: str
    """The user who was answered; empty: unknown."""
    prompt: Messages
    reply: str
    other: str
    """The second reply of a verdict, or the judge's own text; empty for ratings."""
    label: Label
    application: str = ""
    """The application that sent it; empty: none did."""

    @property
    def unit(self) -> tuple[str, ...]:
        """Signals with the same unit are about the same thing."""
        kind = "rating" if self.label in RATINGS else "verdict" if self.label in VERDICTS else self.label
        return kind, prompt_text(self.prompt), self.reply, self.other


def conversation_of(prompt: Messages) -> str:
    """The identity of a conversation, whoever has it: the words of its first user message."""
    first = next((message["content"] for message in prompt if message["role"] == "user"), "")
    return hashlib.sha256(" ".join(words_of(first)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def from_feedback(
    rows: Iterable[Mapping[str, Any]], cycle: int, good_score: float, bad_score: float
) -> Iterator[Signal | tuple[str, str]]:
    """The signals of a collection's feedback; (reason, id) for what says nothing that can be trained on. `rows` are
    lines of feedback.jsonl: `id`, `judge`, `asker`, `prompt`, `reply`, `signals`, and `application` if one sent it."""
    for row in rows:
        signals, about = row["signals"], (row["judge"], row["asker"], row["prompt"], row["reply"])
        application = row.get("application", "")
        rating = _rating(signals, good_score, bad_score)
        found = [] if rating is None else [Signal(row["id"], cycle, *about, "", rating, application)]
        for name in TEXTS:
            if name in signals and signals[name].strip() and signals[name] != row["reply"]:
                found.append(Signal(f"{row['id']}-{name}", cycle, *about, signals[name], name, application))
        if found:
            yield from found
        else:
            yield ("score_between" if "score" in signals else "only_text"), row["id"]


def _rating(signals: Mapping[str, Any], good: float, bad: float) -> Literal["up", "down"] | None:
    if "thumb" in signals:
        return "up" if signals["thumb"] == "up" else "down"
    score = signals.get("score")
    if score is None or bad < score < good:
        return None
    return "up" if score >= good else "down"


def from_verdicts(rows: Iterable[Mapping[str, Any]], cycle: int) -> Iterator[Signal | tuple[str, str]]:
    """The signals of published verdicts (`judgements.jsonl`); (reason, id) for skips and equal replies."""
    swapped: dict[str, Label] = {"a": "b", "b": "a"}
    for row in rows:
        label, a, b = row["verdict"], row["a"], row["b"]
        id = f"{row['session']}-{row['number']}-{row['judge']}"
        if label not in VERDICTS or a == b:
            yield ("skipped" if label not in VERDICTS else "same_replies"), id
            continue
        # The order of the two must not depend on who was a and who b.
        if b < a:
            a, b, label = b, a, swapped.get(label, label)
        yield Signal(id, cycle, row["judge"], "", row["prompt"], a, b, label)
