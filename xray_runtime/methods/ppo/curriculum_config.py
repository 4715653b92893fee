"""The order in which a stage draws its prompts."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import model_validator

from xray_runtime.kernel.config.section import Count, Section, UnitInterval
from xray_runtime.kernel.config.sources import BuiltInOrFunction


class CurriculumConfig(Section):
    """Draws prompts by what the policy can do, by a column, or by your own weights."""

    by: Annotated[str, BuiltInOrFunction(("success", "column"))]
    """`success`: at random, but a prompt that the last replies almost all solved, or almost none, rests. `column`: each
    epoch goes from the lowest to the highest number in `column` (Bengio et al. 2009). Or your own function of
    `PromptStatistics`, which returns a weight for each prompt; they are drawn by it, without replacement."""
    column: str | None = None
    """A numeric column of the dataset, with `by: column`."""
    solved_at: float = 1.0
    """A reply solves its prompt if its reward, before scaling, is at least this."""
    easy: UnitInterval = 1.0
    """A prompt rests if at least this share of its last replies solved it …"""
    hard: UnitInterval = 0.0
    """… or at most this share."""
    rest: Count = 4
    """How many of its turns a resting prompt misses. It comes back then: the policy has changed."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if (self.by == "column") != (self.column is not None):
            wanted = "be given" if self.by == "column" else "be left out"
            raise ValueError(f"column = {self.column!r} must {wanted} with by = {self.by!r}")
        given = sorted({"easy", "hard", "rest"} & self.model_fields_set)
        if given and self.by != "success":
            raise ValueError(f"{given[0]} = {getattr(self, given[0])!r} must be left out with by = {self.by!r}")
        if self.hard >= self.easy:
            raise ValueError(f"hard = {self.hard} must be below easy = {self.easy}")
        return self


def check_order(curriculum: CurriculumConfig | None, samples_per_prompt: int, *, in_flight: bool) -> None:
    """Raises ValueError if the rest of a stage's config leaves the curriculum nothing to go by."""
    if curriculum is None:
        return
    if curriculum.by == "success" and samples_per_prompt < 2:
        raise ValueError(
            f"samples_per_prompt = {samples_per_prompt} must be at least 2 with curriculum.by = 'success': a single "
            "reply says little of its prompt"
        )
    if in_flight:
        raise ValueError(
            "curriculum must be left out with in_flight_updates = True: episodes begin before rewards are known"
        )
