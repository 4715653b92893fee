"""An HTTP service: POST {prompts, messages, replies, reasoning, answers, columns} → {scores: [number or null]}."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xray_runtime.kernel.config.section import Count
from xray_runtime.rewards.kind import ExternalTerm
from xray_runtime.rewards.kinds._remote import RemoteConfig
from xray_runtime.rewards.source import Batch, Score, Source, failure
from xray_runtime.rewards.term import Recording

SENT = ("prompts", "messages", "replies", "reasoning", "answers", "columns")


class ServiceConfig(RemoteConfig):
    """POST {prompts, messages, replies, columns} → {scores: [number or null]}."""

    batch_size: Count = 32
    """Replies per request."""


class ServiceTerm(ExternalTerm, field="service", recording=Recording.RECORDED):
    """The scores of a service."""

    service: ServiceConfig

    @classmethod
    def identity(cls, fields: Mapping[str, Any]) -> Any:
        return fields["service"]["url"]

    def open(self, where: str, functions: Mapping[str, Callable[..., Any]]) -> Source:
        return ServiceSource(self.service)


TERM = ServiceTerm


class ServiceSource(Source):
    """A service that scores a few replies at a time."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config

    def score(self, batch: Batch) -> list[Score]:
        from xray_runtime.rewards.remote import ask_all

        size, rows = self._config.batch_size, range(len(batch.replies))
        parts = [batch.take(rows[start : start + size]) for start in rows[::size]]
        requests = [{name: getattr(part, name) for name in SENT} for part in parts]
        answers = ask_all(self._config, "", requests, lambda number, answer: _scores(parts[number], answer))
        return [
            score
            for part, answer in zip(parts, answers, strict=True)
            for score in ([answer] * len(part.replies) if isinstance(answer, Score) else answer)
        ]


def _scores(batch: Batch, answer: Any) -> list[Score]:
    from xray_runtime.kernel.bounded_http import AnswerError

    scores = answer.get("scores") if isinstance(answer, dict) else None
    count = len(batch.replies)
    if not isinstance(scores, list) or len(scores) != count or not all(map(_allowed, scores)):
        raise AnswerError(f"the answer must be {{scores: [{count} numbers or null]}}, not {str(answer)[:200]}")
    return [failure("the service gave no score") if score is None else Score(float(score)) for score in scores]


def _allowed(score: Any) -> bool:
    # Python's JSON parser accepts NaN and Infinity.
    return score is None or (type(score) in (int, float) and abs(score) < 1e300)
