"""The config of the flywheel: how one cycle of recorded feedback becomes a candidate."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.kernel.config.section import Count, Section
from xray_runtime.kernel.evidence.kinds.canary import CanaryConfig
from xray_runtime.methods.curate.config import CurateConfig
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.kto.config import KTOConfig
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.reward_model.config import RewardConfig

WAYS = ("dpo", "kto", "ppo")


class RewardAndPPO(PPOStageConfig):
    """A reward model of a cycle's pairs, and a PPO stage that it scores, on the training prompts of `data`. The
    lifecycle's `rewards` are added to its score."""

    reward: RewardConfig = RewardConfig()


class FlywheelConfig(Section):
    """Each field can be set with `xray flywheel --set FIELD=VALUE`. The evaluation, its judges, the gates, the seed and
    the machine are those of the lifecycle in the same output directory."""

    rules: CurateConfig = CurateConfig()
    """The rules that turn feedback into training rows."""
    cycles: Count = 7
    """Train on the feedback of this many cycles, and evaluate on their recorded prompts."""
    dpo: DPOConfig | None = None
    """Learn from pairs; exactly one of `dpo`, `kto` and `ppo` is set."""
    kto: KTOConfig | None = None
    """Learn from single labels."""
    ppo: RewardAndPPO | None = None
    """Learn a reward model from pairs, and the policy from its scores."""
    min_rows: Count = 32
    """With fewer pairs or labels to train on, a cycle ends without training, and the next one includes them."""
    min_prompts: Annotated[int, Field(ge=8)] = 8
    """With fewer recorded prompts to evaluate on, likewise."""
    start: Annotated[str, Field(min_length=1)] | None = None
    """A REF of the policy to start from while there is no champion."""
    data: Annotated[str, Field(min_length=1)] | None = None
    """A REF of the dataset whose held-out prompts are the fixed set; by default the first that the policy was trained
    on."""

    canary: CanaryConfig | None = None
    """After its gates, the candidate answers this share of the requests to `xray serve --record`; None: no canary
    runs."""

    @model_validator(mode="after")
    def _method(self) -> Self:
        given = [name for name in WAYS if getattr(self, name) is not None]
        if len(given) != 1:
            reason = f"{' and '.join(given)} are" if given else "none is"
            raise ValueError(f"dpo: exactly one of dpo, kto and ppo must be set, such as dpo.epochs=1; {reason}")
        return self
