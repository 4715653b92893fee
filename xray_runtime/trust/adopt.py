"""An existing checkpoint as an input of a new run, wherever it lies.

    DIRECTORY        a checkpoint's own directory
    REF              as on the command line, of a checkpoint in the output directory
    DIR#REF          the same in another output directory
    FILE.tar#REF     the same in a bundle; FILE.tar alone where the bundle holds one policy

A checkpoint elsewhere is audited there, with the keys that the output directory trusts, and copied into it with its
ancestors and evaluations, so that the lineage of what is made from it is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Benchmark, Comparison, Evaluation
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore, find, open_lineage_store, resolve
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, verify
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.trust.attestation import record_problem
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.bundle import import_checkpoints, open_bundle, require_known_signers
from xray_runtime.trust.keys import known_keys
from xray_runtime.trust.retention import with_history

EXPERIMENT = "imported"
"""MLflow's experiment for checkpoints that were computed elsewhere."""


def checkpoint_from(ref: str, output: Path, tracking_uri: str | None) -> CheckpointRef:
    """The checkpoint `ref` names, copied into the output directory `output` if it lies elsewhere.

    Args:
        tracking_uri: of the MLflow that records `output`; None: there is none.

    Raises:
        ConfigError: `ref` names nothing or several things, or a checkpoint that was changed since it was published.
    """
    (output / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    with _located(ref, output, manifests_only=True) as (source, node):
        here = open_lineage_store(output, None).graph.nodes
        missing = source.output.resolve() != output.resolve() and any(
            sha not in here for sha in source.graph.ancestors([node.sha256])
        )
    if missing:
        with _located(ref, output, same_disk=output) as (source, node):
            _copy(source, node, output, tracking_uri, ref)
    node = open_lineage_store(output, tracking_uri).graph.nodes[node.sha256]
    problem = next(iter(verify(node.directory, node.sha256)), None)
    problem = problem or record_problem(output, node.directory, node.manifest, node.sha256)
    if problem is not None:
        raise ConfigError(f"{ref!r} differs from what was published: {problem}; see `xray audit`")
    return node.reference(_model_of(node.sha256, tracking_uri))


def sha256_of(ref: str, output: Path) -> str:
    """The checkpoint that `checkpoint_from` would copy, from manifests alone. Raises ConfigError as it does."""
    with _located(ref, output, manifests_only=True) as (_, node):
        return node.sha256


@contextlib.contextmanager
def _located(
    ref: str, output: Path, same_disk: Path | None = None, manifests_only: bool = False
) -> Iterator[tuple[LineageStore, Node]]:
    """(store, checkpoint) that `ref` names; a bundle is unpacked as `bundle.open_bundle` says."""
    path, _, name = (ref, "", "") if Path(ref).exists() else ref.partition("#")
    if Path(path).is_file():
        with open_bundle(Path(path), same_disk, manifests_only) as bundle:
            yield bundle, find(name, bundle) if name else _newest(bundle, path)
    elif name:
        source = open_lineage_store(Path(path), None)
        yield source, find(name, source)
    else:
        # A directory elsewhere is audited with the MLflow that is known there.
        yield resolve(ref, output, None)


def _newest(bundle: LineageStore, path: str) -> Node:
    """The one checkpoint of a bundle from which only evaluations were made."""
    graph = bundle.graph
    used = {
        parent
        for node in graph.nodes.values()
        for role, parent in node.manifest.parents.items()
        if role not in node.sides[:1]
    }
    last = [
        node
        for sha, node in graph.nodes.items()
        if sha not in used and not node.is_a(Evaluation, Benchmark, Comparison)
    ]
    if len(last) != 1:
        names = ", ".join(sorted(node.directory.name for node in last)[:8]) or "none"
        raise ConfigError(
            f"{path!r} is not allowed: it ends in {len(last)} checkpoints ({names}): choose one as {path}#REF"
        )
    return last[0]


def _copy(source: LineageStore, node: Node, output: Path, tracking_uri: str | None, ref: str) -> None:
    # With its evaluations: one of them signs the model card that lies beside the weights.
    order = with_history(source.graph, [node.sha256])
    roots = known_keys(output)
    require_known_signers(source, order, roots, ref, f"`xray keys trust KEY.pub --output {output}`")
    nodes = [source.graph.nodes[sha] for sha in order if sha in source.graph.nodes]
    broken = audit(source, nodes, public=roots).broken
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ConfigError(f"{ref!r} is not sound: the audit there found {broken[0]}{more}")
    import_checkpoints(source, order, output, tracking_uri=tracking_uri, experiment=EXPERIMENT)


def _model_of(sha256: str, tracking_uri: str | None) -> str | None:
    from xray_runtime.kernel.tracking.registry_view import RegistryView

    try:
        return RegistryView(tracking_uri).model_of(sha256) if tracking_uri is not None else None
    except FileNotFoundError:
        # The first run in this directory has not made its MLflow store yet.
        return None
