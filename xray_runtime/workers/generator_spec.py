"""Which model a generator starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.config.engines import GeneratorConfig

if TYPE_CHECKING:
    from xray_runtime.workers.workhorse import Workhorse


@dataclass(frozen=True)
class GeneratorSpec:
    """Which model a Generator starts from."""

    directory: Path
    max_length: int
    config: GeneratorConfig = field(default_factory=GeneratorConfig)

    @property
    def workhorse(self) -> type[Workhorse]:
        """The kind of Workhorse that holds it."""
        from xray_runtime.workers.generator import Generator

        return Generator
