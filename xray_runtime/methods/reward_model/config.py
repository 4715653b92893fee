"""The reward model: trained here, or an existing one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.config.section import Count, NonNegative, Positive, Section
from xray_runtime.kernel.config.sources import Source


class RewardConfig(TrainingConfig):
    """A pairwise Bradley–Terry reward model, initialized from the SFT model."""

    lr: Positive = 1e-3
    epochs: Count = 2
    batch_size: Count = 64
    """Pairs per optimizer step, over all Workhorses."""
    weight_decay: NonNegative = 0.01


class RewardBase(Section):
    """A Hugging Face sequence-classification model with one label, as a reward model."""

    model: Source
    """A hub name or a directory, `Skywork/Skywork-Reward-V2-Qwen3-0.6B` for example."""
    num_replies: Annotated[int, Field(ge=8)] = 256
    """Number of held-out human replies whose scores give the mean and deviation for reward scaling."""


class RewardBaseConfig(RewardBase):
    """All fields of the stage kind `reward_base`."""

    frozen: FrozenConfig = FrozenConfig()
    """Its layout while it scores those replies."""
