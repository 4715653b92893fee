"""Bundles: a checkpoint with all it came from, its records and the public key in one archive.

A bundle is a tar of an output directory's layout. It is checked on any machine, without MLflow, by the same audit; and
it can be brought into another output directory and its MLflow, where the lineage stands as before. Beside it are

    index.html                all of it on one page: lineage, curves, judgements, conversations, licences
    provenance.intoto.jsonl   every checkpoint's statement in an envelope of its own, as in-toto's tools read them
    records/                  metrics, tables and figures of the stages
    attestations/bundle.json  lists these files, signed by who exported
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from xray_runtime.config.validation import ConfigError
from xray_runtime.lineage.attestation import STATEMENT
from xray_runtime.lineage.audit.checkpoints import Audit, audit
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.keys import RETIRED, TRUSTED, adopt, retirement_files, root_keys
from xray_runtime.lineage.page import write_html
from xray_runtime.lineage.reference import LineageStore, check_tracking_uri, open_lineage_store
from xray_runtime.lineage.retention import with_history
from xray_runtime.lineage.run_statement import FOLDER, sign_run
from xray_runtime.lineage.signing import KEY_VARIABLE, envelope, has_signing_key, public_key, signing_key
from xray_runtime.store.checkpoints import CHECKPOINTS, building_folder, read_bounded
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import ATTESTATION, MANIFEST
from xray_runtime.store.ref import CheckpointRef
from xray_runtime.tracking.recorder import records_directory

PAGE, PROVENANCE, BUNDLE = "index.html", "provenance.intoto.jsonl", "bundle"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
UNKNOWN = (
    "cannot be known: when anything was signed. Times are the signer's; nobody else stamped them",
    "cannot be known: that the code did what it says, or what ran outside of X-ray: services, judges, people",
    "cannot be known: whether the model was evaluated, promoted or withdrawn after this was exported",
)
"""What no bundle can prove."""
UNKNOWN_KEY = "cannot be known: whose key it is. The bundle brought it along: compare it, or name yours (--public-key)"


def export(store: LineageStore, node: Node, path: Path) -> int:
    """Write `node`, its ancestors and their evaluations to `path`; returns how many checkpoints.

    Raises:
        ConfigError: an ancestor is not in the store, or there is no key to sign the bundle with.
    """
    if not has_signing_key(store.output):
        raise ConfigError(
            f"BUNDLE: a bundle's additions must be signed, but {store.output} has no private key: set {KEY_VARIABLE}"
        )
    chosen = with_history(store.graph, [node.sha256])
    missing = [sha[:12] for sha in chosen if sha not in store.graph.nodes]
    if missing:
        raise ConfigError(f"REF: its ancestors {', '.join(missing)} are not in {store.output}: the chain is broken")
    temporary = path.with_name(f"{path.name}.writing")
    with tempfile.TemporaryDirectory(prefix="xray-export-") as folder, tarfile.open(temporary, "w") as archive:
        added = Path(folder)
        _add(store, node, chosen, added)
        for entry in sorted(added.iterdir()):
            archive.add(entry, entry.name)
        for number, key in enumerate(root_keys(store.output)):
            name = "signing.pub" if number == 0 else f"{TRUSTED}/{key.name}"
            archive.add(key, f"keys/{name}", recursive=False)
        for file in retirement_files(store.output):
            archive.add(file, f"keys/{RETIRED}/{file.name}", recursive=False)
        for sha in chosen:
            directory = store.graph.nodes[sha].directory
            archive.add(directory, f"{CHECKPOINTS}/{directory.name}")
    os.replace(temporary, path)
    return len(chosen)


def _add(store: LineageStore, node: Node, chosen: list[str], place: Path) -> None:
    """What a bundle has beside checkpoints and keys, signed."""
    for sha in chosen:
        manifest = store.graph.nodes[sha].manifest
        records = records_directory(store.output, manifest.stage, manifest.key)
        if records.is_dir():
            shutil.copytree(records, records_directory(place, manifest.stage, manifest.key))
    key = signing_key(store.output)
    write_html(place / PAGE, LineageStore(place, store.graph, None), node, chosen)
    statements = [store.graph.nodes[sha].directory / ATTESTATION / STATEMENT for sha in chosen]
    lines = [envelope(read_bounded(path), PAYLOAD_TYPE, key) for path in statements if path.is_file()]
    (place / PROVENANCE).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    sign_run(place, BUNDLE, [path for path in sorted(place.rglob("*")) if path.is_file()], {}, key)


@contextlib.contextmanager
def opened(path: Path, same_disk: Path | None = None, manifests_only: bool = False) -> Iterator[LineageStore]:
    """The content of a bundle as an output directory, in a temporary place.

    Args:
        same_disk: a directory on the disk to put it on.
        manifests_only: leave out all files but manifests: for finding out what is in it.

    Raises:
        ConfigError: it is no bundle, or holds links, devices, files with holes or names that lead out of it, or does
            not fit on the disk.
    """
    with tempfile.TemporaryDirectory(prefix="xray-bundle-", dir=same_disk) as temporary:
        output = Path(temporary)
        _unpack(path, output, manifests_only)
        store = open_lineage_store(output, None)
        # Whatever MLflow this machine has knows nothing of the bundle.
        yield LineageStore(store.output, store.graph, None)


def _unpack(path: Path, output: Path, manifests_only: bool) -> None:
    """Raises ConfigError as `opened`."""
    try:
        with tarfile.open(path, "r:") as archive:
            free = shutil.disk_usage(output).free
            if path.stat().st_size > free:
                raise ConfigError(f"bundle: {str(path)!r} is not allowed: only {free:,} bytes of disk space are free")
            for member in archive:
                # A file with holes says to be larger than the archive it comes in, by any factor.
                if not (member.isfile() or member.isdir()) or member.issparse():
                    raise ConfigError(
                        f"bundle: {path} holds {member.name!r}, which is neither a plain file nor a directory"
                    )
                if not manifests_only or member.isdir() or member.name.endswith(f"/{MANIFEST}"):
                    archive.extract(member, output, filter="data")
    except (tarfile.TarError, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"bundle: {str(path)!r} cannot be read ({type(error).__name__}: {error})") from None
    if not (output / CHECKPOINTS).is_dir():
        raise ConfigError(f"bundle: {str(path)!r} is not allowed: there is no {CHECKPOINTS}/ in it")


def audit_bundle(path: Path, public: Path | None = None, *, hashing: bool = True) -> Audit:
    """The audit of everything in a bundle."""
    with opened(path) as store:
        return _audit(store, public, hashing)


def _audit(store: LineageStore, public: Path | None, hashing: bool = True) -> Audit:
    result = audit(store, public=public, hashing=hashing)
    if not (store.output / FOLDER / f"{BUNDLE}.json").is_file():
        missing = Finding(BUNDLE, "run-unsigned", f"it has no {FOLDER}/{BUNDLE}.json")
        result.findings = sorted({*result.findings, missing})
    result.notes += list(UNKNOWN) + ([] if public else [UNKNOWN_KEY])
    return result


def import_bundle(path: Path, output: Path, *, tracking_uri: str, experiment: str, public: Path | None) -> Audit:
    """Bring a bundle into `output` and its MLflow; nothing is brought in unless its audit is sound.

    Args:
        public: the key its records must be signed with; by default the bundle's own, which is then trusted.
    """
    check_tracking_uri(tracking_uri)
    output.mkdir(parents=True, exist_ok=True)
    with opened(path, same_disk=output) as store:
        result = _audit(store, public)
        if result.is_sound:
            order = store.graph.ancestors(list(store.graph.nodes))
            take_in(store, order, output, tracking_uri=tracking_uri, experiment=experiment, public=public, move=True)
    return result


def take_in(
    source: LineageStore,
    order: Sequence[str],
    output: Path,
    *,
    tracking_uri: str | None,
    experiment: str,
    public: Path | None = None,
    move: bool = False,
) -> None:
    """Bring checkpoints of another output directory, which were audited there, into `output` and its MLflow.

    Args:
        order: their digests, parents first.
        tracking_uri: None: there is no MLflow to record them in.
        public: the key to trust from now on; by default all that `source` trusts.
        move: whether they may go from `source`; else they are in both, the files of one disk linked.

    Raises:
        ConfigError: `output` holds another checkpoint under the key of one of them.
    """
    checkpoints = output / CHECKPOINTS
    checkpoints.mkdir(parents=True, exist_ok=True)
    own = public_key(output).read_bytes() if public_key(output).exists() else b""
    keys = [key for key in ([public] if public else root_keys(source.output)) if key.read_bytes() != own]
    adopt(output, keys, retirement_files(source.output))
    for sha in order:
        directory = source.graph.nodes[sha].directory
        there = checkpoints / directory.name
        if there.exists() and file_sha256(there / MANIFEST) != sha:
            raise ConfigError(
                f"{there}: holds a different checkpoint with the same key as {directory}: move one of them away"
            )
        if not there.exists() and move:
            os.rename(directory, there)
        elif not there.exists():
            # Where the next build of this key sweeps, should this be cut short.
            temporary = building_folder(there) / f"{os.getpid()}-{sha[:8]}"
            shutil.copytree(directory, temporary, symlinks=True, copy_function=_link_or_copy)
            os.rename(temporary, there)
            with contextlib.suppress(OSError):
                temporary.parent.rmdir()
    if tracking_uri is not None:
        _record(open_lineage_store(output, tracking_uri), order, tracking_uri, experiment)


def _link_or_copy(source: str, target: str) -> None:
    # What is published never changes: a file may lie in two directories.
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _record(store: LineageStore, order: Sequence[str], tracking_uri: str, experiment: str) -> None:
    """Log what MLflow does not know yet, parents first, with the same inputs and params as where it was made."""
    from xray_runtime.lineage.audit.registry import RegistryView
    from xray_runtime.tracking.mlflow_tracker import Tracker

    tracker = Tracker(tracking_uri, experiment, store.artifacts)
    snapshot = RegistryView(tracking_uri)
    parent = tracker.start_lifecycle(None, "import", {}, "", {"xray.imported": "true"})
    refs: dict[str, CheckpointRef] = {}
    for sha in order:
        node = store.graph.nodes[sha]
        manifest = node.manifest
        ref = node.reference(snapshot.model_of(sha))
        if ref.mlflow_model_id is None:
            run = tracker.stage_run(parent, manifest.stage, manifest.key, manifest.config)
            ref = run.log_checkpoint(ref, manifest, [refs[p] for p in manifest.parents.values()])
            if node.sides:
                numbers = {k: v for k, v in node.results.items() if isinstance(v, int | float)}
                values = {f"{manifest.kind}/{k}": float(v) for k, v in numbers.items()}
                run.metrics([(0, int(time.time() * 1000), values)])
            run.finish("FINISHED")
        refs[sha] = ref
    tracker.finish(parent, "FINISHED")
