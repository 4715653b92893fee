"""REF on the command line → a checkpoint and its store."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.credentials import has_login, strip_credentials, tracking_address
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.view import Decision
from xray_runtime.kernel.graph.artifacts import TYPES, Model
from xray_runtime.kernel.history.graph import CheckpointGraph, Node, checkpoint_paths, read_graph
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, read_manifest
from xray_runtime.kernel.store.manifest import MANIFEST, WEIGHTS_INDEX
from xray_runtime.kernel.tracking.mlflow_tracker import ARTIFACTS
from xray_runtime.kernel.tracking.registry import own_store, registered_checkpoint


@dataclass(frozen=True)
class LineageStore:
    """An output directory with its graph and its tracking store."""

    output: Path
    graph: CheckpointGraph
    tracking_uri: str | None
    """None where no store of MLflow is known."""

    @property
    def artifacts(self) -> Path | None:
        """Directory of the artifacts of new experiments; None leaves that to a server."""
        is_default = self.tracking_uri == own_store(self.output)
        return self.output.absolute() / ARTIFACTS if is_default else None


def open_lineage_store(output: Path, tracking_uri: str | None) -> LineageStore:
    """The output directory of lifecycles.

    Args:
        tracking_uri: MLflow's address; by default the store inside `output`, else MLFLOW_TRACKING_URI, if it is set.

    Raises:
        ConfigError: `output` holds no checkpoints, or `tracking_uri` contains a login.
    """
    check_tracking_uri(tracking_uri)
    if not (output / CHECKPOINTS).is_dir():
        raise ConfigError(f"--output: {str(output)!r} is not allowed: must be a directory with {CHECKPOINTS}/ in it")
    uri = tracking_uri or _own_tracking(output) or tracking_address()
    return LineageStore(output, read_graph(output / CHECKPOINTS), uri)


def _own_tracking(output: Path) -> str | None:
    return own_store(output) if (output / "mlflow.db").is_file() else None


def check_tracking_uri(uri: str | None) -> None:
    """Raises ConfigError where an address that was given as an option or parameter contains a login."""
    if uri is not None and has_login(uri):
        raise ConfigError(
            f"--tracking-uri: a login in {strip_credentials(uri)!r} is not allowed: others can read a command "
            "line, and the parameters of a run: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )


def resolve(reference: str, output: Path | None, tracking_uri: str | None) -> tuple[LineageStore, Node]:
    """(store, checkpoint) that `reference` names. Raises ConfigError where it names none or several."""
    check_tracking_uri(tracking_uri)
    if _is_directory(reference, output):
        return _by_directory(Path(reference).absolute(), tracking_uri)
    if _is_registered(reference):
        reference, output, tracking_uri = _registered(reference, output, tracking_uri)
    if output is None:
        raise ConfigError(
            f"REF: {reference!r} is not allowed: must be a checkpoint directory, a sha256 (or its start, 6 digits at "
            "least) or a stage name with --output DIR, or a registered model NAME@ALIAS or NAME/VERSION"
        )
    store = open_lineage_store(output, tracking_uri)
    return store, find(reference, store)


def resolve_history(reference: str, output: Path | None, tracking_uri: str | None) -> tuple[LineageStore, Node]:
    """As `resolve`, for a caller that needs the checkpoint and its ancestors alone.

    Their manifests alone are read where the log names the directory of every checkpoint in the store.
    """
    check_tracking_uri(tracking_uri)
    name, found_in, uri = reference, output, tracking_uri
    if _is_directory(reference, output):
        directory = Path(reference).absolute()
        name, found_in = directory.name, directory.parent.parent if directory.parent.name == CHECKPOINTS else None
    elif _is_registered(reference):
        name, found_in, uri = _registered(reference, output, tracking_uri)
    nodes = None if found_in is None else _read_history(found_in, name)
    if found_in is None or nodes is None:
        return resolve(reference, output, tracking_uri)
    store = LineageStore(found_in, CheckpointGraph(nodes), uri or _own_tracking(found_in) or tracking_address())
    return store, next(iter(nodes.values()))


def _read_history(output: Path, reference: str) -> dict[str, Node] | None:
    """A checkpoint and its ancestors, by digest; None where the log and the store differ or `reference` is not unique.

    A manifest counts only if its digest is the expected one, since the log's signatures are not checked here.
    """
    logged = {name: entry.checkpoint for name, entry in view(output).published.items()}
    directories = {sha256: name for name, sha256 in logged.items()}
    if logged.keys() != {path.name for path in checkpoint_paths(output / CHECKPOINTS)}:
        return None
    if re.fullmatch(r"[0-9a-f]{6,64}", reference):
        pending = [sha256 for sha256 in logged.values() if sha256.startswith(reference)]
    else:
        pending = [sha256 for name, sha256 in logged.items() if reference in (name, name.rpartition("-")[0])]
    if len(pending) != 1 or len(directories) != len(logged):
        return None
    nodes = dict[str, Node]()
    while pending:
        wanted = pending.pop()
        try:
            directory = output / CHECKPOINTS / directories[wanted]
            manifest, sha256 = read_manifest(directory)
        except (KeyError, ValueError):
            return None
        if sha256 != wanted:
            return None
        nodes[wanted] = Node(wanted, directory, manifest)
        pending += [parent for parent in manifest.parents.values() if parent not in nodes and parent not in pending]
    return nodes


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
    else:
        store = LineageStore(directory.parent, read_graph(directory.parent), tracking_uri)
    listed = (*store.graph.nodes.values(), *store.graph.duplicates)
    node = next((n for n in listed if n.directory == directory), Node(sha256, directory, manifest))
    if directory.parent.name != CHECKPOINTS and sha256 not in store.graph.nodes:
        store.graph.add(node)
    return store, node


def _registered(reference: str, output: Path | None, tracking_uri: str | None) -> tuple[str, Path, str]:
    """(sha256, output directory, MLflow's address) of a registered model's alias or version."""
    uri = tracking_uri or (_own_tracking(output) if output is not None else None) or tracking_address()
    if uri is None:
        raise ConfigError(f"REF: {reference!r} needs --tracking-uri (or --output DIR with mlflow.db in it)")
    checkpoint = registered_checkpoint(uri, reference)
    if checkpoint is None:
        raise ConfigError(
            f"REF: {reference!r} is not a registered model's alias or version in {strip_credentials(uri)}"
        )
    sha256, directory = checkpoint
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
        raise ConfigError(
            f"REF: {reference!r} is not allowed: it names {len(matches)} checkpoints: {choices}: use one of these "
            "names; stages that run with other settings stay apart by a name=… of their own"
        )
    return matches[0]


CANDIDATE, CHAMPION = "candidate", "champion"
"""Aliases of a registered model: the newest version, and the one that was promoted."""
WEIGHTS = {"model.safetensors", WEIGHTS_INDEX}
"""Files of which a model in Hugging Face form has one."""


def require_language_model(node: Node) -> None:
    """Raises ConfigError where a checkpoint is not a model that replies: by its type, or by its files where the type is
    not known in this process."""
    type, files = node.manifest.type, {entry.path for entry in node.manifest.files}
    if not (node.is_a(Model) or (type not in TYPES and "config.json" in files and files & WEIGHTS)):
        raise ConfigError(f"REF: {node.name} is not allowed: it is a {type}; must be a {Model.__name__}")


def champion_of(store: LineageStore, name: str) -> Decision | None:
    """The decision that made the present champion of the registered model `name`."""
    return view(store.output).decided.get((name, CHAMPION))
