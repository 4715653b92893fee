"""The search of `xray tune`: fields with their ranges, the metric, and the rule that ends trials early.

A search is checked completely before anything is computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from pydantic import Field, model_validator

from xray.flows.subject import Subject
from xray_runtime.kernel.config.loading import read_mapping
from xray_runtime.kernel.config.section import Count, Section
from xray_runtime.kernel.config.validation import CombinationError, ConfigError, validate_as
from xray_runtime.kernel.graph.graph import StageCall
from xray_runtime.kernel.store.identity import digest

Mode = Literal["max", "min"]
Metric = Annotated[str, Field(pattern=r"^[a-z0-9_]+/[A-Za-z0-9_]+$")]
GOLDEN = (1 + math.sqrt(5)) / 2
"""Divides a range at a point that is not a whole number."""
MAX_DRAWS = 200
"""At least one of this many draws must be a valid config."""


class FieldRange(Section):
    """The values to try for one field: from `low` to `high`, or one of `choices`."""

    low: float | None = None
    high: float | None = None
    """Both ends are included; values are whole numbers if the field takes only whole numbers."""
    log: bool = False
    """Draw uniformly on a logarithmic scale, as for learning rates."""
    choices: Annotated[list[Any], Field(min_length=2)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log:
                raise ValueError("choices must be set alone, without low, high and log")
        elif self.low is None or self.high is None:
            raise ValueError("must have low and high, or choices")
        elif self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must be less than high = {self.high:g}")
        elif self.log and self.low <= 0:
            raise ValueError(f"low = {self.low:g} must be greater than 0 with log")
        return self

    @property
    def ends(self) -> list[Any]:
        """The choices, or both ends of the range."""
        ends = [int(end) if end.is_integer() else end for end in (self.low, self.high) if end is not None]
        return self.choices or ends


class PruneConfig(Section):
    """A trial ends early if its best value so far is worse than the median of the finished trials' values at the same
    step (Optuna's median pruner; Golovin et al. 2017, Google Vizier)."""

    stage: Annotated[str, Field(min_length=1)] | None = None
    """Stage whose metric is compared. Default: the search's `until`."""
    metric: Metric | None = None
    """Metric that the stage logs while it runs. Default: the search's `metric`."""
    mode: Mode | None = None
    """Default: the search's `mode`."""
    after_steps: Count = 1
    """No trial ends before this many steps (PPO: iterations) of the stage."""
    min_trials: Count = 3
    """Number of finished trials that must have a value at the same step."""


class SearchConfig(Section):
    """A search over fields of a lifecycle's config, or over a flow's parameters and the fields of its stages."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")] = "search"
    """Name of its directory in searches/, and value of the MLflow tag `xray.search`."""
    fields: Annotated[dict[str, FieldRange], Field(min_length=1)]
    """Dotted path of a field → values to try: `ppo.stages.0.lr` in a config; for a flow a parameter (`steps`) or the
    field of a stage (`ppo.lr`)."""
    until: Annotated[str, Field(min_length=1)] = "evaluate"
    """The last stage of a trial."""
    metric: Metric = "evaluate/win_rate"
    """Metric of that stage (docs/metrics.md); its last value is the trial's value."""
    mode: Mode = "max"
    trials: Annotated[int, Field(ge=1, le=10_000)] = 20
    concurrent: Count = 1
    """Number of trials that run at the same time; each waits for the devices that its stages need."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the search: without concurrency, the same seed tries the same values."""
    prune: PruneConfig | None = None
    """Rule that ends trials early; None: every trial runs to its end."""

    @property
    def pruned_by(self) -> tuple[str, str] | None:
        """(stage, metric) to compare for ending trials early."""
        if self.prune is None:
            return None
        return self.prune.stage or self.until, self.prune.metric or self.metric


Space = dict[str, BaseDistribution]
"""Path of a field → its values; a choice is drawn as JSON, since Optuna does not compare sections."""


def load_search(path: Path, trials: int | None = None) -> SearchConfig:
    """The search in a YAML or JSON file; its default name is the file's.

    Raises:
        ConfigError: the file or the search is invalid.
    """
    data = read_mapping(path)
    if "name" not in data:
        data["name"] = path.stem
    if trials is not None:
        data["trials"] = trials
    try:
        return validate_as(SearchConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def trial_digest(subject: Subject, values: Mapping[str, Any], search: SearchConfig) -> str:
    """Identity of a trial: the subject with its values, and the search's fields that determine a trial's run."""
    how = search.model_dump(mode="json", include={"until", "metric", "mode", "prune"})
    return digest(subject.with_values(values).content() | how)


def search_digest(subject: Subject, search: SearchConfig) -> str:
    """Identity of a search: all but its name, number of trials and concurrency."""
    what = search.model_dump(mode="json", exclude={"name", "trials", "concurrent"})
    return digest(subject.content() | {"search": what})


def calls_until(subject: Subject, stage: str) -> list[StageCall]:
    """The stages of a graph up to `stage`. Raises ConfigError if it has no stage of that name."""
    calls = subject.recorded().calls
    if stage not in calls:
        raise ConfigError(f"until: {stage!r} is not allowed: must be one of {', '.join(calls)}")
    return list(calls.values())[: list(calls).index(stage) + 1]


def search_space(subject: Subject, search: SearchConfig) -> Space:
    """The search space of `subject`.

    Raises:
        ConfigError: a stage or field does not exist, a field does not allow a value, a field with a range is not a
            number, or no stage up to `until` reads a field.
    """
    names = [call.name for call in calls_until(subject, search.until)]
    if search.pruned_by is not None and search.pruned_by[0] not in names:
        raise ConfigError(f"prune.stage: {search.pruned_by[0]!r} is not allowed: must be one of {', '.join(names)}")
    space = {path: _distribution(subject, path, field) for path, field in search.fields.items()}
    _check_draws(subject, search, space)
    return space


def drawn_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Path → value of a draw from the space."""
    return {path: json.loads(drawn) if isinstance(drawn, str) else drawn for path, drawn in params.items()}


def _distribution(subject: Subject, path: str, field: FieldRange) -> BaseDistribution:
    for value in field.ends:
        _try(subject, path, value)
    if field.choices is not None:
        return CategoricalDistribution([json.dumps(choice, sort_keys=True) for choice in field.choices])
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


def _check_draws(subject: Subject, search: SearchConfig, space: Space) -> None:
    """Check that at least one draw is valid, and that a stage up to `until` reads every field."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(search.seed))
    refused: ConfigError | None = None
    for _ in range(MAX_DRAWS):
        try:
            drawn = subject.with_values(drawn_values(study.ask(space).params))
            calls_until(drawn, search.until)
            break
        except ConfigError as error:
            refused = refused or error
    else:
        raise ConfigError(f"fields: none of {MAX_DRAWS} random configs is valid: {refused}")
    for path, field in search.fields.items():
        read = {_read(drawn, search.until, path, end) for end in field.ends}
        if len(read) == 1 and None not in read:
            raise ConfigError(f"fields.{path}: is not allowed: no stage up to {search.until!r} reads it")


def _read(subject: Subject, until: str, path: str, value: Any) -> str | None:
    """Digest of the stages' configs with `value` at `path`; None if they are not allowed."""
    try:
        calls = calls_until(subject.with_values({path: value}), until)
    except ConfigError:
        return None
    parents = [{role: handle.name for role, handle in call.parents.items()} for call in calls]
    return digest([[c.name, c.kind.name, c.config_json(), c.seed, p] for c, p in zip(calls, parents, strict=True)])
