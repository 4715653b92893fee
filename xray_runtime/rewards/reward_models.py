"""The reward models that the terms of a stage need, among its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from xray_runtime.algorithms.rewards import ModelScores
from xray_runtime.cluster.model_spec import BranchSpec, ModelSpec, scored_together
from xray_runtime.cluster.protocols import get_all
from xray_runtime.data.batch import Scores
from xray_runtime.data.ragged import non_finite
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.graph.artifacts import REWARD_HEAD
from xray_runtime.models.reward_objective import RewardObjective
from xray_runtime.models.weight_files import same_trunk
from xray_runtime.rewards.kind import ModelTerm
from xray_runtime.rewards.reward_reader import RewardReader

if TYPE_CHECKING:
    from xray_runtime.cluster.protocols import ModelHandle, Ref
    from xray_runtime.data.batch import TextBatch
    from xray_runtime.data.pairs import Messages
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.engines.layouts import FrozenConfig
    from xray_runtime.kernel.graph.artifacts import RewardModel
    from xray_runtime.rewards.term import Term

MIN_DISTINCT_TEXTS = 8
"""A reward model that scores this many different texts the same, bit for bit, is broken."""


class RewardModels:
    """The reward models of a stage.

    Args:
        stage: its name, for errors.
        terms: source → term.
        models: role → its input, of which only those are opened that a term names.
        tokenizer: the policy's; None if only texts are scored.
        trunk: a checkpoint and the number of its top layers that are trained. Reward models that share the layers
            below become branches of its model.
    """

    def __init__(
        self,
        stage: str,
        terms: Mapping[str, Term],
        models: Mapping[str, RewardModel],
        frozen: FrozenConfig,
        tokenizer: Tokenizer | None = None,
        trunk: tuple[Path, int] | None = None,
    ) -> None:
        self._stage, self._frozen = stage, frozen
        self._terms = {source: term for source, term in terms.items() if isinstance(term, ModelTerm)}
        used = {role for term in self._terms.values() for role in term.roles}
        self._paths = {role: model.path for role, model in models.items() if role in used}
        self._readers = {role: RewardReader(path, f"{stage}.{role}", tokenizer) for role, path in self._paths.items()}
        self._members = {role: (of.summary["mean"], of.summary["std"]) for role, of in self._readers.items()}
        self.moments = {s: self._members[term.scaled_by] for s, term in self._terms.items() if term.scaled_by}
        """Source → mean and standard deviation of its scores on held-out replies, where it is scaled by them."""
        self.branches = {
            role: BranchSpec(path, path / REWARD_HEAD)
            for role, path in self._paths.items()
            if trunk is not None and self._readers[role].takes_tokens and same_trunk(path, *trunk)
        }
        """Reward models that share `trunk` and tokens with its model, which computes their scores."""
        self.roles = [role for role in self._paths if role not in self.branches]
        """Roles of the reward models that are not branches."""

    def specs(self) -> dict[str, ModelSpec]:
        """Specs of `roles`, to open with the stage's other models."""
        paths = {role: self._paths[role] for role in self.roles}
        specs = {
            role: ModelSpec(path, RewardObjective(), head=path / REWARD_HEAD, frozen=self._frozen)
            for role, path in paths.items()
        }
        return scored_together(specs)

    def requests(
        self,
        models: Mapping[str, ModelHandle],
        prompts: Sequence[Messages],
        replies: Sequence[str],
        tokens: TextBatch | None = None,
    ) -> list[Ref[Scores]]:
        """Start scoring with every model of `roles`; pass the requests to `RewardSources.scores`.

        Args:
            tokens: rows of the same prompts and whole replies in the policy's tokens, for models that share them.
        """
        rows = {role: self._readers[role].rows(prompts, replies, tokens) for role in self.roles}
        return [models[role].score.remote(rows[role]) for role in self.roles]

    def scores(
        self,
        requests: Sequence[Ref[Scores]],
        of_branches: Callable[[], Scores] | None,
        alike: np.ndarray,
        texts: Sequence[tuple[str, str]],
    ) -> dict[str, ModelScores]:
        """Source → its score of each reply; equal rows get the score of the first, since a score's last bits depend on
        its batch, and normalizing by a group's deviation would amplify them.

        Args:
            alike: the first row that equals each row [B].
            texts: prompt and reply of each row.
        """
        answers = {role: answer.scores for role, answer in zip(self.roles, get_all(requests), strict=True)}
        branches = of_branches() if of_branches else Scores()
        answers |= {role: branches.by_role(role) for role in self.branches}
        self._check({role: answers[role] for role in self._paths}, len(set(texts)))
        by_role = {
            role: ModelScores(torch.from_numpy(scores[alike]), *self._members[role]) for role, scores in answers.items()
        }
        return {s: term.combined([by_role[role] for role in term.roles]) for s, term in self._terms.items()}

    def _check(self, answers: Mapping[str, np.ndarray], num_texts: int) -> None:
        """Raise if a reward model is broken: NaN, or the same score for all texts."""
        for role, given in answers.items():
            wrong = non_finite({"scores": given})
            if wrong is not None:
                raise NonFiniteError(f"{self._stage}: the reward model {role}: {wrong} are not finite")
            if num_texts >= MIN_DISTINCT_TEXTS and (given == given[0]).all():
                same = f"gave {num_texts} different replies the same score, {given[0]:g}"
                raise RuntimeError(f"{self._stage}: the reward model {role} {same}: it is not informative")
