"""On-policy distillation: a stage of `ppo` whose reward, if it has any, is beside a teacher."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from xray_runtime.kernel.config.section import Count, Positive
from xray_runtime.kernel.config.sources import is_function
from xray_runtime.methods.ppo.config import AdvantagesName, KLConfig, PolicyLossName, PPOConfig
from xray_runtime.methods.ppo.distillation_config import DistillationConfig
from xray_runtime.methods.ppo.watch import WatchConfig


class DistillConfig(PPOConfig):
    """Distillation on the policy's own samples: the reverse KL to the teacher at each sampled token, without critic or
    group. The fields are those of `ppo` with other defaults; `rewards` are optional and count beside the teacher."""

    distillation: DistillationConfig = DistillationConfig()
    loss: PolicyLossName = "cispo"
    """As of `ppo`. `cispo`: the ratio to the policy before the update, bounded above, weights each token's gradient;
    the importance weight of that policy to the sampler, bounded by `importance_cap`, is the other factor."""
    clip_range_high: Positive | None = 4.0
    epochs: Count = 1
    dual_clip: float | None = Field(default=None, gt=1.0)
    advantages: AdvantagesName = "reinforce++"
    """As of `ppo`, of `rewards`; without any they are 0, and only the teacher's are left."""
    whiten_advantages: bool = False
    kl: KLConfig = KLConfig(controller="fixed", coef=0.0)
    """The KL to the reference, which is opened where `coef` is not 0 or a function of yours may read it."""
    stop_kl: Positive | None = None
    watch: WatchConfig = WatchConfig(action="off")

    @property
    def has_reference(self) -> bool:
        return bool(self.kl.coef) or is_function(self.loss) or is_function(self.advantages)

    @model_validator(mode="after")
    def _teaches(self) -> Self:
        if not self.distillation.coef and not (is_function(self.loss) or is_function(self.advantages)):
            raise ValueError(
                "distillation.coef = 0 must be above 0 without a loss or advantages of your own: nothing would learn "
                "from the teacher"
            )
        return self
