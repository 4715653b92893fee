"""The sources of a stage's rewards other than reward models: functions, verifiers, services, judges.

Their answers are journaled for the next attempt, and those that might differ when asked again also for replays."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xray_runtime.data.pairs import HELDOUT, TRAIN, VALIDATION, Example, Pairs
from xray_runtime.kernel.config.section import Section, sections
from xray_runtime.rewards.journal import Journal
from xray_runtime.rewards.kind import ExternalTerm
from xray_runtime.rewards.term import Recording, Term

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.rewards.config import JudgingConfig
    from xray_runtime.rewards.source import Batch, Score

BySource = dict[str, dict[int, "Score"]]
"""Source → row → its score, for the rows that it applies to."""


class ExternalRewards:
    """The open sources of a stage.

    Args:
        field: `rewards` or `judges`.
        terms: source → term.
    """

    def __init__(self, stage: Stage[Any, Any], field: str, terms: Mapping[str, Term]) -> None:
        self._field, self._terms = field, terms
        self._where = {source: f"{stage.name}.{field}.{number}" for number, source in enumerate(terms)}
        self._journal = Journal(stage.kept, stage.kept_shared, stage.seal)
        self._sources = {
            source: term.open(self._where[source], stage.functions)
            for source, term in terms.items()
            if isinstance(term, ExternalTerm)
        }
        config: JudgingConfig = stage.config
        keeps = config.keeps_answers
        self._recorded = {s for s in self._sources if keeps and terms[s].recording is Recording.RECORDED}
        self.runs_code = [source for source, opened in self._sources.items() if opened.runs_code]
        """Sources that run code of replies."""

    def check(self, dataset: Path) -> None:
        """Check what sources take from the dataset, in all rows, before models are opened. Raises ValueError."""
        columns = _columns(dataset) if self._sources else []
        for source, opened in self._sources.items():
            self._require(source, columns)
            opened.check(dataset, columns)

    def applies(self, source: str, batch: Batch) -> torch.Tensor:
        """The rows that a source, of either kind, applies to [B] bool. Raises ValueError: a column is missing."""
        self._require(source, batch.columns)
        when = self._terms[source].when
        if when is None:
            return torch.ones(len(batch.replies), dtype=torch.bool)
        return torch.tensor([when.applies(value) for value in batch.columns[when.column]], dtype=torch.bool)

    def _require(self, source: str, columns: Collection[str]) -> None:
        for field, column in self._terms[source].columns.items():
            if column not in columns:
                raise ValueError(
                    f"{self._where[source]}.{field}: {column!r} is not a column of the dataset: add it to data.columns"
                )

    def scores(self, batch: Batch, applies: Mapping[str, torch.Tensor]) -> BySource:
        """All sources score at the same time; answers of an earlier attempt are taken from the journal."""
        with ThreadPoolExecutor(max(len(self._sources), 1)) as pool:
            rows = {source: applies[source].nonzero()[:, 0].tolist() for source in self._sources}
            futures = {source: pool.submit(self._score, source, batch, rows[source]) for source in self._sources}
        return {source: future.result() for source, future in futures.items()}

    def _score(self, source: str, batch: Batch, rows: list[int]) -> dict[int, Score]:
        keys = self._keys(source, batch)
        known = {row: score for row in rows if (score := self._journal.find(keys[row])) is not None}
        missing = [row for row in rows if row not in known]
        if missing and self._sources[source].relative:
            missing = rows
        if missing:
            fresh = dict(zip(missing, self._sources[source].score(batch.take(missing)), strict=True))
            self._write(source, batch, {row: score for row, score in fresh.items() if not math.isnan(score.value)})
            known = fresh | known
        return {row: known[row] for row in rows}

    def keep_failures(self, batch: Batch, scores: BySource) -> None:
        """Journal failed scores, once the stage goes on without them: if it fails, its next attempt asks again."""
        for source, by_row in scores.items():
            self._write(source, batch, {row: score for row, score in by_row.items() if math.isnan(score.value)})

    def _write(self, source: str, batch: Batch, scores: Mapping[int, Score]) -> None:
        keys = self._keys(source, batch)
        entries = ((keys[row], score) for row, score in scores.items())
        self._journal.write(source, batch.metadata["step"], entries, recorded=source in self._recorded)

    def _keys(self, source: str, batch: Batch) -> list[str]:
        return self._journal.keys(f"{self._field}/{source}", batch)


def recorded_sources(config: Section) -> list[Term]:
    """The terms of a stage's config whose answers a replay reads."""
    terms = (part for _, part in sections(config) if isinstance(part, Term))
    return [term for term in terms if term.recording is Recording.RECORDED]


def _columns(dataset: Path) -> list[str]:
    """The columns of the first rows that have any."""
    sides = [dataset / side for side in (TRAIN, VALIDATION, HELDOUT) if (dataset / side).exists()]
    batches = (batch for side in sides for batch in Pairs(side, Example).batches())
    columns = ({name: None for row in batch for name in json.loads(row.columns)} for batch in batches)
    return list(next(filter(None, columns), {}))
