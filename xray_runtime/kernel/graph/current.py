"""The current graph of a `with` block."""

from __future__ import annotations

import contextvars

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.handles import OpenGraph

CURRENT: contextvars.ContextVar[OpenGraph] = contextvars.ContextVar("xray-graph")


def current_graph() -> OpenGraph:
    """The graph of the innermost `with`. Raises ConfigError outside of any."""
    graph = CURRENT.get(None)
    if graph is None:
        raise ConfigError('a stage can be called only inside `with xray.workspace("DIRECTORY"):`')
    return graph
