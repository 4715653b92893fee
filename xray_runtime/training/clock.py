"""Seconds per phase of an iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from xray_runtime.training.finite import naming


class PhaseClock:
    """Measures the phases of one iteration.

    Args:
        where: stage and iteration, for errors about numbers that are not finite.
    """

    def __init__(self, where: str) -> None:
        self._where, self.seconds = where, dict[str, float]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with naming(f"{self._where} ({name})"):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"seconds/{name}": s for name, s in self.seconds.items()} | {
            "seconds/total": sum(self.seconds.values())
        }
