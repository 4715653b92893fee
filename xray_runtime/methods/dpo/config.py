"""DPO and related methods: learning from preference pairs without a reward model and without sampling."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.config.section import Count, NonNegative, Positive, ValidationSchedule


class DPOValidation(ValidationSchedule):
    """The loss on pairs kept out of training, measured during training; the lowest is the best."""

    num_pairs: Count = 128
    """Approximate number of pairs to keep out of training. All pairs of a prompt are kept out together; `seed` draws
    the prompts."""


class DPOConfig(TrainingConfig):
    """Direct preference optimization (Rafailov et al. 2023) and related losses."""

    loss: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "simpo"] = "sigmoid"
    """`sigmoid`: DPO; `sigmoid_norm`: DPO with mean instead of summed log-ratios (Tülu 3); `ipo`: the squared distance
    to a gap of 1/(2 `beta`); `hinge`: SLiC's; `simpo`: mean log-probabilities without a reference."""
    beta: Positive = 0.1
    """Factor of the log-ratios. Larger values keep the policy closer to the reference. SimPO uses 2 or more."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Assumed share of wrong labels (cDPO), with `sigmoid`, `sigmoid_norm` and `simpo`."""
    gamma: NonNegative = 0.0
    """SimPO's target margin between the rewards of a pair; about half of `beta`."""
    lr: Positive = 2e-4
    epochs: Count = 1
    batch_size: Count = 32
    """Pairs per optimizer step, over all Workhorses."""
    validation: DPOValidation | None = None
    """None: train on all pairs and publish the last version."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return self.loss != "simpo"

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.label_smoothing and self.loss in ("ipo", "hinge"):
            raise ValueError(f"label_smoothing = {self.label_smoothing} must be 0 with loss = {self.loss!r}")
        if self.gamma and self.loss != "simpo":
            raise ValueError(f"gamma = {self.gamma} must be 0 with loss = {self.loss!r}: only 'simpo' uses it")
        return self
