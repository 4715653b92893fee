"""REF on the command line → a checkpoint and the store it lies in."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from xray_runtime.config.validation import ConfigError
from xray_runtime.credentials import has_login, strip_credentials, tracking_address
from xray_runtime.graph.artifacts import TYPES, Model
from xray_runtime.lineage.graph import Graph, Node, checkpoint_entries, read_graph
from xray_runtime.lineage.log import Published, readable_lines
from xray_runtime.store.checkpoints import CHECKPOINTS, read_manifest
from xray_runtime.store.manifest import MANIFEST
from xray_runtime.tracking.registry import registered_checkpoint

ALLOWED = (
    "a checkpoint directory, a sha256 (or its start, 6 digits at least) or a stage name with --output DIR, or a "
    "registered model NAME@ALIAS or NAME/VERSION"
)


@dataclass(frozen=True)
class LineageStore:
    """An output directory with its graph and its tracking store."""

    output: Path
    graph: Graph
    tracking_uri: str | None
    """None where no store of MLflow is known."""

    @property
    def artifacts(self) -> Path | None:
        """Where new experiments keep their artifacts; None leaves that to a server."""
        own = self.tracking_uri == f"sqlite:///{(self.output / 'mlflow.db').absolute()}"
        return self.output.absolute() / "mlartifacts" if own else None


def open_lineage_store(output: Path, tracking_uri: str | None) -> LineageStore:
    """The output directory of lifecycles.

    Args:
        tracking_uri: MLflow's address; by default the store inside `output`, else MLFLOW_TRACKING_URI, if there is one.

    Raises:
        ConfigError: `output` holds no checkpoints, or a login stands in `tracking_uri`.
    """
    uri = _tracking(output, tracking_uri)
    return LineageStore(output, read_graph(output / CHECKPOINTS), uri)


def _tracking(output: Path, tracking_uri: str | None) -> str | None:
    check_tracking_uri(tracking_uri)
    if not (output / CHECKPOINTS).is_dir():
        raise ConfigError(f"--output: {str(output)!r} is not allowed: must be a directory with {CHECKPOINTS}/ in it")
    database = output / "mlflow.db"
    own = f"sqlite:///{database.absolute()}" if database.is_file() else None
    return tracking_uri or own or tracking_address()


def check_tracking_uri(uri: str | None) -> None:
    """Raises ConfigError where a login stands in an address that was given as an option or parameter."""
    if uri is not None and has_login(uri):
        raise ConfigError(
            f"--tracking-uri: a login in {strip_credentials(uri)!r} is not allowed: others can read a command "
            "line, and the parameters of a run: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )


def resolve(reference: str, output: Path | None, tracking_uri: str | None) -> tuple[LineageStore, Node]:
    """What `reference` names. Raises ConfigError with what is allowed when it names nothing, or several things."""
    check_tracking_uri(tracking_uri)
    if _is_directory(reference, output):
        return _by_directory(Path(reference).absolute(), tracking_uri)
    if _is_registered(reference):
        sha256, output, tracking_uri = _registered(reference, output, tracking_uri)
        store = open_lineage_store(output, tracking_uri)
        return store, find(sha256, store)
    if output is None:
        raise ConfigError(f"REF: {reference!r} is not allowed: must be {ALLOWED}")
    store = open_lineage_store(output, tracking_uri)
    return store, find(reference, store)


def resolve_in(reference: str, store: LineageStore) -> Node:
    """As `resolve`, in the manifests of `store`, which are not read again unless `reference` is a directory."""
    if _is_directory(reference, store.output):
        return _by_directory(Path(reference).absolute(), store.tracking_uri)[1]
    if _is_registered(reference):
        return find(_registered(reference, store.output, store.tracking_uri)[0], store)
    return find(reference, store)


def resolve_history(reference: str, output: Path | None, tracking_uri: str | None) -> tuple[LineageStore, Node]:
    """As `resolve`, to show where a checkpoint came from: the graph may hold that alone, with few manifests read."""
    check_tracking_uri(tracking_uri)
    place, name = output, reference
    if _is_directory(reference, output):
        directory = Path(reference).absolute()
        if directory.parent.name != CHECKPOINTS:
            return resolve(reference, output, tracking_uri)
        place, name = directory.parent.parent, directory.name
    elif _is_registered(reference):
        name, place, tracking_uri = _registered(reference, output, tracking_uri)
    if place is None:
        return resolve(reference, output, tracking_uri)
    uri = _tracking(place, tracking_uri)
    found = _read_history(place, name)
    if found is not None:
        return LineageStore(place, found[0], uri), found[1]
    return resolve(reference, output, tracking_uri)


def _read_history(output: Path, reference: str) -> tuple[Graph, Node] | None:
    """The checkpoint of this sha256 (or its start), stage or directory name, with all it came from.

    The log says where each lies; what is found there counts only if it is the checkpoint that was looked for. None
    where the log is not of what is there, or `reference` names nothing or several: reading all manifests tells more.
    """
    entries = [line.entry for line in readable_lines(output) if isinstance(line.entry, Published)]
    names = {entry.name for entry in checkpoint_entries(output / CHECKPOINTS)}
    known = {entry.directory: entry.checkpoint for entry in entries if entry.directory in names}
    if known.keys() != names:
        return None
    if re.fullmatch(r"[0-9a-f]{6,64}", reference):
        chosen = [sha for sha in known.values() if sha.startswith(reference)]
    else:
        chosen = [sha for name, sha in known.items() if reference in (name, name.rpartition("-")[0])]
    places = {sha: name for name, sha in known.items()}
    if len(chosen) != 1 or len(places) != len(known):
        return None
    nodes, pending = dict[str, Node](), chosen
    while pending:
        wanted = pending.pop()
        try:
            directory = output / CHECKPOINTS / places[wanted]
            manifest, sha256 = read_manifest(directory)
        except (KeyError, ValueError):
            return None
        if sha256 != wanted:
            return None
        nodes[sha256] = Node(sha256, directory, manifest)
        pending += [parent for parent in manifest.parents.values() if parent not in nodes and parent not in pending]
    return Graph(nodes), next(iter(nodes.values()))


def _is_directory(reference: str, output: Path | None) -> bool:
    known = output is not None and (output / CHECKPOINTS).is_dir()
    return Path(reference).is_dir() and (not known or os.sep in reference)


def _is_registered(reference: str) -> bool:
    return "@" in reference or re.fullmatch(r"[^/]+/\d+", reference) is not None


def _by_directory(directory: Path, tracking_uri: str | None) -> tuple[LineageStore, Node]:
    if not (directory / MANIFEST).is_file():
        if (directory / CHECKPOINTS).is_dir():
            raise ConfigError(f"REF: {str(directory)!r} holds many checkpoints: name one, or use --output and --all")
        raise ConfigError(f"REF: {str(directory)!r} is not allowed: there is no {MANIFEST} in it")
    try:
        manifest, sha256 = read_manifest(directory)
    except ValueError as error:
        raise ConfigError(f"REF: {error}") from None
    if directory.parent.name == CHECKPOINTS:
        store = open_lineage_store(directory.parent.parent, tracking_uri)
        return store, next(
            (n for n in (*store.graph.nodes.values(), *store.graph.duplicates) if n.directory == directory),
            Node(sha256, directory, manifest),
        )
    graph = read_graph(directory.parent)
    node = Node(sha256, directory, manifest)
    if sha256 not in graph.nodes:
        graph.add(node)
    return LineageStore(directory.parent, graph, tracking_uri), node


def _registered(reference: str, output: Path | None, tracking_uri: str | None) -> tuple[str, Path, str]:
    """(sha256, output directory, MLflow's address) of a registered model's alias or version."""
    uri = tracking_uri
    if uri is None and output is not None and (output / "mlflow.db").is_file():
        uri = f"sqlite:///{(output / 'mlflow.db').absolute()}"
    uri = uri or tracking_address()
    if uri is None:
        raise ConfigError(f"REF: {reference!r} needs --tracking-uri (or --output DIR with mlflow.db in it)")
    found = registered_checkpoint(uri, reference)
    if found is None:
        raise ConfigError(
            f"REF: {reference!r} is not a registered model's alias or version in {strip_credentials(uri)}"
        )
    sha256, directory = found
    return sha256, output or directory.parent.parent, uri


def find(reference: str, store: LineageStore) -> Node:
    """The one checkpoint of `store` of this sha256 (or its start), stage or directory name. Raises ConfigError."""
    nodes = store.graph.nodes
    if re.fullmatch(r"[0-9a-f]{6,64}", reference):
        matches = [node for sha, node in nodes.items() if sha.startswith(reference)]
    else:
        matches = [node for node in nodes.values() if reference in (node.manifest.stage, node.directory.name)]
    if not matches:
        stages = ", ".join(sorted({node.manifest.stage for node in nodes.values()})) or "none"
        raise ConfigError(f"REF: {reference!r} matches nothing in {store.output}; its stages: {stages}")
    if len(matches) > 1:
        choices = ", ".join(sorted(node.directory.name for node in matches)[:8])
        raise ConfigError(f"REF: {reference!r} is not allowed: it names {len(matches)} checkpoints: {choices}")
    return matches[0]


def require_language_model(node: Node) -> None:
    """Raises ConfigError where a checkpoint is no model that replies, by its type; where that is not known here, by
    its files."""
    type, files = node.manifest.type, {entry.path for entry in node.manifest.files}
    if not (node.is_a(Model) or (type not in TYPES and {"config.json", "model.safetensors"} <= files)):
        raise ConfigError(f"REF: {node.name} is not allowed: it is a {type}; must be a {Model.__name__}")
