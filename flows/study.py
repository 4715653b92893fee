"""The trials of a search, in Optuna's journal, and its next draws.

The next draw depends only on the seed, the trials so far and their outcomes, so a search continues after it was killed,
edited or extended. A trial's directory is named after the digest of its subject and metric: no values are tried twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from xray.flows.search import MAX_DRAWS, SearchConfig, Space, drawn_values, search_digest, trial_digest
from xray.flows.subject import Subject
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.seeding import derive_seed

log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
PLACE, VALUES, ERROR, IMPORTED = "place", "values", "error", "imported"
"""Optuna's user attributes of a trial: name of its directory, its values, why it failed, whether an earlier version of
the search had it."""
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


def search_directory(root: Path, name: str) -> Path:
    """Directory of the trials and results of the search `name`."""
    return root / "searches" / name


@dataclass(frozen=True)
class Search:
    """A search over `subject` in the output directory `root`; one process at a time has it."""

    root: Path
    subject: Subject
    wanted: SearchConfig
    space: Space

    @property
    def directory(self) -> Path:
        return search_directory(self.root, self.wanted.name)

    @cached_property
    def study(self) -> optuna.Study:
        """Its study, with what ended in the ranges of earlier versions of the search."""
        prune, file = self.wanted.prune, self.directory / JOURNAL
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if prune is not None:
            least = prune.min_trials
            pruner = optuna.pruners.MedianPruner(least, n_warmup_steps=prune.after_steps, n_min_trials=least)
        _cut(file)
        storage = JournalStorage(JournalFileBackend(str(file)))
        study = optuna.create_study(
            storage=storage,
            pruner=pruner,
            study_name=search_digest(self.subject, self.wanted),
            direction="maximize" if self.wanted.mode == "max" else "minimize",
            load_if_exists=True,
        )
        known = {trial.user_attrs[PLACE] for trial in study.trials}
        for name in optuna.get_all_study_names(storage):
            for old in optuna.load_study(study_name=name, storage=storage).trials:
                if old.state in ENDED and old.user_attrs[PLACE] not in known and (trial := self._imported(old)):
                    known.add(old.user_attrs[PLACE])
                    study.add_trial(trial)
        return study

    def trials(self) -> list[FrozenTrial]:
        """The newest attempt at each trial, in the order in which they were drawn."""
        return list({trial.user_attrs[PLACE]: trial for trial in self.study.trials}.values())

    def waiting(self) -> Iterator[optuna.Trial]:
        """The interrupted and failed trials, then new ones, up to the search's number of trials."""
        own = [trial for trial in self.trials() if IMPORTED not in trial.user_attrs]
        unfinished = [trial for trial in own if trial.state not in ENDED]
        for trial in unfinished:
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            if trial.state != TrialState.WAITING:
                self._enqueue(trial.user_attrs[VALUES])
        missing = max(self.wanted.trials - (len(own) - len(unfinished)), 0)
        for _ in islice(chain(unfinished, iter(self._draw, False)), missing):
            yield self.study.ask(self.space)

    def _draw(self) -> bool:
        """Enqueue new values; whether MAX_DRAWS draws found some."""
        trials = self.trials()
        known = {trial.user_attrs[PLACE] for trial in trials}
        study = optuna.create_study(direction=self.study.direction)
        study.add_trials([trial for trial in trials if trial.state in ENDED])
        for attempt in range(MAX_DRAWS):
            seed = derive_seed(self.wanted.seed, "trial", len(trials), attempt)
            study.sampler = optuna.samplers.TPESampler(seed=seed)
            values = drawn_values(study.ask(self.space).params)
            if self._place(values) not in known:
                self._enqueue(values)
                return True
        log.warning("%d draws found no values that have not been tried; the search ends", MAX_DRAWS)
        return False

    def _enqueue(self, values: dict[str, Any]) -> None:
        self.study.enqueue_trial(self._params(values), {PLACE: self._place(values), VALUES: values})

    def _place(self, values: dict[str, Any]) -> str:
        return trial_digest(self.subject, values, self.wanted)[:12]

    def _params(self, values: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `drawn_values`."""
        fields = self.wanted.fields
        return {p: json.dumps(v, sort_keys=True) if fields[p].choices else v for p, v in values.items()}

    def _imported(self, old: FrozenTrial) -> FrozenTrial | None:
        """A trial of an earlier version of the search; None if it does not fit this one."""
        values = old.user_attrs[VALUES]
        try:
            if values.keys() != self.space.keys() or self._place(values) != old.user_attrs[PLACE]:
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


def _cut(file: Path) -> None:
    """Cut an incomplete last line, which a full disk or a power failure leaves."""
    content = file.read_bytes() if file.is_file() else b""
    if content and not content.endswith(b"\n"):
        write_atomic(file, content[: content.rfind(b"\n") + 1])
