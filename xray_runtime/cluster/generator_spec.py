"""The model that a generator starts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.models.lora import LoRAConfig

USES = ("xray_runtime.cluster.whole_model", "xray_runtime.cluster.generator")
"""Modules that run it, so that a stage's key digests their code."""


@dataclass(frozen=True)
class GeneratorSpec:
    """The model that a Generator starts with."""

    directory: Path
    max_length: int
    config: GeneratorConfig = field(default_factory=GeneratorConfig)
    pictures: tuple[Path, ...] = ()
    """Folders of the pictures that prompts may have."""
    adapter: LoRAConfig | None = None
    """Syncs bring an adapter with these fields, and never the weights of `directory`."""

    @property
    def layout(self) -> GeneratorConfig:
        return self.config

    @property
    def libraries(self) -> str:
        return self.config.libraries

    def located(self, find: Callable[[Path], Path]) -> GeneratorSpec:
        """The spec for another node; `find` returns a directory's path there."""
        return replace(self, directory=find(self.directory), pictures=tuple(map(find, self.pictures)))
