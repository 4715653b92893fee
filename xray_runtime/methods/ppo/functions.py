"""The loss and the advantages of a stage: which functions they are, what they read, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xray_runtime.algorithms.checking import advantage_reads, check_advantages, check_loss, loss_reads
from xray_runtime.algorithms.estimators import ESTIMATORS, AdvantageEstimator
from xray_runtime.algorithms.losses import POLICY_LOSSES, PolicyLoss
from xray_runtime.algorithms.rewards import MovingMeans, lowest_where_cut
from xray_runtime.algorithms.streams import COLUMN, TOPK, StreamError
from xray_runtime.data.gold import import_function
from xray_runtime.kernel.config.sources import is_function
from xray_runtime.methods.ppo.config_checks import check_correction, check_reported
from xray_runtime.methods.ppo.preset import PRESETS

if TYPE_CHECKING:
    from xray_runtime.algorithms.chosen_tokens import TokenChoice
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.methods.ppo.config import PPOConfig, PPOStageConfig
    from xray_runtime.methods.ppo.curriculum import WeightFunction
    from xray_runtime.methods.ppo.kind import PPOInputs


def built_in_loss(name: str) -> PolicyLoss:
    """The policy loss `name`, of `POLICY_LOSSES` or of a preset."""
    found = POLICY_LOSSES.get(name) or PRESETS.get(name).loss
    assert found is not None
    return found


def built_in_advantages(name: str) -> AdvantageEstimator:
    """The estimator `name`, of `ESTIMATORS` or of a preset."""
    found = ESTIMATORS.get(name) or PRESETS.get(name).advantages
    assert found is not None
    return found


@dataclass(frozen=True)
class Functions:
    """The functions that compute the loss and the advantages of a stage."""

    loss: PolicyLoss
    advantages: AdvantageEstimator
    scores_policy: bool
    """Whether the policy scores each rollout before the update. False: nothing reads that, and a few rows are scored to
    compare generator and trainer."""
    chooses: TokenChoice | None
    """Chooses the tokens that the loss reads as `chosen`."""
    loss_reads: frozenset[str]
    advantage_reads: frozenset[str]

    @property
    def reads(self) -> frozenset[str]:
        """All streams that they read."""
        return self.loss_reads | self.advantage_reads

    @property
    def read_columns(self) -> bool:
        """Whether they read columns of the dataset."""
        return any(name.startswith(COLUMN) for name in self.reads)

    @property
    def read_top(self) -> bool:
        """Whether they read the sampler's likeliest tokens."""
        return not self.reads.isdisjoint(TOPK)

    @staticmethod
    def of(
        config: PPOStageConfig, loss: PolicyLoss | None = None, advantages: AdvantageEstimator | None = None
    ) -> Functions:
        """Those of a config; `loss` and `advantages` are the user's, if it names functions.

        Raises ValueError, one line: a function reads what is not there, or the importance weights do not fit the loss.
        """
        loss = loss or built_in_loss(config.loss)
        advantages = advantages or built_in_advantages(config.advantages)
        by_loss, by_advantages = loss_reads(loss, config.loss), advantage_reads(advantages, config.advantages)
        check_correction(config, "rollout_logprobs" in by_loss and "old_logprobs" not in by_loss)
        chooses = PRESETS.get(config.loss).chooses if config.loss in PRESETS else None
        if "chosen" in by_loss and chooses is None:
            reason = "chosen is not allowed: it needs a method that chooses tokens, as kl_cov"
            raise StreamError(f"loss: {config.loss}: {reason}")
        # A value head, and models with the policy's frozen trunk, are computed in the same pass.
        beside = config.critic_in_use == "shared" or config.trainable_layers is not None
        reads = "old_logprobs" in by_loss | by_advantages
        taught = config.distillation is not None
        scored = reads or beside or taught or config.importance_correction != "none"
        if "teacher_logprobs" in by_loss | by_advantages and not taught:
            field, name = ("loss", config.loss) if "teacher_logprobs" in by_loss else ("advantages", config.advantages)
            raise ValueError(
                f"{field}: {name}: teacher_logprobs is not allowed: it needs a teacher: pass `teacher` and set "
                "`distillation`"
            )
        return Functions(loss, advantages, scored, chooses, by_loss, by_advantages)

    @staticmethod
    def of_stage(stage: Stage[PPOConfig, PPOInputs]) -> Functions:
        """Those of a stage, the user's own after `check_loss` and `check_advantages`. Raises ValueError as they."""
        config = stage.config
        loss = user_function(stage, "loss", config.loss, lambda f, name: check_loss(f, name, gradient=False))
        made = Functions.of(config, loss, user_function(stage, "advantages", config.advantages, check_advantages))
        for part, read in (("loss", made.loss_reads), ("advantages", made.advantage_reads)):
            if not read.isdisjoint(TOPK):
                name = f"{part} = {getattr(config, part)!r}, which reads the likeliest tokens,"
                check_reported(config, name, config.top_logprobs)
        return made


