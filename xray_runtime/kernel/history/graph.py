"""The lineage graph: every checkpoint of a store and its parents, read from the manifests alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from xray_runtime.kernel.evidence.log import read_object
from xray_runtime.kernel.evidence.statement import OutsideSource, RunFacts, Statement, read_statement
from xray_runtime.kernel.graph.artifacts import Artifact, Benchmark, Comparison, Dataset, Evaluation, Preferences, is_a
from xray_runtime.kernel.graph.kind import KINDS, StageKind
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.store.checkpoints import read_manifest
from xray_runtime.kernel.store.derived import SUFFIX as TOKENS
from xray_runtime.kernel.store.manifest import Manifest
from xray_runtime.kernel.store.ref import CheckpointRef

IGNORED = (".building-", ".damaged-", TOKENS)
"""In names of directories that are not checkpoints: being built, moved aside, or tokens of a dataset."""

SIDES = ("policy", "against")
"""Roles of an evaluation whose kind is not registered in this process."""


@dataclass(frozen=True)
class Node:
    """One checkpoint on disk."""

    sha256: str
    directory: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """Stage and the start of its digest."""
        return f"{self.manifest.stage} {self.sha256[:12]}"

    def reference(self, mlflow_model_id: str | None) -> CheckpointRef:
        """The reference that stages receive."""
        return self.manifest.reference(self.directory.absolute(), self.sha256, mlflow_model_id)

    @property
    def is_at_home(self) -> bool:
        """Whether its directory is named after its stage and key."""
        return self.directory.name == f"{self.manifest.stage}-{self.manifest.key[:12]}"

    @cached_property
    def statement(self) -> Statement | None:
        """None where there is none that can be read."""
        try:
            return read_statement(self.directory)
        except (OSError, ValueError):
            return None

    @property
    def finished(self) -> str:
        """When this copy was made (ISO 8601); empty where no statement can be read."""
        return self.statement.predicate.details.metadata.finished if self.statement is not None else ""

    @property
    def run(self) -> RunFacts:
        """The run that made this copy; without facts and attempts where no statement can be read."""
        return self.statement.predicate.details.run if self.statement is not None else RunFacts(attempts=0)

    @property
    def kind(self) -> StageKind | None:
        """None where it is not registered in this process: a manifest must not make us import a module."""
        return find_kind(self.manifest.kind)

    def is_a(self, *types: type[Artifact]) -> bool:
        """Whether it has one of these types; a type that is not known in this process matches none."""
        return is_a(self.manifest.type, *types)

    @property
    def is_data(self) -> bool:
        """Whether it has a side to train on and one that is held out."""
        return self.is_a(Dataset, Preferences)

    @property
    def sides(self) -> tuple[str, ...]:
        """Roles that an evaluation or comparison judges, the policy's first; empty for anything else."""
        if not self.is_a(Evaluation, Benchmark, Comparison):
            return ()
        return (self.kind and self.kind.sides) or SIDES

    def judges(self, policy: str, *types: type[Artifact]) -> bool:
        """Whether it is of one of `types`, and the policy it judges is the checkpoint `policy`."""
        return self.is_a(*types) and self.manifest.parents.get(self.sides[0]) == policy

    @property
    def results_file(self) -> str | None:
        """The file with its results; for a kind that is not known here, one that a known kind has."""
        known = [self.kind] if self.kind is not None else KINDS.values()
        listed = {entry.path for entry in self.manifest.files}
        return next((kind.results for kind in known if kind.results in listed), None)

    @cached_property
    def results(self) -> dict[str, Any]:
        """Numbers of the stage: an evaluation, a reward summary, counts of a dataset."""
        return read_object(self.directory / self.results_file) if self.results_file is not None else {}


@dataclass
class CheckpointGraph:
    """Checkpoints by digest. Every walk ends on any input, in time linear in the number of edges."""

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
        """Digest → (role, digest) of the checkpoints made from it."""
        by_parent: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for node in self.nodes.values():
            for role, parent in node.manifest.parents.items():
                by_parent[parent].append((role, node.sha256))
        return dict(by_parent)

    def judgements_of(self, policy: str, *types: type[Artifact]) -> list[Node]:
        """Checkpoints of `types` (Evaluation, Comparison) that judge `policy`, by digest."""
        nodes = {child: self.nodes[child] for _, child in self.children.get(policy, [])}
        return [node for _, node in sorted(nodes.items()) if node.judges(policy, *types)]

    def parents(self, sha256: str) -> list[tuple[str, str]]:
        """(role, digest) of a checkpoint's parents, which need not be in the store."""
        node = self.nodes.get(sha256)
        return sorted(node.manifest.parents.items()) if node else []

    def ancestors(self, starts: Iterable[str]) -> list[str]:
        """`starts` and their ancestors, missing ones too, parents first."""
        return self._walk(starts, lambda sha: [parent for _, parent in self.parents(sha)])

    def descendants(self, starts: Iterable[str]) -> list[str]:
        """`starts` and all that was made from them, parents first."""
        return self._walk(starts, lambda sha: [child for _, child in self.children.get(sha, [])])[::-1]

    def own_sources(self, sha256: str) -> list[OutsideSource]:
        """Outside sources that a checkpoint read itself, without those of its parents; none without a statement."""
        statements = {
            sha: self.nodes[sha].statement
            for sha in [sha256, *(sha for _, sha in self.parents(sha256))]
            if sha in self.nodes
        }
        statement = statements.pop(sha256, None)
        inherited = [
            source for parent in statements.values() if parent for source in parent.predicate.build.internal.sources
        ]
        return [s for s in statement.predicate.build.internal.sources if s not in inherited] if statement else []

    def _walk(self, starts: Iterable[str], following: Any) -> list[str]:
        """Depth first; `following` gives what comes before a checkpoint in the order."""
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


def checkpoint_paths(store: Path) -> list[Path]:
    """The entries directly below `store` that should be checkpoints, sorted."""
    paths = sorted(store.iterdir()) if store.is_dir() else []
    return [p for p in paths if not any(mark in p.name for mark in IGNORED) and (p.is_symlink() or not p.is_file())]


def read_graph(store: Path) -> CheckpointGraph:
    """The graph of all checkpoints directly below `store`; links are not followed."""
    graph = CheckpointGraph()
    for path in checkpoint_paths(store):
        if path.is_symlink():
            graph.unreadable[path] = "it is a link"
            continue
        try:
            manifest, sha256 = read_manifest(path)
        except ValueError as error:
            graph.unreadable[path] = str(error)
        else:
            graph.add(Node(sha256, path, manifest))
    return graph
