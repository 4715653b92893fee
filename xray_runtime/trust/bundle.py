"""Bundles: a checkpoint with all it came from, its records and the public key in one archive.

A bundle is a tar with the layout of an output directory. The same audit checks it on any machine, without MLflow, and
it can be imported into another output directory and its MLflow. It also holds

    index.html                one page: lineage, curves, judgements, conversations, licences
    provenance.intoto.jsonl   every checkpoint's signed statement, as in-toto's tools read them
    records/                  metrics, tables and figures of the stages
    bom.cdx.json, bom.spdx.json, croissant/, openlineage.jsonl, ai-act.md
                              what it was made of, in public forms: `bills`
    source/                   the log that they come from, as public tools read it: `published_log`
    log.jsonl                 lists the checkpoints and these files, signed with the exporter's key
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tarfile
import tempfile
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import END, LOG, digests
from xray_runtime.kernel.evidence.statement import signer_of
from xray_runtime.kernel.evidence.view import LOCKS, Left
from xray_runtime.kernel.files import link_or_copy
from xray_runtime.kernel.history.audit_check import Finding
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore, check_tracking_uri, open_lineage_store
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, building_folder, read_bounded
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import ATTESTATION, MANIFEST, STATEMENT
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.shared import is_safe
from xray_runtime.kernel.tracking.recorder import RECORDS, records_directory
from xray_runtime.trust.audit.checkpoints import Audit, audit
from xray_runtime.trust.bills import BILLS, CROISSANT, write_bills
from xray_runtime.trust.bills.history import History
from xray_runtime.trust.keys import RETIRED, TRUSTED, adopt, known_keys, retirement_files, root_keys, trusted_keys
from xray_runtime.trust.log import append, log_checkpoints
from xray_runtime.trust.page import write_html
from xray_runtime.trust.published_log import SOURCE, publish_log
from xray_runtime.trust.retention import with_history
from xray_runtime.trust.signing import KEY_VARIABLE, PUBLIC, has_signing_key, require_agent, signing_key

PAGE, PROVENANCE = "index.html", "provenance.intoto.jsonl"
UNKNOWN = (
    "cannot be known: when anything was signed. Times are the signer's; nobody else stamped them",
    "cannot be known: that the code did what it says, or what ran outside of X-ray: services, judges, people",
    "cannot be known: whether the model was evaluated, promoted or withdrawn after this was exported",
)
"""Facts that no bundle can prove."""
RECORD_OF_KEY = re.compile(r"[0-9a-f]{16}\.(pub|json)")
"""Names in keys/retired."""
MAX_MEMBERS, MAX_DEPTH, MAX_NAME_BYTES, MAX_HEADER_BYTES = 200_000, 32, 1024, 2**20
"""Far more than any bundle of ours has."""
UNKNOWN_KEY = "cannot be known: whose key it is. It came with the bundle: compare it, or name yours (--public-key)"


def export(store: LineageStore, node: Node, path: Path) -> int:
    """Write `node`, its ancestors and their evaluations to `path`; returns how many checkpoints.

    Raises ConfigError where an ancestor is not in the store, or there is no key to sign the bundle with.
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


def _add(store: LineageStore, node: Node, chosen: list[str], target: Path) -> None:
    """Write what a bundle has besides checkpoints and keys, signed."""
    for sha in chosen:
        manifest = store.graph.nodes[sha].manifest
        records = records_directory(store.output, manifest.stage, manifest.key)
        if records.is_dir():
            shutil.copytree(records, records_directory(target, manifest.stage, manifest.key))
    key = require_agent(signing_key(store.output))
    write_html(target / PAGE, LineageStore(target, store.graph, None), node, chosen)
    statements = [store.graph.nodes[sha].directory / ATTESTATION / STATEMENT for sha in chosen]
    (target / PROVENANCE).write_bytes(b"".join(read_bounded(path) for path in statements if path.is_file()))
    # An audit of the bundle names a statement that cannot be read.
    with contextlib.suppress(OSError, ValueError):
        write_bills(History(store.output, store.graph, node, chosen), target)
    publish_log(store.output, set(chosen), target / SOURCE)
    files = digests(target, list(target.iterdir()))
    exported = {store.graph.nodes[sha].directory.name: sha for sha in chosen}
    log_checkpoints(target, exported, here=False, private=key)
    append(target, Left(note="export"), files, private=key)
    shutil.rmtree(target / LOCKS)


