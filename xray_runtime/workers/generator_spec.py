"""The model that a generator starts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.config.engines import GeneratorConfig
from xray_runtime.workers.libraries import TRAINING, VLLM

if TYPE_CHECKING:
    from xray_runtime.workers.workhorse import Workhorse

USES = ("xray_runtime.workers.whole_model",)
"""Its proxy, so that a stage's key digests the code."""


def libraries_of(config: GeneratorConfig) -> str:
    """The libraries of a Generator's engine: `TRAINING` or `VLLM`."""
    return VLLM if config.engine == "vllm" else TRAINING


@dataclass(frozen=True)
class GeneratorSpec:
    """The model that a Generator starts with."""

    directory: Path
    max_length: int
    config: GeneratorConfig = field(default_factory=GeneratorConfig)

    @property
    def layout(self) -> GeneratorConfig:
        return self.config

    @property
    def libraries(self) -> str:
        return libraries_of(self.config)

    @property
    def workhorse(self) -> type[Workhorse]:
        from xray_runtime.workers.generator import Generator

        return Generator

    def located(self, find: Callable[[Path], Path]) -> GeneratorSpec:
        """The spec for another node; `find` returns a directory's path there."""
        return replace(self, directory=find(self.directory))
