"""Evaluation and the gates that read it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.config.engines import (
    Fraction,
    NonNegative,
    Positive,
    Section,
    UnitInterval,
)
from xray_runtime.config.environment import EnvironmentConfig
from xray_runtime.config.ppo import JudgingConfig
from xray_runtime.config.rewards import ExternalReward, RewardTerm, source_names
from xray_runtime.config.sampling import SamplingConfig


class EvaluateConfig(SamplingConfig):
    """The tuned policy against the SFT model on held-out prompts."""

    num_prompts: Annotated[int, Field(ge=8)] = 256
    bootstrap_samples: Annotated[int, Field(ge=100)] = 2000
    """Resamples behind the 95% intervals."""
    num_samples_shown: Annotated[int, Field(ge=1, le=200)] = 24
    """Sample pairs in the report's table."""
    environment: EnvironmentConfig | None = None
    """The environment that answers the policies turn by turn; its rewards are shown but do not judge."""

    @property
    def max_response_tokens(self) -> int:
        """Tokens that may follow a prompt."""
        return self.max_new_tokens if self.environment is None else self.environment.max_tokens

    @model_validator(mode="after")
    def _turns(self) -> Self:
        if self.environment is not None:
            self.environment.check_turns(self.max_new_tokens, self.stop)
        return self


class EvaluateSection(EvaluateConfig):
    """The evaluation of a lifecycle, with who judges."""

    judges: list[ExternalReward] = Field(default_factory=list)
    """Sources that judge beside `gold`, each by itself: functions, verifiers, services, models behind an address. None
    may be among `rewards`."""
    heldout_reward_model: Fraction | None = None
    """Share of the preference pairs that `reward` and `dpo` never see: a reward model that is trained on them judges.
    None: there is none."""
    verdicts: Annotated[str, Field(min_length=1)] | None = None
    """Human verdicts on replies of the policy and of the model before: a REF of a dataset that `xray preferences`
    published."""


GOLD = "gold"
"""Name of the judge that `gold` names."""
PEOPLE = "people"
"""Name of the judge whose verdicts are the input `verdicts`."""


class EvaluationConfig(EvaluateConfig, JudgingConfig):
    """All that the stage kinds `evaluate` and `compare` read. `rewards` are shown, and never decide a win."""

    judges: list[RewardTerm] = Field(default_factory=list)
    """Sources that judge beside `gold`, each by itself. What the policy was trained against cannot be one. A weight's
    sign says which way is better; 0: it is shown and does not judge."""

    @property
    def judging(self) -> list[str]:
        """Who decides wins, by name."""
        named = zip(source_names(self.judges), self.judges, strict=True)
        return ([GOLD] if self.gold is not None else []) + [name for name, term in named if term.weight]

    @model_validator(mode="after")
    def _roles(self) -> Self:
        for field in ("rewards", "judges"):
            for number, term in enumerate(getattr(self, field)):
                for role in term.roles:
                    if not role.startswith(f"{field}."):
                        raise ValueError(f"{field}.{number}: {role!r} is not allowed: must be one of {field}")
        return self


class PromotionConfig(Section):
    """The gates between `candidate` and `champion`; None turns one off. No stage reads them, so no result changes.

    Wins and scores are those of independent judges alone, and of each of them."""

    min_win_rate: UnitInterval | None = 0.5
    """The lower end of the 95% interval of the win rate over the SFT model must be above it (Wilson's, over the prompts
    that are not tied). Where all are tied nothing has improved, and the gate does not hold."""
    max_kl: Positive | None = 20.0
    """Nats a reply, to the SFT model."""
    max_length_ratio: Annotated[float, Field(ge=1.0)] | None = 2.0
    """Length of replies after to before, and before to after."""
    max_judge_drop: NonNegative | None = 0.0
    """While the reward rises that the policy was trained against, the mean score of no judge may fall by more: it is a
    sign of reward hacking."""
    max_regression: Annotated[float, Field(ge=0.0, le=0.5)] | None = 0.1
    """The lower end of the 95% interval of the win rate over the present champion, ties by half, on the same held-out
    prompts with the same seeds, must be less than this below one half."""
    allowed_licenses: list[Annotated[str, Field(min_length=1)]] | None = None
    """Everything that the candidate, or what rewarded it, was made from has one of these licences; None: not asked."""