@contextlib.contextmanager
def open_bundle(path: Path, same_disk: Path | None = None, manifests_only: bool = False) -> Iterator[LineageStore]:
    """The content of a bundle as a temporary output directory.

    Args:
        same_disk: a directory on the disk to use.
        manifests_only: unpack only manifests.

    Raises:
        ConfigError: it is not a bundle, or does not fit on the disk, or holds links, devices, sparse files, unsafe or
            duplicate names, or more and longer names than X-ray writes.
    """
    with tempfile.TemporaryDirectory(prefix="xray-bundle-", dir=same_disk) as temporary:
        output = Path(temporary)
        _unpack(path, output, manifests_only)
        store = open_lineage_store(output, None)
        # This machine's MLflow knows nothing about the bundle.
        yield LineageStore(store.output, store.graph, None)


def _unpack(path: Path, output: Path, manifests_only: bool) -> None:
    """Raises ConfigError as `open_bundle`."""
    try:
        free, size = shutil.disk_usage(output).free, path.stat().st_size
        if not path.is_file():
            raise ConfigError(f"bundle: {str(path)!r} is not allowed: must be a file")
        if size > free:
            raise ConfigError(f"bundle: {str(path)!r} is not allowed: only {free:,} bytes are free for it")
        with _BoundedFile(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in _members(path, archive):
                target = output / member.name
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                elif not manifests_only or target.name == MANIFEST:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    # Mode, owner and time are not taken over.
                    source = archive.extractfile(member)
                    assert source is not None
                    with target.open("xb") as into:
                        shutil.copyfileobj(source, into)
    except ConfigError:
        raise
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError(f"bundle: {str(path)!r} cannot be read ({type(error).__name__}: {text})") from None
    if not (output / CHECKPOINTS).is_dir():
        raise ConfigError(f"bundle: {str(path)!r} is not allowed: there is no {CHECKPOINTS}/ in it")


class _BoundedFile(io.FileIO):
    """A file that refuses large reads: a header that claims to be large would be read whole."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"it has a header of more than {MAX_HEADER_BYTES:,} bytes")
        return super().read(size) or b""


def _members(path: Path, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of a bundle. Raises ConfigError at the first that X-ray would not write."""
    seen: set[str] = set()
    for member in archive:
        name = member.name
        # Names that some file system cannot tell apart are equal.
        plain = unicodedata.normalize("NFC", name).casefold()
        problem = None
        # A sparse file may claim any size.
        if not (member.isfile() or member.isdir()) or member.issparse() or member.size < 0:
            problem = "which is neither a plain file nor a directory"
        elif not is_safe(name) or not name.isprintable():
            problem = "a name that points outside it, or that X-ray does not write"
        elif name.count("/") >= MAX_DEPTH or len(os.fsencode(name)) > MAX_NAME_BYTES:
            problem = f"a name of more than {MAX_DEPTH} parts or {MAX_NAME_BYTES} bytes"
        elif plain in seen:
            problem = "a name that appears twice"
        elif len(seen) >= MAX_MEMBERS:
            problem = f"its member {MAX_MEMBERS + 1:,}: more are not allowed"
        if problem is not None:
            shown = ascii(name) if len(name) <= 80 else f"{name[:80]!a}…"
            raise ConfigError(f"bundle: {str(path)!r} is not allowed: it holds {shown}, {problem}")
        seen.add(plain)
        yield member


def audit_bundle(path: Path, public: Path | None = None, *, hashing: bool = True) -> Audit:
    """Audit everything in a bundle."""
    with open_bundle(path) as store:
        return _audit(store, [public] if public else None, hashing)


def _audit(store: LineageStore, public: Sequence[Path] | None, hashing: bool = True) -> Audit:
    result = audit(store, public=public, hashing=hashing)
    # Nothing may lie beside what was exported.
    added = {replace(found, code="file-added") if found.code == "file-unknown" else found for found in result.findings}
    result.findings = sorted(added | set(_strays(store)))
    result.notes += list(UNKNOWN) + ([] if public else [UNKNOWN_KEY])
    return result


def _strays(store: LineageStore) -> Iterator[Finding]:
    """Entries of a bundle that `export` does not write; the audit has looked into checkpoints and records."""
    nodes = {node.directory.name for node in store.graph.nodes.values()}
    allowed = {
        "": {CHECKPOINTS, RECORDS, "keys", LOG, END, PAGE, PROVENANCE, SOURCE, CROISSANT, *BILLS},
        CROISSANT: {f"{name}.json" for name in nodes},
        CHECKPOINTS: nodes | {path.name for path in store.graph.unreadable},
        RECORDS: nodes,
        "keys": {PUBLIC, TRUSTED, RETIRED},
        f"keys/{TRUSTED}": {path.name for path in root_keys(store.output)},
        f"keys/{RETIRED}": {path.name for path in retirement_files(store.output) if RECORD_OF_KEY.fullmatch(path.name)},
    }
    for folder, names in allowed.items():
        there = store.output / folder
        for path in sorted(there.iterdir()) if there.is_dir() else []:
            if path.name not in names:
                yield Finding(path.relative_to(store.output).as_posix(), "file-added", "no export writes it")


def import_bundle(path: Path, output: Path, *, tracking_uri: str, experiment: str, public: Path | None) -> Audit:
    """Import a bundle into `output` and its MLflow if its audit is sound.

    Args:
        public: a key that its records may be signed with, besides those that `output` trusts, which then trusts it too.

    Raises ConfigError where it is signed with another key: the keys that it brings along prove nothing.
    """
    check_tracking_uri(tracking_uri)
    output.mkdir(parents=True, exist_ok=True)
    with open_bundle(path, same_disk=output) as store:
        trusted = [*([public] if public else []), *known_keys(output)]
        require_known_signers(store, list(store.graph.nodes), trusted, str(path), "name it with --public-key")
        result = _audit(store, trusted)
        if result.is_sound:
            order = store.graph.ancestors(list(store.graph.nodes))
            import_checkpoints(store, order, output, tracking_uri=tracking_uri, experiment=experiment, public=public)
    return result


def require_known_signers(
    source: LineageStore, order: Sequence[str], roots: Sequence[Path], ref: str, how: str
) -> None:
    """Raises ConfigError where one of the checkpoints names a signer that is not trusted.

    Args:
        roots: the public keys that are trusted.
        how: what to do with a copy of the signer's key.
    """
    trusted = {key.sha256 for key in trusted_keys(source.output, roots)}
    for node in (source.graph.nodes[sha] for sha in order if sha in source.graph.nodes):
        try:
            signer = signer_of(node.directory)
        except (OSError, ValueError):
            # The audit says so.
            continue
        if signer not in trusted:
            raise ConfigError(
                f"{ref!r} is not allowed: it is signed with key {signer[:16]}, which is not trusted here: ask its "
                f"owner for a copy of the key, and {how}"
            )


def import_checkpoints(
    source: LineageStore,
    order: Sequence[str],
    output: Path,
    *,
    tracking_uri: str | None,
    experiment: str,
    public: Path | None = None,
) -> None:
    """Copy checkpoints that were audited in another output directory into `output` and its MLflow.

    On one disk, files are linked and not copied.

    Args:
        order: their digests, parents first.
        tracking_uri: None: there is no MLflow to record them in.
        public: the key to trust from now on.

    Raises:
        ConfigError: `output` holds another checkpoint under the key of one of them.
    """
    checkpoints = output / CHECKPOINTS
    checkpoints.mkdir(parents=True, exist_ok=True)
    signing_key(output)
    adopt(output, [public] if public else [], source.output)
    for sha in order:
        directory = source.graph.nodes[sha].directory
        there = checkpoints / directory.name
        if there.exists() and file_sha256(there / MANIFEST) != sha:
            raise ConfigError(
                f"{there}: holds a different checkpoint with the same key as {directory}: move one of them away"
            )
        if not there.exists():
            # After a crash, the next build of this key removes it there.
            temporary = building_folder(there) / f"{os.getpid()}-{sha[:8]}"
            # Published files never change, so two directories can share them.
            shutil.copytree(directory, temporary, symlinks=True, copy_function=link_or_copy)
            os.rename(temporary, there)
            with contextlib.suppress(OSError):
                temporary.parent.rmdir()
    imported = {source.graph.nodes[sha].directory.name: sha for sha in order}
    log_checkpoints(output, imported, here=False)
    if tracking_uri is not None:
        _record(open_lineage_store(output, tracking_uri), order, tracking_uri, experiment)


def _record(store: LineageStore, order: Sequence[str], tracking_uri: str, experiment: str) -> None:
    """Log the checkpoints that MLflow does not know, parents first, with their original inputs and params."""
    from xray_runtime.kernel.tracking.mlflow_tracker import Tracker
    from xray_runtime.kernel.tracking.registry_view import RegistryView

    tracker = Tracker(tracking_uri, experiment, store.artifacts)
    mlflow = RegistryView(tracking_uri)
    parent = tracker.start_lifecycle(None, "import", {}, "", {"xray.imported": "true"})
    refs: dict[str, CheckpointRef] = {}
    for sha in order:
        node = store.graph.nodes[sha]
        manifest = node.manifest
        ref = node.reference(mlflow.model_of(sha))
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
