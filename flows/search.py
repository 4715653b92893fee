"""What `xray tune` searches: fields with their ranges, what is measured, what ends a trial early.

Everything about a search that can be wrong is found here, before anything is computed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from xray.flows.subject import Subject
from xray_runtime.config.engines import Count, Section
from xray_runtime.config.loading import read_mapping
from xray_runtime.config.validation import CombinationError, ConfigError, validate_as
from xray_runtime.graph.graph import StageCall
from xray_runtime.store.identity import digest

Mode = Literal["max", "min"]
Metric = Annotated[str, Field(pattern=r"^[a-z0-9_]+/[A-Za-z0-9_]+$")]
GOLDEN = (1 + math.sqrt(5)) / 2
"""Between any two numbers of a range it finds one that is not whole."""
MAX_DRAWS = 200
"""Draws among which one must be a config that is allowed."""


class FieldRange(Section):
    """The values of one field that are tried: from `low` to `high`, or one of `choices`."""

    low: float | None = None
    high: float | None = None
    """Both ends belong to the range; whole numbers where the field takes whole numbers."""
    log: bool = False
    """Equal ratios are equally likely, not equal differences: for learning rates and the like."""
    choices: Annotated[list[Any], Field(min_length=2)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log:
                raise ValueError("choices must stand alone, without low, high and log")
        elif self.low is None or self.high is None:
            raise ValueError("must have low and high, or choices")
        elif self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must be less than high = {self.high:g}")
        elif self.log and self.low <= 0:
            raise ValueError(f"low = {self.low:g} must be greater than 0 with log")
        return self


class PruneConfig(Section):
    """A trial ends early when its best value so far is worse than the median, over the trials before it, of their means
    up to the same step (Golovin et al. 2017, Google Vizier)."""

    stage: Annotated[str, Field(min_length=1)] | None = None
    """Stage whose progress is watched. Default: the search's `until`."""
    metric: Metric | None = None
    """Metric that stage logs while it works. Default: the search's `metric`."""
    mode: Mode | None = None
    """Default: the search's `mode`."""
    after_steps: Count = 1
    """No trial ends before this many steps (PPO: iterations) of the stage."""
    min_trials: Count = 3
    """Trials to compare with that must have come as far."""


class SearchConfig(Section):
    """A search over any fields of a lifecycle's config, or over a flow's parameters and the fields of its stages."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")] = "search"
    """Directory below searches/, and the tag `xray.search` of its runs in MLflow."""
    fields: Annotated[dict[str, FieldRange], Field(min_length=1)]
    """Dotted path of a field → the values that are tried: `ppo.stages.0.lr` in a config; of a flow a parameter
    (`steps`) or the field of a stage (`ppo.lr`)."""
    until: Annotated[str, Field(min_length=1)] = "evaluate"
    """Stage after which a trial ends; those after it are not run."""
    metric: Metric = "evaluate/win_rate"
    """Metric of that stage (docs/metrics.md) whose last value counts."""
    mode: Mode = "max"
    trials: Annotated[int, Field(ge=1, le=10_000)] = 20
    concurrent: Count = 1
    """Trials at work at the same time; each waits for the devices that its stages need."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of the search alone: trials one after the other try the same values with the same seed."""
    prune: PruneConfig | None = None
    """None: every trial runs to its end."""

    @property
    def watched(self) -> tuple[str, str] | None:
        """(stage, metric) by which trials are ended early."""
        if self.prune is None:
            return None
        return self.prune.stage or self.until, self.prune.metric or self.metric


@dataclass(frozen=True)
class Span:
    """A range of numbers, both ends included."""

    low: float
    high: float
    log: bool
    whole: bool

    @property
    def ends(self) -> list[float]:
        return [int(end) if self.whole else end for end in (self.low, self.high)]

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def draw(self, rng: random.Random) -> float:
        return rng.randint(int(self.low), int(self.high)) if self.whole else rng.uniform(self.low, self.high)


