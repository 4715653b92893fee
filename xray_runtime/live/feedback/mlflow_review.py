"""Review in MLflow: recorded answers are shown there as traces, and what people say of them becomes feedback.

An assessment becomes a row of the signed store, like feedback by the API, so the rules of `curate` hold for it: gold
questions, agreement, shares. What cannot be attributed is a finding and is not taken: an unknown judge, an answer that
was never recorded, a trace that names another model. What we wrote into MLflow ourselves is not read back.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.recorded import ChainView, RecordedReader
from xray_runtime.kernel.history.recorded_rows import KEYS, RECORDED, UserKeys
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.tracking.registry_view import RegistryView
from xray_runtime.kernel.tracking.traces import TRACE, AnswerTraces, Assessment, ShownAnswer, ShownTrace
from xray_runtime.live.feedback.answers import SIGNALS, parse_feedback
from xray_runtime.live.feedback.collection import sound_chain
from xray_runtime.live.feedback.dataset import require_tracking
from xray_runtime.live.feedback.recorded_review import ReviewedAnswer, answer_of, prompt_of
from xray_runtime.live.serving.config import ReviewsConfig

FIELDS = ("messages", "input", "instructions", "prompt", "tools")
"""Fields of a request that a trace shows; others, such as `user`, may name people."""
MAX_OF_ANSWER = 20
"""Most feedback about one answer, as the API takes."""

Take = Callable[[Sequence[tuple[ReviewedAnswer, str, dict[str, Any]]]], None]
"""Keeps feedback: (answer, name of the judge, signals)."""


@dataclass
class Reviewed:
    """The counts of one synchronization."""

    written: int = 0
    """Traces."""
    assessed: int = 0
    """Signals of recorded feedback that MLflow shows now and did not before."""
    removed: int = 0
    """Traces and assessments whose texts were withdrawn, have expired or were replaced."""
    taken: int = 0
    """New feedback by people in MLflow."""
    waiting: int = 0
    """More than `most_of_one`; the next time takes it."""
    queue: dict[str, int] = field(default_factory=dict)
    """Status → number of the queue's items."""
    findings: list[str] = field(default_factory=list)
    """A statement that was not taken, and why."""


class _Store:
    """The recorded answers that may be shown.

    Raises:
        ConfigError: what was recorded is not sound, or nothing was recorded.
    """

    def __init__(self, store: LineageStore) -> None:
        self.chain: ChainView = sound_chain(store)
        if not self.chain.segments:
            raise ConfigError(f"--output: nothing is recorded in {str(store.output)!r}: `xray serve --record` records")
        self.keys = UserKeys(store.output / RECORDED / KEYS, writable=False)
        self.answers = dict[str, dict[str, Any]]()
        """Newest first."""
        self.known = set[str]()
        """Ids of all answers."""
        self.feedback = defaultdict[str, list[dict[str, Any]]](list)
        """Answer → readable rows about it, the oldest first."""
        self.unreadable = set[str]()
        """Ids of feedback that was withdrawn."""
        self.withdrawn = dict[str, float]()
        """Pseudonym → milliseconds since 1970 when the person's data was withdrawn last."""
        for row in RecordedReader(store.output).rows(None, (), None):
            if row["kind"] == "answer":
                self.known.add(row["id"])
                # An answer that one application alone may judge is not shown to others.
                if row["texts"] is not None and row["complete"] and not row["application"]:
                    self.answers[row["id"]] = row
            elif row["texts"] is None:
                self.unreadable.add(row["id"])
            else:
                self.feedback[row["answer"]].insert(0, row)
        for entry in view(store.output).state(Withdrawals):
            kind, _, pseudonym = entry.subject.partition(" ")
            if kind == "user":
                self.withdrawn[pseudonym] = 1000 * datetime.fromisoformat(entry.at).timestamp()

    def is_gone(self, trace: ShownTrace) -> bool:
        """Whether the answer of a trace was withdrawn, or has expired."""
        oldest = min(at for number, at in self.chain.made.items() if number in self.chain.segments)
        expired = self.chain.expired > 0 and trace.at_ms < 1000 * oldest.timestamp()
        return trace.answer in self.known or expired


