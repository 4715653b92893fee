"""Checkpoints that the generators of a stage read from files, for the stage's signed statement.

Each generator compares what it computes with what the checkpoint's trainer published beside the files
(`models.published_check`), and fails where the two differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.cluster.stage import OpenModels


class Readings:
    """Collects the readings of a stage's generators.

    Attributes:
        nats: name of a checkpoint → mean |log-probability difference| from its trainer.
    """

    def __init__(self) -> None:
        self.nats: dict[str, float] = {}

    def collected(self, open_models: OpenModels) -> OpenModels:
        """The same way to open models, whose generators are asked at the end."""

        @contextlib.contextmanager
        def opened(specs: Mapping[str, ModelSpec | GeneratorSpec]) -> Iterator[dict[str, ModelHandle]]:
            with open_models(specs) as models:
                yield models
                for role, spec in specs.items():
                    if isinstance(spec, GeneratorSpec):
                        self.nats |= get(models[role].readings.remote())

        return opened
