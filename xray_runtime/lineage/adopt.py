"""A checkpoint that exists already as an input of a new run, wherever it lies.

    DIRECTORY        a checkpoint's own directory
    REF              as on the command line, of a checkpoint in the output directory
    DIR#REF          the same in another output directory
    FILE.tar#REF     the same in a bundle; FILE.tar alone where the bundle holds one policy

What lies elsewhere is audited there and brought into the output directory with all it came from, its evaluations, its
records and its keys: the lineage of what is made from it goes on behind it.
"""

from __future__ import annotations

from pathlib import Path

from xray_runtime.config.validation import ConfigError
from xray_runtime.graph.artifacts import Benchmark, Comparison, Evaluation
from xray_runtime.lineage.audit.checkpoints import audit
from xray_runtime.lineage.bundle import opened, take_in
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.reference import LineageStore, find, open_lineage_store, resolve
from xray_runtime.lineage.retention import with_history
from xray_runtime.store.checkpoints import CHECKPOINTS, verify
from xray_runtime.store.ref import CheckpointRef

EXPERIMENT = "imported"
"""Of MLflow, for what was computed elsewhere."""


def checkpoint_from(ref: str, output: Path, tracking_uri: str | None) -> CheckpointRef:
    """The checkpoint `ref` names, in the output directory `output`; it is brought there where it lies elsewhere.

    Args:
        tracking_uri: of the MLflow that `output` is recorded in; None: it has none.

    Raises:
        ConfigError: `ref` names nothing, or several things, or something that is not as it was published; one line.
    """
    (output / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    place, _, name = (ref, "", "") if Path(ref).exists() else ref.partition("#")
    if Path(place).is_file():
        with opened(Path(place), manifests_only=True) as bundle:
            node = find(name, bundle) if name else _newest(bundle, place)
            missing = _missing(bundle, node, output)
        if missing:
            with opened(Path(place), same_disk=output) as bundle:
                _bring(bundle, bundle.graph.nodes[node.sha256], output, tracking_uri, ref, move=True)
    else:
        if name:
            source = open_lineage_store(Path(place), None)
            node = find(name, source)
        else:
            # What lies elsewhere is audited with the MLflow that is known there.
            source, node = resolve(ref, output, None)
        if source.output.resolve() != output.resolve() and _missing(source, node, output):
            _bring(source, node, output, tracking_uri, ref, move=False)
    store = open_lineage_store(output, tracking_uri)
    node = store.graph.nodes[node.sha256]
    problems = verify(node.directory, node.sha256)
    if problems:
        raise ConfigError(f"{ref!r} differs from what was published: {problems[0]}; see `xray audit`")
    return node.reference(_model_of(node.sha256, tracking_uri))


def sha256_of(ref: str, output: Path) -> str:
    """The checkpoint that `checkpoint_from` would bring; nothing is brought, and only manifests are read.

    Raises:
        ConfigError: `ref` names nothing, or several things.
    """
    place, _, name = (ref, "", "") if Path(ref).exists() else ref.partition("#")
    if Path(place).is_file():
        with opened(Path(place), manifests_only=True) as bundle:
            return (find(name, bundle) if name else _newest(bundle, place)).sha256
    if name:
        return find(name, open_lineage_store(Path(place), None)).sha256
    return resolve(ref, output, None)[1].sha256


def _newest(bundle: LineageStore, path: str) -> Node:
    """The one checkpoint of a bundle that nothing was made from but evaluations."""
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


def _missing(source: LineageStore, node: Node, output: Path) -> bool:
    """Whether anything of the checkpoint and what it came from is not in `output` yet."""
    here = open_lineage_store(output, None).graph.nodes
    return any(sha not in here for sha in source.graph.ancestors([node.sha256]))


def _bring(source: LineageStore, node: Node, output: Path, tracking_uri: str | None, ref: str, *, move: bool) -> None:
    # With its evaluations: one of them signs the model card that lies beside the weights.
    order = with_history(source.graph, [node.sha256])
    result = audit(source, [source.graph.nodes[sha] for sha in order if sha in source.graph.nodes])
    if not result.is_sound:
        broken = result.broken
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ConfigError(f"{ref!r} is not sound: the audit there found {broken[0]}{more}")
    take_in(source, order, output, tracking_uri=tracking_uri, experiment=EXPERIMENT, move=move)


def _model_of(sha256: str, tracking_uri: str | None) -> str | None:
    from xray_runtime.lineage.audit.registry import RegistryView

    try:
        return RegistryView(tracking_uri).model_of(sha256) if tracking_uri is not None else None
    except FileNotFoundError:
        # The first run in this directory has not made its MLflow store yet.
        return None
