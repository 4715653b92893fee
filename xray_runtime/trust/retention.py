"""Retention: which checkpoints may be removed without breaking a chain.

Checkpoints stay that a registered alias points to, that the caller names or that people judged, with their ancestors,
evaluations and the comparisons among them. The others may be removed: each is renamed, then deleted, children before
parents, so that a crash never leaves a checkpoint without its parents.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.graph.artifacts import Benchmark, Comparison, Evaluation, Judgements
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.derived import SUFFIX as TOKENS
from xray_runtime.trust.log import decide


@dataclass(frozen=True)
class Prune:
    """Checkpoints to remove, children before parents, and the bytes that frees."""

    remove: list[Node]
    keep: list[Node]

    @property
    def bytes(self) -> int:
        return sum(entry.size for node in self.remove for entry in node.manifest.files)


def plan_prune(store: LineageStore, keep: Iterable[Node]) -> Prune:
    """The checkpoints that neither `keep`, nor an alias, nor human judgements need."""
    graph = store.graph
    wanted = {node.sha256 for node in keep}
    wanted |= {sha for sha, node in graph.nodes.items() if node.is_a(Judgements)}
    wanted |= {decision.checkpoint for decision in view(store.output).decided.values()}
    retained = set(with_history(graph, sorted(wanted)))
    order = graph.ancestors(list(graph.nodes))
    return Prune(
        remove=[graph.nodes[sha] for sha in reversed(order) if sha in graph.nodes and sha not in retained],
        keep=[graph.nodes[sha] for sha in order if sha in graph.nodes and sha in retained],
    )


def with_history(graph: CheckpointGraph, starts: Iterable[str]) -> list[str]:
    """`starts`, their ancestors, and the evaluations of and comparisons among them; parents first."""
    chosen = graph.ancestors(starts)
    kept = set(chosen)
    judged = [node for sha in kept for node in graph.judgements_of(sha, Evaluation, Benchmark, Comparison)]
    # Comparisons with champions that are not kept would keep every former champion.
    judgements = {
        node.sha256
        for node in judged
        if node.is_a(Evaluation, Benchmark) or all(node.manifest.parents.get(side) in kept for side in node.sides)
    }
    return graph.ancestors([*chosen, *sorted(judgements)])


def prune(store: LineageStore, plan: Prune) -> None:
    """Carry out `plan`. Each removal is a signed decision, so that an audit does not report a loss."""
    for node in plan.remove:
        decide(store.output, action="prune", checkpoint=node.sha256, note=node.name)
        # Readers ignore this name if a crash cuts the deletion short.
        aside = node.directory.with_name(f"{node.directory.name}.damaged-pruned-{os.getpid()}")
        os.rename(node.directory, aside)
        shutil.rmtree(aside)
        shutil.rmtree(f"{node.directory}{TOKENS}", ignore_errors=True)
