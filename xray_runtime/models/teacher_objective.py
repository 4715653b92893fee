"""A frozen teacher: what it gives the tokens that a student sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xray_runtime.data.batch import Scores
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Forward, Objective, Texts, last_hidden, of_responses, response_logprobs


@dataclass(frozen=True)
class TeacherObjective(Objective[Forward[Any]]):
    """Log-probabilities at the student's temperature."""

    temperature: float

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        logprobs, _ = response_logprobs(module, last_hidden(module, rows), rows, self.temperature)
        return Scores(teacher_logprobs=of_responses(logprobs, rows))
