"""Planning mode of a `with` block: workspaces only record their graphs."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xray_runtime.kernel.graph.graph import Graph


@dataclass(frozen=True)
class Planning:
    """Planning mode, in which workspaces only record their graphs."""

    fields: Mapping[str, Any]
    """`STAGE.FIELD` or `runtime.FIELD` → value; overrides for these graphs."""
    graphs: list[tuple[Path, Graph]] = field(default_factory=list)
    """The graphs with their output directories."""


_PLANNING: contextvars.ContextVar[Planning | None] = contextvars.ContextVar("planning", default=None)


def is_planning() -> Planning | None:
    """The planning mode, if it is on."""
    return _PLANNING.get()


@contextmanager
def planning(fields: Mapping[str, Any] | None = None) -> Iterator[list[tuple[Path, Graph]]]:
    """In the block, workspaces only record their graphs, with `fields` (`STAGE.FIELD` → value) overridden."""
    planned = Planning(fields or {})
    token = _PLANNING.set(planned)
    try:
        yield planned.graphs
    finally:
        _PLANNING.reset(token)
