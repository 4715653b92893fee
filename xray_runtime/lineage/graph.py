"""The lineage graph: every checkpoint of a store and which came from which, read from the manifests alone."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from xray_runtime.data.derived import SUFFIX as TOKENS
from xray_runtime.graph.artifacts import Artifact, Benchmark, Comparison, Dataset, Evaluation, Preferences, is_a
from xray_runtime.graph.kind import KINDS, StageKind
from xray_runtime.lineage.attestation import read_statement
from xray_runtime.lineage.statement import Statement
from xray_runtime.stages.kinds import find_kind
from xray_runtime.store.checkpoints import read_bounded, read_manifest
from xray_runtime.store.manifest import Manifest
from xray_runtime.store.ref import CheckpointRef

IGNORED = (".building-", ".damaged-", TOKENS)
"""Directories that are no checkpoints: being built, moved aside, or tokens of a dataset."""

SIDES = ("policy", "against")
"""Roles of an evaluation whose kind nobody registered in this process."""


@dataclass(frozen=True)
class Node:
    """One checkpoint on disk."""

    sha256: str
    directory: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """What people call it: stage and the start of its digest."""
        return f"{self.manifest.stage} {self.sha256[:12]}"

    def reference(self, mlflow_model_id: str | None) -> CheckpointRef:
        """As a stage is handed it."""
        return CheckpointRef(
            uri=str(self.directory.absolute()),
            sha256=self.sha256,
            stage=self.manifest.stage,
            kind=self.manifest.kind,
            type=self.manifest.type,
            step=self.manifest.step,
            mlflow_model_id=mlflow_model_id,
        )

    @property
    def is_at_home(self) -> bool:
        """Whether its directory is the one its stage and key belong to."""
        return self.directory.name == f"{self.manifest.stage}-{self.manifest.key[:12]}"

    @cached_property
    def statement(self) -> Statement | None:
        """None where there is none that can be read."""
        try:
            return read_statement(self.directory)
        except (OSError, ValueError):
            return None

    @property
    def kind(self) -> StageKind | None:
        """None where nobody registered it in this process: a manifest must not make us import what it names."""
        return find_kind(self.manifest.kind)

    def is_a(self, *types: type[Artifact]) -> bool:
        """Whether it is of one of these types; one that is not known in this process is none."""
        return is_a(self.manifest.type, *types)

    @property
    def is_data(self) -> bool:
        """Whether it has a side to train on and one that is held out."""
        return self.is_a(Dataset, Preferences)

    @property
    def sides(self) -> tuple[str, ...]:
        """Roles that an evaluation or comparison judges, the policy's first; of anything else there are none."""
        if not self.is_a(Evaluation, Benchmark, Comparison):
            return ()
        return (self.kind and self.kind.sides) or SIDES

    def judges(self, policy: str, *types: type[Artifact]) -> bool:
        """Whether it is of one of `types`, and the policy it judges is the checkpoint `policy`."""
        return self.is_a(*types) and self.manifest.parents.get(self.sides[0]) == policy

    @property
    def results_file(self) -> str | None:
        """The file with the numbers it was made for; for a kind that is not known here, one that known kinds have."""
        known = [self.kind] if self.kind is not None else KINDS.values()
        listed = {entry.path for entry in self.manifest.files}
        return next((kind.results for kind in known if kind.results in listed), None)

    @cached_property
    def results(self) -> dict[str, Any]:
        """Numbers the stage left beside its files: evaluation, reward summary, counts of a dataset."""
        if self.results_file is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                content = json.loads(read_bounded(self.directory / self.results_file))
                return content if isinstance(content, dict) else {}
        return {}


@dataclass
class Graph:
    """Checkpoints by digest. Every walk keeps a visited set: it ends on any input, in time linear in the edges."""

    nodes: dict[str, Node] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)
    """Directories that should hold a checkpoint, and why they do not."""
    duplicates: list[Node] = field(default_factory=list)
    """Further copies of a checkpoint that is in `nodes`."""

    def add(self, node: Node) -> None:
        there = self.nodes.get(node.sha256)
        if there is None:
            self.nodes[node.sha256] = node
        elif node.is_at_home and not there.is_at_home:
            self.nodes[node.sha256] = node
            self.duplicates.append(there)
        else:
            self.duplicates.append(node)
        self.__dict__.pop("children", None)

    @cached_property
    def children(self) -> dict[str, list[tuple[str, str]]]:
        """Digest → (role, digest) of what was made from it."""
        found: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for node in self.nodes.values():
            for role, parent in node.manifest.parents.items():
                found[parent].append((role, node.sha256))
        return dict(found)

    def judgements_of(self, policy: str, *types: type[Artifact]) -> list[Node]:
        """Checkpoints of `types` (Evaluation, Comparison) that judge `policy`, by digest."""
        found = {child: self.nodes[child] for _, child in self.children.get(policy, [])}
        return [node for _, node in sorted(found.items()) if node.judges(policy, *types)]

    def parents(self, sha256: str) -> list[tuple[str, str]]:
        """(role, digest) of what a checkpoint was made from; a parent need not be in the store."""
        node = self.nodes.get(sha256)
        return sorted(node.manifest.parents.items()) if node else []

    def ancestors(self, starts: Iterable[str]) -> list[str]:
        """`starts` and all they came from, also what is missing, each before what was made from it."""
        return self._walk(starts, lambda sha: [parent for _, parent in self.parents(sha)])

    def descendants(self, starts: Iterable[str]) -> list[str]:
        """`starts` and all that was made from them, each before what was made from it."""
        return self._walk(starts, lambda sha: [child for _, child in self.children.get(sha, [])])[::-1]

    def _walk(self, starts: Iterable[str], following: Any) -> list[str]:
        """Depth first, what follows before what is followed."""
        order: list[str] = []
        seen: set[str] = set()
        for start in starts:
            pending = [(start, False)]
            while pending:
                sha, expanded = pending.pop()
                if expanded:
                    order.append(sha)
                elif sha not in seen:
                    seen.add(sha)
                    pending.append((sha, True))
                    pending += [(other, False) for other in reversed(following(sha)) if other not in seen]
        return order


def checkpoint_entries(store: Path) -> list[os.DirEntry[str]]:
    """What lies directly below `store` and should be a checkpoint, by name."""
    if not store.is_dir():
        return []
    with os.scandir(store) as entries:
        found = [e for e in entries if not any(mark in e.name for mark in IGNORED)]
    return sorted((e for e in found if not e.is_file(follow_symlinks=False)), key=lambda entry: entry.name)


def read_graph(store: Path) -> Graph:
    """The graph of all checkpoints directly below `store`; links are not followed."""
    graph = Graph()
    for entry in checkpoint_entries(store):
        path = store / entry.name
        if entry.is_symlink():
            graph.unreadable[path] = "it is a link"
            continue
        try:
            manifest, sha256 = read_manifest(path)
        except ValueError as error:
            graph.unreadable[path] = str(error)
        else:
            graph.add(Node(sha256, path, manifest))
    return graph
