"""The reward sources of a stage: each scores every reply; the reward is their weighted sum.

A failed score is NaN. A share of the replies, at most `max_failed`, may end up without a reward; later steps ignore
them. Answers of functions, verifiers, services and judges are journaled for the next attempt.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from xray_runtime.algorithms.rewards import SourceScores, uncertainty_penalized, weighted_sum
from xray_runtime.config.rewards import CodeVerifier, source_names
from xray_runtime.data.batch import Scores
from xray_runtime.data.gold import import_function
from xray_runtime.data.pairs import HELDOUT, TRAIN, VALIDATION, Example, Messages, Pairs, prompt_text
from xray_runtime.data.ragged import first_alike, non_finite
from xray_runtime.errors import NonFiniteError
from xray_runtime.graph.artifacts import REWARD_HEAD
from xray_runtime.models.reward_objective import RewardObjective
from xray_runtime.models.weight_files import same_trunk
from xray_runtime.rewards.code.reply import IS_REFUSED
from xray_runtime.rewards.functions import FunctionSource
from xray_runtime.rewards.journal import Journal
from xray_runtime.rewards.judge import JudgeSource
from xray_runtime.rewards.pairwise_judge import PairwiseJudgeSource
from xray_runtime.rewards.service import ServiceSource
from xray_runtime.rewards.source import Batch, Score, Source
from xray_runtime.rewards.verifiers import VerifierSource
from xray_runtime.rl.reward_reader import RewardReader
from xray_runtime.workers.model_spec import BranchSpec, ModelSpec
from xray_runtime.workers.protocols import get_all

if TYPE_CHECKING:
    from xray_runtime.config.ppo import JudgingConfig
    from xray_runtime.config.rewards import RewardTerm
    from xray_runtime.data.batch import TextBatch
    from xray_runtime.graph.artifacts import Artifact
    from xray_runtime.graph.kind import Stage
    from xray_runtime.workers.protocols import ModelHandle, Ref

log = logging.getLogger(__name__)

ENVIRONMENT = "environment"
"""The source of rewards from an environment."""
MIN_DISTINCT_TEXTS = 8
"""A reward model that scores this many different texts the same, bit for bit, is broken."""


class RewardSources:
    """The `rewards` (or `judges`) of a stage's config, with the reward models among its inputs.

    Args:
        field: the field of config and inputs.
        tokenizer: the policy's; None if only texts are scored.
        trunk: a checkpoint and the number of its top layers that are trained. Reward models that share the layers
            below become branches of its model.
    """

    def __init__(
        self,
        stage: Stage[Any, Any],
        tokenizer: Any = None,
        trunk: tuple[Path, int] | None = None,
        *,
        field: Literal["rewards", "judges"] = "rewards",
    ) -> None:
        config: JudgingConfig = stage.config
        terms: list[RewardTerm] = getattr(config, field)
        self._field = field
        self._stage, self._frozen, self._max_failed = stage.name, config.frozen, config.max_failed
        self._journal = Journal(stage.kept, stage.kept_shared, stage.seal)
        self._terms: dict[str, RewardTerm] = {}
        self._fields: dict[str, str] = {}
        self._external: dict[str, Source] = {}
        for number, (source, term) in enumerate(zip(source_names(terms), terms, strict=True)):
            self._terms[source], self._fields[source] = term, f"{stage.name}.{field}.{number}"
            if not term.roles:
                self._external[source] = self._open(source, term, stage.functions)
        self._check_columns(getattr(stage.inputs, "prompts", None) or getattr(stage.inputs, "data", None))
        self._code = [s for s, term in self._terms.items() if isinstance(term.verifier, CodeVerifier)]
        self.weights = {source: term.weight for source, term in self._terms.items()}
        if field == "rewards" and getattr(config, "environment", None) is not None:
            self.weights[ENVIRONMENT] = 1.0

        models = {f"{field}.{n}": model.path for n, model in enumerate(getattr(stage.inputs, field))}
        used = [role for role in models if any(role in term.roles for term in self._terms.values())]
        self._models = {role: models[role] for role in used}
        self._readers = {
            role: RewardReader(path, f"{stage.name}.{role}", tokenizer) for role, path in self._models.items()
        }
        self._members = {role: (of.summary["mean"], of.summary["std"]) for role, of in self._readers.items()}
        self.moments = {s: self._members[term.model] for s, term in self._terms.items() if term.model is not None}
        """Reward model source → mean and standard deviation of its scores on held-out replies."""

        self.branches: dict[str, BranchSpec] = {}
        """Reward models that share `trunk` and tokens with its model, which computes their scores."""
        if trunk is not None:
            for role, path in self._models.items():
                if self._readers[role].takes_tokens and same_trunk(path, *trunk):
                    self.branches[role] = BranchSpec(path, path / REWARD_HEAD)

    def _check_columns(self, dataset: Artifact | None) -> None:
        """Check what sources take from the dataset, in all rows, before models are opened."""
        if dataset is None or not self._external:
            return
        columns = _columns(dataset.path)
        for source, opened in self._external.items():
            self._require(source, columns)
            if isinstance(opened, FunctionSource):
                opened.check_columns(columns)
            if isinstance(opened, VerifierSource):
                opened.check_column(dataset.path, f"{self._fields[source]}.verifier", self._terms[source].when)

    def _open(self, source: str, term: RewardTerm, functions: Mapping[str, Any]) -> Source:
        if term.verifier is not None:
            return VerifierSource(term.verifier)
        if term.service is not None:
            return ServiceSource(term.service)
        if term.judge is not None:
            return JudgeSource(term.judge) if term.judge.opponents is None else PairwiseJudgeSource(term.judge)
        assert term.function is not None
        field = f"{self._fields[source]}.function"
        function = functions.get(term.function) or import_function(term.function, field)
        return FunctionSource(function, f"{field} {term.function!r}", term.timeout_s, term.retries)

    @property
    def roles(self) -> list[str]:
        """Roles of the reward models that are not branches."""
        return [role for role in self._models if role not in self.branches]

    def specs(self) -> dict[str, ModelSpec]:
        """Specs of `roles`, to open with the stage's other models."""
        return {
            role: ModelSpec(path, RewardObjective(), head=path / REWARD_HEAD, frozen=self._frozen)
            for role, path in self._models.items()
            if role not in self.branches
        }

    def requests(
        self,
        models: Mapping[str, ModelHandle],
        prompts: Sequence[Messages],
        replies: Sequence[str],
        tokens: TextBatch | None = None,
        at_once: int | None = None,
    ) -> list[Ref[Scores]]:
        """Start scoring with every model of `roles`; pass the requests to `scores`.

        Args:
            tokens: rows of the same prompts and whole replies in the policy's tokens, for models that share them.
            at_once: number of models that work at the same time; by default only these.
        """
        share = at_once or len(self.roles)
        rows = {role: self._readers[role].rows(prompts, replies, tokens) for role in self.roles}
        return [models[role].score.remote(rows[role], at_once=share) for role in self.roles]

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
            return SourceScores({}, {})
        texts = [prompt_text(messages) for messages in prompts]
        batch = Batch(texts, replies, prompts, columns, {"stage": self._stage, "step": step})
        applies = {source: self._applies(source, batch) for source in self._terms}
        alike = first_alike(zip(map(repr, prompts), replies, strict=True) if tokens is None else tokens.row_keys())
        keys = {source: self._journal.keys(f"{self._field}/{source}", batch) for source in self._external}
        found = self._score_external(batch, applies, keys)
        answered = self._by_role(get_all(requests), of_branches() if of_branches else Scores(), alike)
        members = {s: self._members_scores(term, answered) for s, term in self._terms.items() if term.models}
        values = {s: torch.from_numpy(answered[t.model]) for s, t in self._terms.items() if t.model is not None}
        values |= {s: uncertainty_penalized(given, self._terms[s].uncertainty) for s, given in members.items()}
        given = dict(found)
        if episodes is not None and ENVIRONMENT in self.weights:
            given[ENVIRONMENT] = dict(enumerate(episodes))
            applies[ENVIRONMENT] = torch.ones(len(episodes), dtype=torch.bool)
        for source, by_row in given.items():
            values[source] = torch.full((len(replies),), math.nan)
            values[source][list(by_row)] = torch.tensor([score.value for score in by_row.values()])
        apart = {source: scores.std(0, correction=0) for source, scores in members.items()}
        reasons = {s: [_why(by_row.get(row)) for row in range(len(replies))] for s, by_row in given.items()}
        refused = {s: [_is_refused(found[s].get(row)) for row in range(len(replies))] for s in self._code if s in found}
        scored = SourceScores({source: values[source] for source in self.weights}, applies, apart, reasons, refused)
        self._check_models(answered, batch)
        self._check(scored, given)
        # Failures are journaled only after the checks: if the stage fails, its next attempt asks again.
        for source, by_row in found.items():
            failed = ((keys[source][row], score) for row, score in by_row.items() if math.isnan(score.value))
            self._journal.write(source, step, failed)
        return scored

    def _by_role(self, answers: Sequence[Scores], of_branches: Scores, alike: np.ndarray) -> dict[str, np.ndarray]:
        """Role of a reward model → its score of each row [B]; equal rows get the score of the first.

        A score's last bits depend on its batch, and normalizing by a group's deviation would amplify them.
        """
        answered = {role: answer.scores for role, answer in zip(self.roles, answers, strict=True)}
        answered |= {role: of_branches.by_role(role) for role in self.branches}
        return {role: given[alike] for role, given in answered.items()}

    def _score_external(
        self, batch: Batch, applies: Mapping[str, torch.Tensor], keys: Mapping[str, list[str]]
    ) -> dict[str, dict[int, Score]]:
        """External source → its scores by row, for the rows it applies to. All sources score at the same time."""
        with ThreadPoolExecutor(max(len(self._external), 1)) as pool:
            rows = {source: applies[source].nonzero()[:, 0].tolist() for source in self._external}
            futures = {s: pool.submit(self._score, s, batch, rows[s], keys[s]) for s in self._external}
        return {source: future.result() for source, future in futures.items()}

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

    def _applies(self, source: str, batch: Batch) -> torch.Tensor:
        term = self._terms[source]
        self._require(source, batch.columns)
        if term.when is None:
            return torch.ones(len(batch.replies), dtype=torch.bool)
        return torch.tensor([term.when.applies(value) for value in batch.columns[term.when.column]], dtype=torch.bool)

    def _require(self, source: str, columns: Collection[str]) -> None:
        for field, column in self._terms[source].columns.items():
            if column not in columns:
                raise ValueError(
                    f"{self._fields[source]}.{field}: {column!r} is not a column of the dataset: add it to data.columns"
                )

    def _members_scores(self, term: RewardTerm, answered: Mapping[str, np.ndarray]) -> torch.Tensor:
        """Scores of an ensemble's members [M, B], each normalized by its held-out moments."""
        members = []
        for role in term.roles:
            mean, deviation = self._members[role]
            members.append((torch.from_numpy(answered[role]) - mean) / deviation)
        return torch.stack(members)

    def _score(self, source: str, batch: Batch, rows: list[int], keys: list[str]) -> dict[int, Score]:
        """Row → its score by an external source, from the journal where it has one."""
        known = {row: score for row in rows if (score := self._journal.find(keys[row])) is not None}
        missing = [row for row in rows if row not in known]
        if missing and self._external[source].relative:
            missing = rows
        if missing:
            answers = self._external[source].score(batch.take(missing))
            fresh = dict(zip(missing, answers, strict=True))
            valid = [(keys[row], score) for row, score in fresh.items() if not math.isnan(score.value)]
            self._journal.write(source, batch.metadata["step"], valid)
            known = fresh | known
        return {row: known[row] for row in rows}

    def _check_models(self, answered: Mapping[str, np.ndarray], batch: Batch) -> None:
        """Raise if a reward model is broken: NaN, or the same score for all texts."""
        texts = len(set(zip(batch.prompts, batch.replies, strict=True)))
        for role in self._models:
            given = answered[role]
            wrong = non_finite({"scores": given})
            if wrong is not None:
                raise NonFiniteError(f"{self._stage}: the reward model {role}: {wrong} are not finite")
            if texts >= MIN_DISTINCT_TEXTS and (given == given[0]).all():
                same = f"gave {texts} different replies the same score, {given[0]:g}"
                raise RuntimeError(f"{self._stage}: the reward model {role} {same}: it is not informative")

    def _check(self, scores: SourceScores, found: Mapping[str, Mapping[int, Score]]) -> None:
        """Raise if too many replies have no reward, or a reward is infinite."""
        for source, weight in self.weights.items():
            if weight and scores.values[source].isinf().any():
                raise NonFiniteError(f"{self._stage}: {source} gave an infinite score")
        total_reward = weighted_sum(scores, self.weights)
        if total_reward.isinf().any():
            raise NonFiniteError(f"{self._stage}: the weighted sum of the scores is infinite")
        if self._field == "judges":  # each judge scores the rows that it applies to
            judging = [scores.failed(source) for source, weight in self.weights.items() if weight]
            without = torch.stack(judging).any(0) if judging else torch.zeros(0)
        else:
            without = total_reward.isnan()
        lost, total = int(without.sum()), len(without)
        if not lost:
            return
        failed = {source: int(scores.failed(source).sum()) for source, weight in self.weights.items() if weight}
        worst = max(failed, key=failed.__getitem__, default="")
        reason = "no reward source applies to them"
        if failed.get(worst):
            reasons = (score.why for score in found.get(worst, {}).values() if math.isnan(score.value))
            reason = f"{worst} failed for {failed[worst]}: {next(reasons, 'its score is not a number')}"
        message = f"{self._stage}: {lost} of {total} replies have no reward; {reason}"
        if lost == total or lost / total > self._max_failed:
            raise RuntimeError(f"{message} (max_failed = {self._max_failed:g})")
        log.warning("%s", message)


def _columns(dataset: Path) -> list[str]:
    """The columns of the first rows that have any."""
    sides = [dataset / side for side in (TRAIN, VALIDATION, HELDOUT) if (dataset / side).exists()]
    batches = (batch for side in sides for batch in Pairs(side, Example).batches())
    found = ({name: None for row in batch for name in json.loads(row.columns)} for batch in batches)
    return list(next(filter(None, found), {}))


def _is_refused(score: Score | None) -> bool:
    """Whether a reply's code used what the sandbox refuses."""
    return score is not None and IS_REFUSED in (score.why or "")


def _why(score: Score | None) -> str | None:
    """Why a source has no score for a reply; None if it has one."""
    return None if score is None or not math.isnan(score.value) else score.why or "its score is not a number"
