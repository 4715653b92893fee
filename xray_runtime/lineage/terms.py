"""The licences of all sources that a model was made from."""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xray_runtime.config.sources import SourceTerms

if TYPE_CHECKING:
    from xray_runtime.evidence.statement import OutsideSource, Statement
    from xray_runtime.lineage.graph import Graph
    from xray_runtime.store.content_digest import Outside


def terms_of(outside: Outside, declared: SourceTerms | None) -> SourceTerms:
    """The declared terms, completed with the licence and name of a package."""
    terms = declared or SourceTerms()
    if outside.kind != "package":
        return terms
    metadata = importlib.metadata.metadata(outside.digest.partition("==")[0])
    own = next((metadata[field] for field in ("License-Expression", "License") if field in metadata), None)
    return terms.model_copy(
        update={
            "license": terms.license or (own if own and "\n" not in own else None),
            "origin": terms.origin or f"the package {outside.digest}",
        }
    )


def conflicts(graph: Graph, model: str, allowed: list[str]) -> Iterator[str]:
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
            read = own_sources(graph, sha, node.statement)
            sources = [(f"{found.name} ({found.field})", found.terms.license) for found in read]
        for source, licence in sources:
            if not licence or licence.casefold() not in names:
                has = f"has the licence {licence}" if licence else "has no licence on record"
                yield f"{source} {has}: {' → '.join(_path(graph, sha, model))}"


def own_sources(graph: Graph, sha: str, statement: Statement) -> list[OutsideSource]:
    """Outside sources that a checkpoint read itself, without those of its parents."""
    parents = [graph.nodes[parent].statement for _, parent in graph.parents(sha) if parent in graph.nodes]
    inherited = [found for parent in parents if parent for found in parent.predicate.build.internal.sources]
    return [found for found in statement.predicate.build.internal.sources if found not in inherited]


def _path(graph: Graph, start: str, end: str) -> list[str]:
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
