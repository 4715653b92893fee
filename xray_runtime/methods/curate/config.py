"""The rules by which recorded feedback becomes training data."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.kernel.config.section import Count, Fraction, Section, UnitInterval
from xray_runtime.kernel.config.sources import Source

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class CurateConfig(Section):
    """The rules; every row that one of them drops is counted by its reason."""

    min_judges: Count = 1
    """Fewest people whose thumbs, scores or verdicts on the same replies decide a label. Corrections and better answers
    have one author, so only the other rules bound them."""
    min_agreement: Annotated[float, Field(gt=0.5, le=1.0)] = 0.6
    """Least share of these people who agree; what is below goes to disagreements.jsonl."""
    good_score: UnitInterval = 0.7
    """A score of at least this is a thumb up."""
    bad_score: UnitInterval = 0.3
    """A score of at most this is a thumb down; between the two it is dropped."""
    gold: Source | None = None
    """A .jsonl file of questions with known answers: `{"prompt", "reply", "good": true}` or `{"prompt", "chosen",
    "rejected"}`. They test judges and are never trained on."""
    min_gold: Count = 3
    """Gold questions that a judge must have answered before their accuracy counts."""
    min_gold_accuracy: UnitInterval = 0.7
    """Judges with a lower accuracy are left out."""
    min_judge_agreement: UnitInterval | None = 0.35
    """Judges who agree with the majority of the others on a smaller share of the replies that they share are left out;
    None: no judge is."""
    min_shared: Count = 10
    """Number of shared replies before that counts."""
    near_duplicate: Share | None = 0.8
    """Prompts and replies at least this similar (Jaccard, 4 characters) count once; None: only equal ones do."""
    max_share: Share | None = 0.1
    """Largest share of a cycle's pairs, labels or demonstrations that may come from one person; None: no limit."""
    max_application_share: Share | None = None
    """Likewise for one application. An application names its users itself, so whoever has its key can invent people.
    None, the default: no limit. A limit below 1/n with n applications leaves nothing, and a small application would cut
    a large one down to its size; set a limit if several applications of similar size send feedback."""
    heldout_fraction: Fraction = 0.1
    """Share of the users, and of the conversations, that is never trained on, the same ones in each cycle."""
    min_alpha: Annotated[float, Field(ge=-1.0, le=1.0)] | None = None
    """The last cycle is held for a person if Krippendorff's α of its judges is below this."""
    max_good_change: Share | None = 0.25
    """It is held if its share of good labels differs from the cycles before by more, beyond chance (z > 3)."""
    max_volume_ratio: Annotated[float, Field(gt=1.0)] | None = 5.0
    """It is held if it has this many times more feedback than the cycles before had on average, or than 1 / this."""
    released: Annotated[str, Field(min_length=1)] | None = None
    """The name of the person who releases a cycle that is held, and their reason; it is recorded."""

    @model_validator(mode="after")
    def _scores(self) -> Self:
        if self.bad_score >= self.good_score:
            raise ValueError(f"bad_score = {self.bad_score} must be below good_score = {self.good_score}")
        return self


class RecordedPromptsConfig(Section):
    """Recorded prompts to evaluate on: those of the conversations that `curate` never trains on."""

    heldout_fraction: Fraction = 0.1
    """That of `curate`."""
    max_share: Share | None = 0.1
    """Largest share of the prompts that one person asked; None: no limit."""
