"""The study of a search: its space, its trials in Optuna's journal, and the values that it tries next.

A search is checked completely before anything is computed. The next values depend only on the seed, the trials so far
and their outcomes, so a search continues after it was killed, edited or extended. A trial's directory is named after
the digest of its subject and metric: no values are tried twice.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from xray.flows.search import SEARCHES, FieldRange, SearchConfig
from xray.flows.subject import Subject
from xray_runtime.kernel.config.validation import CombinationError, ConfigError
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.graph.graph import StageCall
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.kernel.store.identity import digest

log = logging.getLogger(__name__)

GOLDEN = (1 + math.sqrt(5)) / 2
"""Divides a range at a point that is not a whole number."""
MAX_DRAWS = 200
"""At least one of this many draws must be a valid config, and have values that were not tried."""
JOURNAL = "journal.jsonl"
DIRECTORY, VALUES, ERROR, IMPORTED = "directory", "values", "error", "imported"
"""Optuna's user attributes of a trial: name of its directory, its values, why it failed, whether an earlier version of
the search had it."""
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)

Space = dict[str, BaseDistribution]
"""Path of a field → its values; a choice is drawn as JSON, since Optuna does not compare sections."""


def search_space(subject: Subject, search: SearchConfig) -> Space:
    """The search space of `subject`.

    Raises:
        ConfigError: a stage or field does not exist, a field does not allow a value, a field with a range is not a
            number, none of many draws is a valid config, or no stage up to `until` reads a field.
    """
    names = [call.name for call in calls_until(subject, search.until)]
    if search.pruned_by is not None and search.pruned_by[0] not in names:
        raise ConfigError(f"prune.stage: {search.pruned_by[0]!r} is not allowed: must be one of {', '.join(names)}")
    space = {path: _distribution(subject, path, field) for path, field in search.fields.items()}
    drawn = _valid_draw(subject, search, space)
    for path, field in search.fields.items():
        read = {_stages_digest(drawn, search.until, path, end) for end in field.ends}
        if len(read) == 1 and None not in read:
            raise ConfigError(f"fields.{path}: is not allowed: no stage up to {search.until!r} reads it")
    return space


def calls_until(subject: Subject, stage: str) -> list[StageCall]:
    """The stages of a graph up to `stage`. Raises ConfigError if it has no stage of that name."""
    calls = subject.recorded().calls
    if stage not in calls:
        raise ConfigError(f"until: {stage!r} is not allowed: must be one of {', '.join(calls)}")
    return list(calls.values())[: list(calls).index(stage) + 1]


def _distribution(subject: Subject, path: str, field: FieldRange) -> BaseDistribution:
    for value in field.ends:
        _try(subject, path, value)
    if field.choices is not None:
        return CategoricalDistribution([_as_json(choice) for choice in field.choices])
    assert field.low is not None
    assert field.high is not None
    try:
        _try(subject, path, field.low + (field.high - field.low) / GOLDEN)
    except ConfigError:
        return IntDistribution(int(field.low), int(field.high), log=field.log)
    return FloatDistribution(field.low, field.high, log=field.log)


def _try(subject: Subject, path: str, value: Any) -> None:
    """Raise ConfigError if the field at `path` does not allow `value`; conflicts with other fields are ignored, since
    these may vary too."""
    try:
        subject.with_values({path: value}).recorded()
    except CombinationError:
        return


def _valid_draw(subject: Subject, search: SearchConfig, space: Space) -> Subject:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(search.seed))
    refused: ConfigError | None = None
    for _ in range(MAX_DRAWS):
        try:
            drawn = subject.with_values(_values(study.ask(space).params))
            calls_until(drawn, search.until)
            return drawn
        except ConfigError as error:
            refused = refused or error
    raise ConfigError(f"fields: none of {MAX_DRAWS} random configs is valid: {refused}")


def _stages_digest(subject: Subject, until: str, path: str, value: Any) -> str | None:
    """Digest of the stages' configs with `value` at `path`; None if they are not allowed."""
    try:
        calls = calls_until(subject.with_values({path: value}), until)
    except ConfigError:
        return None
    parents = [{role: handle.name for role, handle in call.parents.items()} for call in calls]
    return digest([[c.name, c.kind.name, c.config_json(), c.seed, p] for c, p in zip(calls, parents, strict=True)])


def _as_json(choice: Any) -> str:
    return json.dumps(choice, sort_keys=True)


