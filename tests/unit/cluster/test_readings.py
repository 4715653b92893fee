"""A stage's statement has what its generators read; other models are not asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.protocols import Ready
from xray_runtime.cluster.readings import Readings
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.models.objectives import ReferenceObjective

SPECS: dict[str, Any] = {
    "generator": GeneratorSpec(Path("sft-1"), 64, GeneratorConfig()),
    "champion": GeneratorSpec(Path("ppo-1"), 64, GeneratorConfig()),
    "reference": ModelSpec(Path("sft-1"), ReferenceObjective(1.0)),
}


def model(**nats: float) -> Any:
    return SimpleNamespace(readings=SimpleNamespace(remote=lambda: Ready(nats)))


@contextlib.contextmanager
def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"generator": model(sft=1e-7), "champion": model(ppo=2e-7), "reference": None}


def test_all_generators_are_asked_at_the_end() -> None:
    readings = Readings()
    with readings.collected(open_models)(SPECS):
        assert readings.nats == {}
    assert readings.nats == {"sft": 1e-7, "ppo": 2e-7}


def test_nothing_is_asked_after_an_error() -> None:
    readings = Readings()
    with pytest.raises(KeyError), readings.collected(open_models)(SPECS):
        raise KeyError
    assert readings.nats == {}