Space = dict[str, Span | list[Any]]
"""Path of a field → numbers of a range, or the choices."""


def load_search(path: Path, trials: int | None = None) -> SearchConfig:
    """The search in a YAML or JSON file; its name is the file's where it has none.

    Raises:
        ConfigError: anything is wrong with it.
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
    """What makes two trials the same: the subject with its values, and what of the search decides how one runs."""
    how = search.model_dump(mode="json", include={"until", "metric", "mode", "prune"})
    return digest(subject.with_values(values).content() | how)


def search_digest(subject: Subject, search: SearchConfig) -> str:
    """What makes two searches the same: all but how many trials there are, and how many of them at a time."""
    what = search.model_dump(mode="json", exclude={"name", "trials", "concurrent"})
    return digest(subject.content() | {"search": what})


def calls_until(subject: Subject, stage: str) -> list[StageCall]:
    """The stages of a graph that ends after `stage`. Raises ConfigError where it has none of that name."""
    calls = subject.recorded().calls
    if stage not in calls:
        raise ConfigError(f"until: {stage!r} is not allowed: must be one of {', '.join(calls)}")
    return list(calls.values())[: list(calls).index(stage) + 1]


def search_space(subject: Subject, search: SearchConfig) -> Space:
    """The space over which `subject` is searched.

    Raises:
        ConfigError: no such stage or field, a value that the field does not allow, a range for a field that is no
            number, or a field that nothing measured depends on.
    """
    names = [call.name for call in calls_until(subject, search.until)]
    if search.watched is not None and search.watched[0] not in names:
        raise ConfigError(f"prune.stage: {search.watched[0]!r} is not allowed: must be one of {', '.join(names)}")
    space = {path: _span(subject, path, field) for path, field in search.fields.items()}
    _check_draws(subject, search, space)
    return space


def _span(subject: Subject, path: str, field: FieldRange) -> Span | list[Any]:
    if field.choices is not None:
        for value in field.choices:
            _try(subject, path, value)
        return field.choices
    assert field.low is not None
    assert field.high is not None
    for value in (field.low, field.high):
        _try(subject, path, int(value) if value.is_integer() else value)
    try:
        _try(subject, path, field.low + (field.high - field.low) / GOLDEN)
        whole = False
    except ConfigError:
        whole = True
    return Span(field.low, field.high, field.log, whole)


def _try(subject: Subject, path: str, value: Any) -> None:
    """Raises ConfigError where the field at `path` does not take `value`, whatever the fields beside it say: they may
    vary too."""
    try:
        subject.with_values({path: value}).recorded()
    except CombinationError:
        return


def _check_draws(subject: Subject, search: SearchConfig, space: Space) -> None:
    """At least one draw must be allowed, and every field must be read by a stage that is run."""
    rng = random.Random(search.seed)
    refused: ConfigError | None = None
    for _ in range(MAX_DRAWS):
        values = {path: s.draw(rng) if isinstance(s, Span) else rng.choice(s) for path, s in space.items()}
        try:
            drawn = subject.with_values(values)
            calls_until(drawn, search.until)
            break
        except ConfigError as error:
            refused = refused or error
    else:
        raise ConfigError(f"fields: none of {MAX_DRAWS} random configs is valid: {refused}")
    for path, values_of in space.items():
        ends = values_of.ends if isinstance(values_of, Span) else values_of
        read = {_read(drawn, search.until, path, end) for end in ends}
        if len(read) == 1 and None not in read:
            raise ConfigError(f"fields.{path}: is not allowed: no stage up to {search.until!r} reads it")


def _read(subject: Subject, until: str, path: str, value: Any) -> str | None:
    """Digest of what the stages read with `value` at `path`; None where that is not allowed."""
    try:
        calls = calls_until(subject.with_values({path: value}), until)
    except ConfigError:
        return None
    parents = [{role: handle.name for role, handle in call.parents.items()} for call in calls]
    return digest([[c.name, c.kind.name, c.config_json(), c.seed, p] for c, p in zip(calls, parents, strict=True)])
