"""The sources of a stage's reward: reward models and functions, each scored by itself, then weighed and summed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xray_runtime.algorithms.rewards import weighted_sum
from xray_runtime.data.gold import load_function
from xray_runtime.models.reward_objective import RewardObjective
from xray_runtime.models.tensor_file import same_trunk
from xray_runtime.stages.artifacts import REWARD_HEAD
from xray_runtime.stages.reward_reader import RewardReader
from xray_runtime.workers.model_spec import BranchSpec, ModelSpec

if TYPE_CHECKING:
    from xray_runtime.config.ppo import JudgingConfig
    from xray_runtime.data.pairs import Messages
    from xray_runtime.data.rows import Rows
    from xray_runtime.stages.kind import Stage
    from xray_runtime.workers.protocols import ModelHandle, Ref


class RewardSources:
    """The `rewards` of a stage's config, with the reward models among its inputs.

    Args:
        tokenizer: the policy's; None where only texts are judged.
        trunk: a checkpoint and how many top layers of it are trained, where its model can hold the reward models that
            share what is below those.
    """

    def __init__(self, stage: Stage[Any, Any], tokenizer: Any = None, trunk: tuple[Path, int] | None = None) -> None:
        config: JudgingConfig = stage.config
        self._frozen = config.frozen
        self._models = {f"rewards.{n}": model.path for n, model in enumerate(stage.inputs.rewards)}
        self.weights: dict[str, float] = {}
        self._functions: dict[str, Any] = {}
        for number, term in enumerate(config.rewards):
            source = term.model or str(term.function)
            self.weights[source] = self.weights.get(source, 0.0) + term.weight
            if term.function is not None:
                field = f"{stage.name}.rewards.{number}.function"
                self._functions[source] = load_function(source, field, stage.functions.get(source))
        summaries = {role: json.loads((path / "reward.json").read_text()) for role, path in self._models.items()}
        self.moments = {role: (s["mean"], s["std"]) for role, s in summaries.items() if role in self.weights}
        """Reward model → mean and deviation of its scores of held-out replies."""
        self._readers = {
            role: RewardReader(self._models[role], f"{stage.name}.{role}", tokenizer) for role in self.moments
        }

        self.branches: dict[str, BranchSpec] = {}
        """Reward models that stand on `trunk`: they score with the model that has it, in the same tokens."""
        if trunk is not None:
            for role, reader in self._readers.items():
                path = self._models[role]
                if reader.takes_tokens and same_trunk(path, *trunk):
                    self.branches[role] = BranchSpec(path, path / REWARD_HEAD)

    @property
    def roles(self) -> list[str]:
        """Roles of the reward models that are models of their own."""
        return [role for role in self.moments if role not in self.branches]

    def specs(self) -> dict[str, ModelSpec]:
        """Those models, to be opened with the stage's others."""
        paths = {role: self._models[role] for role in self.roles}
        return {
            role: ModelSpec(path, RewardObjective(), head=path / REWARD_HEAD, frozen=self._frozen)
            for role, path in paths.items()
        }

    def requests(
        self,
        models: Mapping[str, ModelHandle],
        prompts: Sequence[Messages],
        replies: Sequence[str],
        tokens: Rows | None = None,
        at_once: int | None = None,
    ) -> list[Ref[Rows]]:
        """Ask every reward model of its own to score the replies; pass the answers to `scores`.

        Args:
            replies: texts.
            tokens: rows of the same prompts and whole replies in the policy's tokens, for models that share them.
            at_once: how many models work at the same time; by default these alone.
        """
        share = at_once or len(self.roles)
        rows = {role: self._readers[role].rows(prompts, replies, tokens) for role in self.roles}
        return [models[role].score.remote(rows[role], at_once=share) for role in self.roles]

    def scores(
        self, answers: Sequence[Rows], prompts: Sequence[str], replies: Sequence[str], of_branches: Rows | None = None
    ) -> dict[str, torch.Tensor]:
        """Source → raw score of each reply [B], float32.

        Args:
            answers: to `requests`.
            prompts: the texts that were asked.
            of_branches: scores of `branches` by role.
        """
        own = {role: answer["scores"] for role, answer in zip(self.roles, answers, strict=True)}
        answered = own | {role: (of_branches or {})[role] for role in self.branches}
        found = {role: torch.from_numpy(answered[role]) for role in self.moments}
        for name, function in self._functions.items():
            found[name] = torch.tensor(function(prompts, replies), dtype=torch.float32)
        return found

    def scaled(self, scores: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weighted sum [B]: reward models in their own deviations, functions as they score."""
        return weighted_sum(scores, self.weights, self.moments)
