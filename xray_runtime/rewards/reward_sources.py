"""The reward sources of a stage: each scores every reply; the reward is their weighted sum.

A failed score is NaN. A share of the replies, at most `max_failed`, may end up without a reward; later steps ignore
them. A seat that had no turn in its game has none either, and does not count.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from xray_runtime.algorithms.rewards import SourceScores, weighted_sum
from xray_runtime.data.pairs import Messages, prompt_text
from xray_runtime.data.ragged import first_alike
from xray_runtime.kernel.config.section import sections
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.graph.artifacts import Dataset
from xray_runtime.rewards.code.reply import IS_REFUSED
from xray_runtime.rewards.external_rewards import ExternalRewards
from xray_runtime.rewards.reward_models import RewardModels
from xray_runtime.rewards.source import Batch, Score
from xray_runtime.rewards.term import source_names

if TYPE_CHECKING:
    from xray_runtime.cluster.protocols import Ref
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.batch import Scores, TextBatch
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.rewards.config import JudgingConfig

log = logging.getLogger(__name__)

ENVIRONMENT = "environment"
"""The source of rewards from an environment."""


class RewardSources:
    """The `rewards` (or `judges`) of a stage's config, with the reward models among its inputs.

    Args:
        field: the field of config and inputs.
        tokenizer, trunk: as `RewardModels` takes them.
    """

    def __init__(
        self,
        stage: Stage[Any, Any],
        tokenizer: Tokenizer | None = None,
        trunk: tuple[Path, int] | None = None,
        *,
        field: Literal["rewards", "judges"] = "rewards",
    ) -> None:
        config: JudgingConfig = stage.config
        terms = config.terms[field]
        named = dict(zip(source_names(terms), terms, strict=True))
        self._field, self._stage, self._max_failed = field, stage.name, config.max_failed
        self._external = ExternalRewards(stage, field, named)
        for dataset in vars(stage.inputs).values():
            if isinstance(dataset, Dataset):
                self._external.check(dataset.path)
        self._sources = list(named)
        self.weights = {source: term.weight for source, term in named.items()}
        if field == "rewards" and any(part.gives_rewards for _, part in sections(config)):
            self.weights[ENVIRONMENT] = 1.0
        inputs = {f"{field}.{number}": model for number, model in enumerate(getattr(stage.inputs, field))}
        self._models = models = RewardModels(stage.name, named, inputs, config.frozen, tokenizer, trunk)
        self.roles, self.branches, self.moments = models.roles, models.branches, models.moments
        self.specs, self.requests = models.specs, models.requests

    def scores(
        self,
        requests: Sequence[Ref[Scores]],
        prompts: Sequence[Messages],
        replies: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        of_branches: Callable[[], Scores] | None = None,
        *,
        step: int = 0,
        episodes: Sequence[Score] | None = None,
        tokens: TextBatch | None = None,
    ) -> SourceScores:
        """Each source's score of each reply. Functions, verifiers and judges score while the models do.

        Args:
            columns: ground truth of each row, by column of the dataset.
            of_branches: waits for the scores of `branches`, by role.
            episodes: the environment's score of each episode.
            tokens: the `tokens` of `requests`; rows with equal tokens, or else equal texts, get the same model score.

        Raises:
            RuntimeError: more than `max_failed` of the replies, or all of them, have no reward.
            NonFiniteError: a reward model computed NaN or infinity, or a score or their sum is infinite.
            ValueError: the dataset lacks a column, or a function does not return scores.
        """
        if not self.weights:
            return SourceScores({}, {}, num_replies=len(replies))
        texts = [prompt_text(messages) for messages in prompts]
        batch = Batch(texts, replies, prompts, columns, {"stage": self._stage, "step": step})
        applies = {source: self._external.applies(source, batch) for source in self._sources}
        alike = first_alike(zip(map(repr, prompts), replies, strict=True) if tokens is None else tokens.row_keys())
        external = self._external.scores(batch, applies)
        models = self._models.scores(requests, of_branches, alike, list(zip(texts, replies, strict=True)))
        given = dict(external)
        if episodes is not None and ENVIRONMENT in self.weights:
            given[ENVIRONMENT] = dict(enumerate(episodes))
            applies[ENVIRONMENT] = torch.ones(len(episodes), dtype=torch.bool)
        values = {source: of.values for source, of in models.items()}
        values |= {source: _tensor(by_row, len(replies)) for source, by_row in given.items()}
        apart = {source: of.disagreement for source, of in models.items() if of.disagreement is not None}
        reasons = {s: [_why(by_row.get(row)) for row in range(len(replies))] for s, by_row in given.items()}
        refused = {
            s: [_is_refused(external[s].get(row)) for row in range(len(replies))] for s in self._external.runs_code
        }
        scored = SourceScores({source: values[source] for source in self.weights}, applies, apart, reasons, refused)
        self._check(scored, given)
        self._external.keep_failures(batch, external)
        return scored

    def scaled(self, scores: SourceScores) -> torch.Tensor:
        """The weighted sum [B], reward models normalized by their held-out moments; NaN: no reward."""
        return weighted_sum(scores, self.weights, self.moments)

    def each(self, scores: SourceScores) -> dict[str, torch.Tensor]:
        """Source → its term of that sum [B] float64; NaN where it has no score or does not apply."""
        terms = {}
        for source, values in scores.values.items():
            mean, deviation = self.moments.get(source, (0.0, 1.0))
            scaled = (self.weights[source] or 1.0) * (values.double() - mean) / deviation
            terms[source] = torch.where(scores.applies[source], scaled, torch.nan)
        return terms

    def _check(self, scores: SourceScores, scored: Mapping[str, Mapping[int, Score]]) -> None:
        """Raise if too many replies have no reward, or a reward is infinite."""
        for source, weight in self.weights.items():
            if weight and scores.values[source].isinf().any():
                raise NonFiniteError(f"{self._stage}: {source} gave an infinite score")
        total_reward = weighted_sum(scores, self.weights)
        if total_reward.isinf().any():
            raise NonFiniteError(f"{self._stage}: the weighted sum of the scores is infinite")
        if self._field == "judges":  # each judge scores the rows that it applies to
            judging = [scores.failed(source) for source, weight in self.weights.items() if weight]
            without = torch.stack(judging).any(0) if judging else torch.zeros(0, dtype=torch.bool)
        else:
            without = total_reward.isnan()
        due = torch.ones(len(without), dtype=torch.bool)
        due[[row for row, score in scored.get(ENVIRONMENT, {}).items() if not score.is_due]] = False
        lost, total = int((without & due).sum()), int(due.sum())
        if len(without) and not total:
            raise RuntimeError(f"{self._stage}: no seat of the policy had a turn")
        if not lost:
            return
        failed = {s: int((scores.failed(s) & due).sum()) for s, weight in self.weights.items() if weight}
        worst = max(failed, key=failed.__getitem__, default="")
        reason = "no reward source applies to them"
        if failed.get(worst):
            reasons = (s.why for s in scored.get(worst, {}).values() if math.isnan(s.value) and s.is_due)
            reason = f"{worst} failed for {failed[worst]}: {next(reasons, 'its score is not a number')}"
        message = f"{self._stage}: {lost} of {total} replies have no reward; {reason}"
        if lost == total or lost / total > self._max_failed:
            raise RuntimeError(f"{message} (max_failed = {self._max_failed:g})")
        log.warning("%s", message)


def _tensor(scores: Mapping[int, Score], count: int) -> torch.Tensor:
    """[count] float32; NaN in rows without a score."""
    values = torch.full((count,), math.nan)
    values[list(scores)] = torch.tensor([score.value for score in scores.values()])
    return values


def _is_refused(score: Score | None) -> bool:
    """Whether a reply's code used what the sandbox refuses."""
    return score is not None and IS_REFUSED in (score.why or "")


def _why(score: Score | None) -> str | None:
    """Why a source has no score for a reply; None if it has one."""
    return None if score is None or not math.isnan(score.value) else score.why or "its score is not a number"