def user_function(stage: Stage[PPOConfig, PPOInputs], field: str, name: str, check: Callable[[Any, str], None]) -> Any:
    """The user's function `name` of a config field, checked; None if it is a built-in."""
    if not is_function(name):
        return None
    function = stage.functions.get(name) or import_function(name, field)
    check(function, name)
    return function


def weight_function(stage: Stage[PPOConfig, PPOInputs]) -> WeightFunction | None:
    """The user's function of a curriculum."""
    curriculum = stage.config.curriculum
    return None if curriculum is None else user_function(stage, "curriculum.by", curriculum.by, lambda *_: None)


@dataclass(frozen=True)
class RowFacts:
    """Facts of a rollout's rows beside its columns, for functions that read them."""

    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Column of the dataset → its value in each row [B], None where the row lacks it."""
    sources: Mapping[str, Tensor] = field(default_factory=dict)
    """Source of reward → its raw score of each reply [B]; NaN where it does not apply."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Source of reward → its weight."""
    moving: MovingMeans = field(default_factory=MovingMeans)
    """Moving means of the scores by seat; takes those of the rollout in where the advantages read `seat_means`."""

    def streams(self, read: Collection[str], kept: Tensor, ended: Tensor | None) -> dict[str, Tensor]:
        """Those that functions `read`, of the rows `kept`.

        Args:
            ended: which of these replies were not cut off, if those that were get no source's better scores
                (`lowest_where_cut`).

        Raises:
            ValueError: a column is not there, or has something else than numbers.
        """
        found = {name: self._column(name.removeprefix(COLUMN), kept) for name in read if name.startswith(COLUMN)}
        names = [name for name, weight in self.weights.items() if weight]
        if not names:
            return found
        columns, weights = [], torch.tensor([self.weights[name] for name in names]).double()
        for name, sign in zip(names, weights.sign(), strict=True):
            scores = self.sources[name].double()[kept]
            there = ~scores.isnan()
            if ended is not None and there.any():
                scores[there] = sign * lowest_where_cut(sign * scores[there], ended[there])
            columns.append(scores)
        return found | {"sources": torch.stack(columns, dim=1), "source_weights": weights}

    def _column(self, name: str, kept: Tensor) -> Tensor:
        if name not in self.columns:
            known = ", ".join(self.columns) or "none"
            raise ValueError(f"column {name!r} is not allowed: the dataset's columns are {known} (`prepare.columns`)")
        values = self.columns[name]
        wrong = next((v for v in values if v is not None and not isinstance(v, int | float)), None)
        if wrong is not None:
            raise ValueError(f"column {name!r}: {wrong!r} is not allowed: losses and advantages read numbers")
        return torch.tensor([float("nan") if v is None else float(v) for v in values], dtype=torch.float64)[kept]
