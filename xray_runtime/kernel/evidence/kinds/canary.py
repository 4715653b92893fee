"""Entries about canaries, and the rules that they repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.kernel.config.section import Count, Positive, Section, UnitInterval
from xray_runtime.kernel.evidence.view import FoldsInto, Line, LogView, SignedEntry
from xray_runtime.kernel.store.manifest import Sha256


class CanaryConfig(Section):
    """When a canary ends, and how. The signed log keeps these rules with each canary."""

    share: Annotated[float, Field(gt=0.0, le=0.5)] = 0.1
    """The share of users, or of conversations, that the candidate answers."""
    min_feedback: Count = 50
    """A canary passes only after this many people judged each model."""
    max_hours: Positive = 24.0
    """A canary that is still undecided after this many hours ends undecided."""
    max_loss: UnitInterval = 0.1
    """The candidate's mean feedback, from 0 to 1, may be this much below the champion's."""


class CanaryBegan(SignedEntry):
    """From here on a candidate answers a share of the requests, beside the champion."""

    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["canary"] = "canary"
    name: str
    """The registered model whose champion it is beside."""
    candidate: Sha256
    champion: Sha256
    first: int
    """Only recorded segments from this number on count."""
    rules: CanaryConfig
    by: str

    def fold(self, view: LogView, line: Line) -> None:
        view.state(Canaries)[line.sha256] = Canary(line.sha256, self)


class ArmResult(BaseModel):
    """The measurements of one of the two models."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    answers: int
    judges: int
    """People whose feedback counts: one value each."""
    feedback: float | None
    """Mean of these values, from 0 to 1."""
    feedback_low: float
    feedback_high: float
    users: int
    """People who were answered."""
    errors: float | None
    """Share of them whose first answer failed or broke off."""
    errors_low: float
    errors_high: float
    latency_s: float | None
    """Median seconds to the end of an answer; it decides nothing."""


Outcome = Literal["passed", "rolled back", "undecided"]


class CanaryEnded(SignedEntry):
    """A canary ended: the champion answers everything."""

    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["canary-end"] = "canary-end"
    canary: Sha256
    """The line of its beginning."""
    outcome: Outcome
    reason: str
    through: int
    """The last recorded segment that was read."""
    arms: dict[Literal["candidate", "champion"], ArmResult]

    def fold(self, view: LogView, line: Line) -> None:
        canaries = view.state(Canaries)
        if self.canary in canaries:
            # The first decision counts.
            canary = canaries[self.canary]
            canaries[self.canary] = Canary(canary.id, canary.began, canary.ended or self)


@dataclass(frozen=True)
class Canary:
    """A candidate that answers a share of the requests, or did."""

    id: str
    """Digest of the line of its beginning."""
    began: CanaryBegan
    ended: CanaryEnded | None = None


class Canaries(dict[str, Canary]):
    """By id, in order."""


KINDS = (CanaryBegan, CanaryEnded)
