"""The content of an MLflow store, read once."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from xray_runtime.kernel.tracking.registry import check_store, open_client

PAGE = 1000
Point = tuple[str, int, int, str]
"""Metric, step, time in ms, value."""


def point(name: str, step: int, time_ms: int, value: float) -> Point:
    """A point that can be compared: MLflow's databases hold no infinity, and NaN equals nothing."""
    largest = sys.float_info.max
    return name, step, time_ms, repr(min(max(value, -largest), largest) if not math.isnan(value) else value)


class RegistryView:
    """The content of an MLflow store, read once and never written. Raises as `check_store`."""

    def __init__(self, uri: str) -> None:
        check_store(uri)
        self._client = open_client(uri)
        from mlflow.entities import ViewType

        client = self._client
        self.experiments = {e.experiment_id: e for e in _all(client.search_experiments, view_type=ViewType.ALL)}
        ids = list(self.experiments)
        self.models = {m.model_id: m for m in _all(client.search_logged_models, experiment_ids=ids)}
        runs = _all(client.search_runs, experiment_ids=ids, run_view_type=ViewType.ALL)
        self.runs = {r.info.run_id: r for r in runs}
        self.registered = _all(client.search_registered_models)
        self.versions = {(v.name, str(v.version)): v for v in _all(client.search_model_versions)}
        self.by_sha: dict[str, list[Any]] = defaultdict(list)
        for model in self.models.values():
            self.by_sha[model.params.get("sha256", "")].append(model)

    def model_inputs(self, run_id: str) -> set[str]:
        """Ids of the models a run read; searching for runs does not give them."""
        run = self._client.get_run(run_id)
        outputs = {o.model_id for o in (run.outputs.model_outputs if run.outputs else [])}
        # A metric logged with a run's output makes that an input of the run too.
        return {i.model_id for i in (run.inputs.model_inputs if run.inputs else [])} - outputs

    def history(self, run_id: str, names: Iterable[str]) -> set[Point]:
        """Every point of these metrics of a run."""
        return {
            point(name, metric.step, metric.timestamp, metric.value)
            for name in names
            for metric in self._client.get_metric_history(run_id, name)
        }

    def model_of(self, sha256: str) -> str | None:
        """The LoggedModel that is a checkpoint; None where the store does not know it."""
        models = self.by_sha.get(sha256)
        return models[0].model_id if models else None

    def model_sha(self, model_id: str) -> str | None:
        """The checkpoint that a LoggedModel names."""
        model = self.models.get(model_id)
        return model.params.get("sha256") if model is not None else None


def _all(search: Callable[..., Any], **arguments: Any) -> list[Any]:
    from mlflow.utils import get_results_from_paginated_fn

    pages: list[Any] = get_results_from_paginated_fn(
        lambda size, token: search(max_results=size, page_token=token, **arguments), PAGE
    )
    return pages
