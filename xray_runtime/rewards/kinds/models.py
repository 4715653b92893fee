"""An ensemble of reward models among the stage's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from xray_runtime.kernel.config.section import NonNegative
from xray_runtime.rewards.kind import ModelTerm
from xray_runtime.rewards.kinds.model import Role

if TYPE_CHECKING:
    from xray_runtime.algorithms.rewards import ModelScores


class EnsembleTerm(ModelTerm, field="models"):
    """The mean of the members' standardized scores minus `uncertainty` × their variance (UWO, Coste et al. 2023)."""

    models: Annotated[list[Role], Field(min_length=2)]
    """The reward models that score together."""
    uncertainty: NonNegative = 0.5

    @classmethod
    def given(cls, function: str | None, models: Sequence[str]) -> dict[str, Sequence[str]] | None:
        return {"models": models} if len(models) > 1 else None

    @property
    def name(self) -> str:
        return "+".join(self.models)

    @property
    def roles(self) -> list[str]:
        return self.models

    def combined(self, members: Sequence[ModelScores]) -> ModelScores:
        from xray_runtime.algorithms.rewards import ensemble

        return ensemble(members, self.uncertainty)


TERM = EnsembleTerm
