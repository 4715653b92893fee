"""The graph that stages are added to, and the graphs that are only written down: both belong to a `with` block."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.config.validation import ConfigError

if TYPE_CHECKING:
    from xray_runtime.graph.graph import Graph

CURRENT: contextvars.ContextVar[Graph] = contextvars.ContextVar("xray-graph")


def current_graph() -> Graph:
    """The graph of the innermost `with`. Raises ConfigError outside of one."""
    graph = CURRENT.get(None)
    if graph is None:
        raise ConfigError('a stage can be called only inside `with xray.workspace("DIRECTORY"):`')
    return graph


_PLANNING: contextvars.ContextVar[list[tuple[Path, Graph]] | None] = contextvars.ContextVar("planning", default=None)


def is_planning() -> list[tuple[Path, Graph]] | None:
    """Where graphs are only written down at the moment: the list they go into, with their output directories."""
    return _PLANNING.get()


@contextmanager
def planning() -> Iterator[list[tuple[Path, Graph]]]:
    """Workspaces that are opened in the block only record their graphs."""
    graphs: list[tuple[Path, Graph]] = []
    token = _PLANNING.set(graphs)
    try:
        yield graphs
    finally:
        _PLANNING.reset(token)
