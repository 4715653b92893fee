"""The search of `xray tune`: fields with their ranges, the metric, and the rule that ends trials early."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.kernel.config.loading import read_mapping
from xray_runtime.kernel.config.section import Count, Section
from xray_runtime.kernel.config.validation import ConfigError, validate_as

Mode = Literal["max", "min"]
Metric = Annotated[str, Field(pattern=r"^[a-z0-9_]+/[A-Za-z0-9_]+$")]
SEARCHES = "searches"
"""Folder of an output directory: trials and results of each search, below its name."""


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