def synchronize(store: LineageStore, project: str, config: ReviewsConfig, take: Take) -> Reviewed:
    """Show recorded answers and feedback in MLflow, and take the feedback that people gave there. Safe to repeat.

    Args:
        project: MLflow's experiment.

    Raises:
        ConfigError: what was recorded is not sound, or no MLflow is known.
    """
    uri = require_tracking(store)
    done = _Synchronization(_Store(store), AnswerTraces(uri, project, store.artifacts), config)
    done.write(RegistryView(uri).model_of)
    done.take(take)
    done.assess()
    done.fill_queue()
    return done.result


class _Synchronization:
    def __init__(self, recorded: _Store, traces: AnswerTraces, config: ReviewsConfig) -> None:
        self._recorded, self._traces, self._config = recorded, traces, config
        self._shown = dict[str, ShownTrace]()
        """Traces of answers that may be shown."""
        self.result = Reviewed()
        for answer, trace in traces.read().items():
            self._sort(answer, trace)

    def _sort(self, answer: str, trace: ShownTrace) -> None:
        row, name = self._recorded.answers.get(answer), f"trace {TRACE}{answer}"
        if row is not None and trace.model != row["model"]:
            self._found(name, f"it names the model {trace.model[:12]!r}, and {row['model'][:12]} answered")
        elif row is not None:
            self._shown[answer] = trace
        elif self._recorded.is_gone(trace):
            self._traces.remove([answer])
            self.result.removed += 1
        else:
            self._found(name, "no such answer was recorded")

    def _found(self, name: str, problem: str) -> None:
        self.result.findings.append(f"{name}: {problem}; it is not taken")

    def write(self, model_of: Callable[[str], str | None]) -> None:
        """Write the traces that are missing."""
        refused = {finding.partition(":")[0] for finding in self.result.findings}
        for id, row in list(self._recorded.answers.items())[: self._config.limit]:
            if id not in self._shown and f"trace {TRACE}{id}" not in refused:
                self._traces.write(_shown(row), model_of(row["model"]))
                self._shown[id] = ShownTrace(id, row["model"], row["at_ms"], ())
                self.result.written += 1

    def take(self, take: Take) -> None:
        """Take the new statements of people, the oldest first."""
        statements = [(trace, each) for trace in self._shown.values() for each in trace.assessments]
        counts, new = Counter[str](), []
        for trace, each in sorted(statements, key=lambda pair: (pair[1].at_ms, pair[1].id)):
            row = self._recorded.answers[trace.answer]
            signals = self._new_signals(trace, each)
            if signals is not None and counts[each.judge] < self._config.most_of_one:
                counts[each.judge] += 1
                answer = ReviewedAnswer(row["id"], row["model"], answer_of(row["texts"]), row["user"])
                new.append((answer, each.judge, signals))
            elif signals is not None:
                self.result.waiting += 1
        if new:
            take(new)
        self.result.taken = len(new)

    def _new_signals(self, trace: ShownTrace, statement: Assessment) -> dict[str, Any] | None:
        """An assessment as feedback; None if it is not taken."""
        if not statement.is_person or statement.name not in SIGNALS:
            return None
        name = f"{statement.name} by {statement.judge} on {TRACE}{trace.answer}"
        judge = self._recorded.keys.pseudonym(statement.judge)
        withdrawn_at = self._recorded.withdrawn.get(judge, -1)
        if statement.feedback in self._recorded.unreadable or statement.at_ms <= withdrawn_at:
            self._remove(trace, statement)
        elif statement.feedback is not None:
            if not self._is_ours(trace, statement):
                self._found(name, f"it is not the feedback {statement.feedback!r} that it names")
        elif statement.judge not in self._config.judges:
            self._found(name, f"the judge is not one of {', '.join(self._config.judges)}")
        else:
            signals = {statement.name: statement.value}
            if statement.comment and statement.name != "text":
                signals["text"] = statement.comment
            problem = self._problem(trace, judge, statement, signals)
            if problem:
                self._found(name, problem)
            return signals if problem is None else None
        return None

    def _remove(self, trace: ShownTrace, statement: Assessment) -> None:
        self._traces.remove_assessment(trace.answer, statement.id)
        self.result.removed += 1

    def _is_ours(self, trace: ShownTrace, statement: Assessment) -> bool:
        """Whether an assessment agrees with the recorded feedback that it names."""
        rows = [row for row in self._recorded.feedback[trace.answer] if row["id"] == statement.feedback]
        return any(
            row["user"] == statement.judge and _signals(row).get(statement.name) == statement.value for row in rows
        )

    def _problem(self, trace: ShownTrace, judge: str, statement: Assessment, signals: Mapping[str, Any]) -> str | None:
        """Why an assessment is not taken; empty where the store knows it or something newer; None: it is taken."""
        try:
            parse_feedback(json.dumps({"answer": trace.answer, **signals}).encode())
        except (ConfigError, TypeError) as error:
            return str(error)
        rows = self._recorded.feedback[trace.answer]
        same = [row for row in rows if row["user"] == judge and statement.name in _signals(row)]
        if same and (_signals(same[-1]) == signals or same[-1]["at_ms"] >= statement.at_ms):
            return ""
        if any(_signals(row) == signals for row in same):
            return "the judge went back to an earlier verdict, which counts once"
        if len(rows) >= MAX_OF_ANSWER:
            return f"there are {len(rows)} feedback about this answer already"
        return None

    def assess(self) -> None:
        """Show the latest feedback from outside MLflow."""
        for answer, trace in self._shown.items():
            last = {(row["user"], name): row for row in self._recorded.feedback[answer] for name in _signals(row)}
            people = [each for each in trace.assessments if each.is_person]
            theirs = {
                (self._recorded.keys.pseudonym(each.judge), name)
                for each in people
                if each.feedback is None
                for name in ((each.name, "text") if each.comment else (each.name,))
            }
            ours = {(each.judge, each.name): each for each in people if each.feedback is not None}
            for (judge, name), row in last.items():
                old = ours.get((judge, name))
                if name not in SIGNALS or (judge, name) in theirs or (old and old.feedback == row["id"]):
                    continue
                if old is not None:
                    self._remove(trace, old)
                self._traces.assess(answer, row["id"], judge, {name: _signals(row)[name]})
                self.result.assessed += 1

    def fill_queue(self) -> None:
        """Queue answers without a judgement, and mark those that have one."""
        queue = self._traces.open_queue(self._config.queue, self._config.judges)
        items, feedback = queue.items(), self._recorded.feedback
        queue.add([answer for answer in self._shown if not feedback[answer] and TRACE + answer not in items])
        for item, status in items.items():
            answer = item.removeprefix(TRACE)
            if answer not in self._shown:
                self._found(f"item {item} of the queue", "no such answer may be shown")
            elif feedback[answer] and status == "pending":
                queue.complete(answer, feedback[answer][-1]["user"])
        self.result.queue = dict(Counter(queue.items().values()))


def _shown(row: Mapping[str, Any]) -> ShownAnswer:
    texts = row["texts"]
    return ShownAnswer(
        id=row["id"],
        model=row["model"],
        user=row["user"],
        at_ms=row["at_ms"],
        latency_s=row["latency_s"],
        prompt=prompt_of(texts),
        reply=answer_of(texts),
        request={name: value for name, value in texts.get("request", {}).items() if name in FIELDS},
        answer=texts.get("answer", {}),
    )


def _signals(row: Mapping[str, Any]) -> dict[str, Any]:
    feedback = row["texts"].get("feedback")
    return feedback if isinstance(feedback, dict) else {}