def _values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Path → value of a draw from the space."""
    return {path: json.loads(drawn) if isinstance(drawn, str) else drawn for path, drawn in params.items()}


@dataclass(frozen=True)
class Search:
    """A search over `subject` in the output directory `root`; one process at a time uses it."""

    root: Path
    subject: Subject
    wanted: SearchConfig
    space: Space

    @property
    def directory(self) -> Path:
        return self.root / SEARCHES / self.wanted.name

    def directory_of(self, values: Mapping[str, Any]) -> str:
        """Name of a trial's directory: a digest of its subject, and of the search's fields that determine its run."""
        how = self.wanted.model_dump(mode="json", include={"until", "metric", "mode", "prune"})
        return digest(self.subject.with_values(values).content() | how)[:12]

    @cached_property
    def study(self) -> optuna.Study:
        """Its study, with the ended trials of earlier versions of the search that fit this one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        journal = self.directory / JOURNAL
        _cut_last_line(journal)
        storage = JournalStorage(JournalFileBackend(str(journal)))
        what = self.wanted.model_dump(mode="json", exclude={"name", "trials", "concurrent"})
        study = optuna.create_study(
            storage=storage,
            pruner=_pruner(self.wanted),
            study_name=digest(self.subject.content() | {"search": what}),
            direction="maximize" if self.wanted.mode == "max" else "minimize",
            load_if_exists=True,
        )
        known = {trial.user_attrs[DIRECTORY] for trial in study.trials}
        for name in optuna.get_all_study_names(storage):
            for old in optuna.load_study(study_name=name, storage=storage).trials:
                if old.state in ENDED and old.user_attrs[DIRECTORY] not in known and (trial := self._imported(old)):
                    known.add(old.user_attrs[DIRECTORY])
                    study.add_trial(trial)
        return study

    def trials(self) -> list[FrozenTrial]:
        """The newest attempt at each trial, in the order in which they were drawn."""
        return list({trial.user_attrs[DIRECTORY]: trial for trial in self.study.trials}.values())

    def waiting(self) -> Iterator[optuna.Trial]:
        """The interrupted and failed trials, then new ones, up to the search's number of trials."""
        ours = [trial for trial in self.trials() if IMPORTED not in trial.user_attrs]
        unfinished = [trial for trial in ours if trial.state not in ENDED]
        for trial in unfinished:
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            if trial.state != TrialState.WAITING:
                self._enqueue(trial.user_attrs[VALUES])
        missing = max(self.wanted.trials - (len(ours) - len(unfinished)), 0)
        for _ in islice(chain(unfinished, iter(self._draw, False)), missing):
            yield self.study.ask(self.space)

    def _draw(self) -> bool:
        """Enqueue new values; whether MAX_DRAWS draws found some."""
        trials = self.trials()
        known = {trial.user_attrs[DIRECTORY] for trial in trials}
        study = optuna.create_study(direction=self.study.direction)
        study.add_trials([trial for trial in trials if trial.state in ENDED])
        for attempt in range(MAX_DRAWS):
            seed = derive_seed(self.wanted.seed, "trial", len(trials), attempt)
            study.sampler = optuna.samplers.TPESampler(seed=seed)
            values = _values(study.ask(self.space).params)
            if self.directory_of(values) not in known:
                self._enqueue(values)
                return True
        log.warning("%d draws found no values that have not been tried; the search ends", MAX_DRAWS)
        return False

    def _enqueue(self, values: dict[str, Any]) -> None:
        self.study.enqueue_trial(self._params(values), {DIRECTORY: self.directory_of(values), VALUES: values})

    def _params(self, values: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `_values`."""
        return {path: _as_json(v) if self.wanted.fields[path].choices else v for path, v in values.items()}

    def _imported(self, old: FrozenTrial) -> FrozenTrial | None:
        """A trial of an earlier version of the search; None if it does not fit this one."""
        values = old.user_attrs[VALUES]
        try:
            if values.keys() != self.space.keys() or self.directory_of(values) != old.user_attrs[DIRECTORY]:
                return None
            return create_trial(
                state=old.state,
                value=old.value,
                params=self._params(values),
                distributions=self.space,
                user_attrs=old.user_attrs | {IMPORTED: True},
                intermediate_values=old.intermediate_values,
            )
        except ValueError:  # a value is not allowed, or not in its range
            return None


def _pruner(search: SearchConfig) -> optuna.pruners.BasePruner:
    if search.prune is None:
        return optuna.pruners.NopPruner()
    least = search.prune.min_trials
    return optuna.pruners.MedianPruner(least, n_warmup_steps=search.prune.after_steps, n_min_trials=least)


def _cut_last_line(journal: Path) -> None:
    """Remove an incomplete last line, which a full disk or a power failure leaves; Optuna would append to it."""
    content = journal.read_bytes() if journal.is_file() else b""
    if not content.endswith(b"\n"):
        write_atomic(journal, content[: content.rfind(b"\n") + 1])
