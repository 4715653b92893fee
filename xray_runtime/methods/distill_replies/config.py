"""Distillation on replies that are there already."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.config.section import Count, NonNegative, Positive, Section, UnitInterval
from xray_runtime.rewards.term import Column


class LoggedConfig(Section):
    """A teacher's answers: for each token of a reply, with the end of its turn, as many likeliest tokens as `top_k`."""

    ids: Column
    """The column of the dataset with their ids: a list for each token of the reply."""
    logprobs: Column
    """The column with their log-probabilities, as logged."""


class DistillRepliesConfig(TrainingConfig):
    """Distillation on a dataset's replies, as a teacher's: the divergence from the teacher's distribution at each token
    of the reply. SFT on the replies needs no teacher."""

    lr: Positive = 1e-3
    steps: Count = 300
    """Optimizer steps."""
    batch_size: Count = 64
    """Replies per optimizer step, over all Workhorses."""
    max_response_tokens: Annotated[int, Field(ge=2)] | None = None
    """As of `sft`."""
    beta: UnitInterval = 0.0
    """The generalized Jensen-Shannon divergence (GKD): 0 is the forward KL(T ‖ π), 1 the reverse KL(π ‖ T)."""
    top_k: Annotated[int, Field(ge=1, le=4096)] | None = 64
    """The teacher's likeliest tokens, which are compared; all others count as one. None: the whole vocabulary, of at
    most 8,192 tokens."""
    temperature: Positive = 1.0
    """Temperature of both distributions."""
    nll_coef: NonNegative = 0.0
    """Weight of SFT's loss beside the divergence."""
    logged: LoggedConfig | None = None
    """Columns of the dataset in place of a teacher."""
    frozen: FrozenConfig = FrozenConfig()
    """The layout of the teacher."""
