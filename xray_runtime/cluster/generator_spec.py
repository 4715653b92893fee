"""The model that a generator starts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.engines.layouts import GeneratorConfig

if TYPE_CHECKING:
    from xray_runtime.cluster.workhorse import Workhorse

USES = ("xray_runtime.cluster.whole_model",)
"""Its proxy, so that a stage's key digests the code."""


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
        return self.config.libraries

    @property
    def workhorse(self) -> type[Workhorse]:
        from xray_runtime.cluster.generator import Generator

        return Generator

    def located(self, find: Callable[[Path], Path]) -> GeneratorSpec:
        """The spec for another node; `find` returns a directory's path there."""
        return replace(self, directory=find(self.directory))
