"""The checkpoints that a bundle is about, as its bills need them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xray_runtime.kernel.evidence.statement import OutsideSource, Statement, read_statement
from xray_runtime.kernel.graph.artifacts import Evaluation, Model, RewardModel
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.trust.card import RESULTS

PREFIX = "urn:xray:"
"""Begins the identifiers of checkpoints: `urn:xray:` and the sha256."""


@dataclass(frozen=True)
class History:
    """`node` and all that it came from and was judged by, `chosen`, parents first.

    Properties raise OSError or ValueError where a statement cannot be read.
    """

    output: Path
    graph: CheckpointGraph
    node: Node
    chosen: Sequence[str]

    @cached_property
    def nodes(self) -> list[Node]:
        """All of them."""
        return [self.graph.nodes[sha] for sha in self.chosen]

    @cached_property
    def parts(self) -> list[Node]:
        """Its ancestors, without evaluations."""
        return [one for one in self.nodes if not one.is_a(Evaluation) and one.sha256 != self.node.sha256]

    @cached_property
    def statements(self) -> dict[str, Statement]:
        """Checkpoint → its statement."""
        return {one.sha256: read_statement(one.directory) for one in self.nodes}

    @property
    def sources(self) -> list[OutsideSource]:
        """Everything that it and its ancestors read from outside the store, each once, however it was named."""
        found = self.statements[self.node.sha256].predicate.build.internal.sources
        return list({(source.field, source.digest): source for source in found}.values())

    @property
    def environment(self) -> dict[str, Any]:
        """Packages and machine of the last stage."""
        return self.statements[self.node.sha256].predicate.build.internal.environment

    def parents(self, node: Node) -> list[Node]:
        """Those that are here, by digest."""
        return [self.graph.nodes[sha] for sha in sorted(set(node.manifest.parents.values())) if sha in self.chosen]

    def results(self, node: Node) -> list[tuple[Node, str, float]]:
        """(evaluation, field of `RESULTS`, value) of a model."""
        return [
            (evaluation, name, evaluation.results[name])
            for evaluation in self.graph.judgements_of(node.sha256, Evaluation)
            for name in RESULTS
            if evaluation.results.get(name) is not None
        ]


def is_model(node: Node) -> bool:
    return node.is_a(Model, RewardModel)


def to_json(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"
