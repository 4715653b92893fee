"""The licences of all sources that a model was made from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from xray_runtime.kernel.history.graph import CheckpointGraph


def conflicts(graph: CheckpointGraph, model: str, allowed: list[str]) -> Iterator[str]:
    """Every source behind `model` (a sha256) without a licence in `allowed`, and its path to the model.

    The sources of a reward model count too: the policy learned from its scores.
    """
    names = {name.casefold() for name in allowed}
    for sha in graph.ancestors([model]):
        node = graph.nodes.get(sha)
        sources: list[tuple[str, str | None]]
        if node is None:
            sources = [(f"checkpoint {sha[:12]}, which is not in the store,", None)]
        elif node.statement is None:
            sources = [(f"{node.name}, which has no statement,", None)]
        else:
            read = graph.own_sources(sha)
            sources = [(f"{outside.name} ({outside.field})", outside.terms.license) for outside in read]
        for source, licence in sources:
            if not licence or licence.casefold() not in names:
                has = f"has the licence {licence}" if licence else "has no licence on record"
                yield f"{source} {has}: {' → '.join(_path(graph, sha, model))}"


def _path(graph: CheckpointGraph, start: str, end: str) -> list[str]:
    """A shortest path from a checkpoint to a descendant."""
    after, pending = {end: ""}, deque([end])
    while start not in after:
        child = pending.popleft()
        for _, parent in graph.parents(child):
            if parent not in after:
                after[parent] = child
                pending.append(parent)
    way = [start]
    while way[-1] != end:
        way.append(after[way[-1]])
    return [graph.nodes[sha].name if sha in graph.nodes else sha[:12] for sha in way]
