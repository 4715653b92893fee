"""A model at an OpenAI-compatible address that scores each reply by a rubric, or compares replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xray_runtime.rewards.kind import ExternalTerm
from xray_runtime.rewards.kinds.judge.config import JudgeConfig
from xray_runtime.rewards.source import Source
from xray_runtime.rewards.term import Recording


class JudgeTerm(ExternalTerm, field="judge", recording=Recording.RECORDED):
    """The verdicts of a model."""

    judge: JudgeConfig

    @property
    def columns(self) -> dict[str, str]:
        column = self.judge.column
        return super().columns | ({} if column is None else {"judge.column": column})

    @property
    def compares(self) -> bool:
        return self.judge.opponents is not None

    @classmethod
    def identity(cls, fields: Mapping[str, Any]) -> Any:
        # The same model with another rubric is the same judge.
        return fields["judge"]["url"], fields["judge"]["model"]

    def open(self, where: str, functions: Mapping[str, Callable[..., Any]]) -> Source:
        from xray_runtime.rewards.kinds.judge.pairwise import PairwiseJudgeSource
        from xray_runtime.rewards.kinds.judge.pointwise import JudgeSource

        return (PairwiseJudgeSource if self.compares else JudgeSource)(self.judge)


TERM = JudgeTerm
