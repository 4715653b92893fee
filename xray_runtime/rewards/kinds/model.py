"""A reward model among the stage's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from xray_runtime.rewards.kind import ModelTerm

if TYPE_CHECKING:
    from xray_runtime.algorithms.rewards import ModelScores

Role = Annotated[str, Field(pattern=r"^(rewards|judges)\.\d+$")]
"""An input: `rewards.0` is the first reward model, `judges.0` the first one that acts as a judge."""


class RewardModelTerm(ModelTerm, field="model"):
    """The score of a reward model, in units of its standard deviation."""

    model: Role
    """The reward model that scores."""

    @classmethod
    def given(cls, function: str | None, models: Sequence[str]) -> dict[str, str] | None:
        return {"model": models[0]} if len(models) == 1 else None

    @property
    def name(self) -> str:
        return self.model

    @property
    def roles(self) -> list[str]:
        return [self.model]

    @property
    def scaled_by(self) -> str:
        return self.model

    def combined(self, members: Sequence[ModelScores]) -> ModelScores:
        return members[0]


TERM = RewardModelTerm
