"""Evaluation and promotion gates."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.engines.layouts import check_one_row_each
from xray_runtime.engines.sampling_config import SamplingConfig
from xray_runtime.kernel.config.section import Count, Fraction, NonNegative, Positive, Section, UnitInterval
from xray_runtime.methods.common.environment import AnyEnvironment, check_turns
from xray_runtime.rewards.config import ExternalReward, JudgingConfig, RewardTerm
from xray_runtime.rewards.term import Term, source_names


class EvaluateConfig(SamplingConfig):
    """The trained policy compared with the SFT model on held-out prompts."""

    num_prompts: Annotated[int, Field(ge=8)] = 256
    bootstrap_samples: Annotated[int, Field(ge=100)] = 2000
    """Bootstrap resamples for the 95% intervals."""
    num_samples_shown: Annotated[int, Field(ge=1, le=200)] = 24
    """Number of sample pairs in the report's table."""
    tag_column: Annotated[str, Field(min_length=1)] | None = None
    """Column of the dataset with each prompt's tag, or its list of tags: results are also given for every tag that 8 or
    more of the prompts have."""
    environment: AnyEnvironment | None = None
    """The environment that answers the policies turn by turn; its rewards are reported but decide no wins."""

    @property
    def max_response_tokens(self) -> int:
        """Maximum number of tokens after a prompt."""
        return self.max_new_tokens if self.environment is None else self.environment.max_tokens

    @model_validator(mode="after")
    def _turns(self) -> Self:
        if self.environment is not None:
            check_turns(self.environment, self.max_new_tokens, self.stop)
        return self


class EvaluateSection(EvaluateConfig):
    """The evaluation of a lifecycle, with its judges."""

    judges: list[ExternalReward] = Field(default_factory=list)
    """Judges besides `gold`, each independent: functions, verifiers, services, models at an address. None of them may
    also be in `rewards`."""
    heldout_reward_model: Fraction | None = None
    """Share of the preference pairs that `reward` and `dpo` never see. A reward model trained on them acts as a judge.
    None: no such judge."""
    verdicts: Annotated[str, Field(min_length=1)] | None = None
    """Human verdicts on replies of the policy and of the SFT model: a REF of a dataset that `xray preferences`
    published."""


GOLD = "gold"
"""Name of the judge that `gold` names."""
PEOPLE = "people"
"""Name of the judge whose verdicts are the input `verdicts`."""


class EvaluationConfig(EvaluateConfig, JudgingConfig):
    """All fields of the stage kinds `evaluate` and `compare`. `rewards` are reported but decide no wins."""

    judges: list[RewardTerm] = Field(default_factory=list)
    """Judges besides `gold`, each independent. A source that the policy was trained against cannot be a judge. The sign
    of the weight says which direction is better; with weight 0 the source is reported but decides no wins."""

    @property
    def terms(self) -> dict[str, list[Term]]:
        return {"rewards": self.rewards, "judges": self.judges}

    @property
    def judging(self) -> list[str]:
        """Names of the judges."""
        named = zip(source_names(self.judges), self.judges, strict=True)
        return ([GOLD] if self.gold is not None else []) + [name for name, term in named if term.weight]

    @model_validator(mode="after")
    def _roles(self) -> Self:
        check_one_row_each(self.frozen, "num_prompts", self.num_prompts, "frozen")
        for field in ("rewards", "judges"):
            for number, term in enumerate(getattr(self, field)):
                for role in term.roles:
                    if not role.startswith(f"{field}."):
                        raise ValueError(f"{field}.{number}: {role!r} is not allowed: must be one of {field}")
        return self


class PromotionConfig(Section):
    """The gates between `candidate` and `champion`; None turns one off. They change no stage's results.

    Every independent judge must pass each gate on wins and scores."""

    min_win_rate: UnitInterval | None = 0.5
    """The lower end of the 95% Wilson interval of the win rate over the SFT model, over prompts without ties, must be
    above this. If all prompts tie, the gate fails."""
    max_kl: Positive | None = 20.0
    """Maximum KL to the SFT model, in nats per reply."""
    max_length_ratio: Annotated[float, Field(ge=1.0)] | None = 2.0
    """Maximum ratio of mean reply lengths, in either direction."""
    max_judge_drop: NonNegative | None = 0.0
    """If the training reward rises, no judge's mean score may fall by more than this: that indicates reward hacking."""
    max_regression: Annotated[float, Field(ge=0.0, le=0.5)] | None = 0.1
    """The lower end of the 95% interval of the win rate over the current champion (ties count half, same held-out
    prompts and seeds) may be at most this far below one half."""
    canary: bool = True
    """A candidate that had a canary beside the champion must have passed it."""
    allowed_licenses: list[Annotated[str, Field(min_length=1)]] | None = None
    """Allowed licences of every source of the candidate and of its reward models; None: not checked."""
    approvals: Count | None = None
    """How many of `approvers` must approve a candidate with `xray approve` before it is promoted. Unlike other gates it
    cannot be overridden at a promotion."""
    approvers: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(default_factory=list)
    """sha256 of the public key of each person: `openssl pkey -in KEY.pem -pubout | sha256sum`."""

    @model_validator(mode="after")
    def _enough_approvers(self) -> Self:
        people = len(set(self.approvers))
        if self.approvals is None and people:
            raise ValueError("approvals must be set, since approvers are")
        if self.approvals is not None and self.approvals > people:
            raise ValueError(f"approvals = {self.approvals} must be at most {people}, the number of approvers")
        return self
