"""The record beside the files of a checkpoint: signed statement, uncommitted code, model card, and model signature.

    manifest.json, model.safetensors, …   the checkpoint, as its manifest lists it
    README.md                             the model card (models and reward models alone)
    attestation/statement.json            how this copy was made: in-toto with SLSA provenance, signed; it lists the
                                          sha256 of every other file but model.sig
    attestation/code.diff                 changes that were not committed, if there are any
    attestation/card.md                   in an evaluation: the card of the policy with its results
    model.sig                             OpenSSF model signature (models and reward models alone): `model_signature`

It is written before the checkpoint is published, so every checkpoint has one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import HOW_TO_TRUST, SignatureProblem, Verifier, sign
from xray_runtime.kernel.evidence.statement import (
    DIFF,
    MAX_DIFF_BYTES,
    External,
    OutsideSource,
    Predicate,
    RunFacts,
    Statement,
    read_statement,
    verified_statement,
)
from xray_runtime.kernel.evidence.view import Published
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.graph.artifacts import Dataset, Evaluation, Model, Preferences, RewardModel, is_a
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, MAX_RECORD_BYTES, Store, read_bounded, read_manifest
from xray_runtime.kernel.store.digest_memory import DIGESTS, DigestMemory
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import ATTESTATION, CARD, MANIFEST, STATEMENT, Manifest
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.shared import SharedStore
from xray_runtime.trust import provenance
from xray_runtime.trust.card import model_card
from xray_runtime.trust.keys import trusted_keys, trusted_view
from xray_runtime.trust.model_signature import sign_model, signed_files

EVALUATED_CARD = "card.md"
RECORD_FILES = {STATEMENT: MAX_RECORD_BYTES, DIFF: MAX_DIFF_BYTES, EVALUATED_CARD: MAX_RECORD_BYTES}
"""File of a record → bytes that it may have: checking the statement reads all of them."""


def attest(
    directory: Path,
    manifest: Manifest,
    sha256: str,
    *,
    parents: Mapping[str, CheckpointRef],
    run: RunFacts,
    started: datetime,
    private_key: Path,
) -> None:
    """Write and sign the record of a checkpoint that is about to be published.

    Args:
        directory: its files and its manifest.
        parents: role → checkpoint.
    """
    record = directory / ATTESTATION
    record.mkdir()
    code, diff = provenance.code()
    if diff:
        (record / DIFF).write_bytes(diff)
    statement = _statement(manifest, sha256, parents, run, started, code)
    is_model = is_a(manifest.type, Model, RewardModel)
    if is_model:
        (directory / CARD).write_text(model_card(manifest, sha256, statement, None), encoding="utf-8")
    kind = find_kind(manifest.kind)
    if is_a(manifest.type, Evaluation) and kind is not None and kind.sides and kind.results:
        policy, results = parents[kind.sides[0]].path, json.loads((directory / kind.results).read_text())
        with contextlib.suppress(OSError, ValueError):
            card = model_card(*read_manifest(policy), read_statement(policy), results)
            (record / EVALUATED_CARD).write_text(card, encoding="utf-8")
    beside = [*([directory / CARD] if is_model else []), *sorted(record.iterdir())]
    files = {path.relative_to(directory).as_posix(): file_sha256(path) for path in beside}
    statement = Statement.of(statement.predicate, statement.files | files)
    (record / STATEMENT).write_bytes(sign(statement, private_key.read_bytes()))
    if is_model:
        sign_model(directory, signed_files(directory, manifest, sha256), private_key)


def publish_card(evaluation: Path, policy: Path) -> None:
    """Put the card with the results of `evaluation` beside the weights of the policy it judged."""
    card = evaluation / ATTESTATION / EVALUATED_CARD
    if card.is_file():
        write_atomic(policy / CARD, read_bounded(card))


def foreign_in_record(record: Path) -> tuple[str, str] | None:
    """(name, reason) of the first entry of a record's directory that X-ray does not write there; None without one."""
    for path in sorted(record.iterdir()):
        if path.name not in RECORD_FILES or path.is_symlink() or not path.is_file():
            return path.name, "does not belong there"
        if path.stat().st_size > RECORD_FILES[path.name]:
            return path.name, "is too large"
    return None


def open_store(output: Path, shared: SharedStore | None = None) -> Store:
    """The checkpoints of an output directory; those that no trusted key signed are not used."""
    return Store(output / CHECKPOINTS, shared, partial(record_problem, output), DigestMemory(output / DIGESTS))


def record_problem(output: Path, directory: Path, manifest: Manifest, sha256: str) -> str | None:
    """Why an output directory does not trust a checkpoint in `directory`; None where it does.

    A key that it trusts must have signed the statement beside it, and its signed log must not name another digest, or
    another statement.
    """
    try:
        foreign = foreign_in_record(directory / ATTESTATION)
        if foreign is not None:
            return f"{ATTESTATION}/{ascii(foreign[0])[1:-1]} {foreign[1]}"
        statement = verified_statement(directory, Verifier(trusted_keys(output)))
    except SignatureProblem as problem:
        hint = f"; {HOW_TO_TRUST}" if problem.code == "foreign" else ""
        return f"its record is not signed by a trusted key ({problem}{hint})"
    except (OSError, ValueError) as error:
        return f"its record is not signed by a trusted key ({first_line(error)})"
    differing = statement.contradicts(manifest, sha256)
    if differing:
        return f"its signed statement differs from it in: {', '.join(differing)}"
    logged = trusted_view(output).published.get(f"{manifest.stage}-{manifest.key[:12]}")
    if logged is not None and logged.checkpoint != sha256:
        return f"the signed log says that {logged.checkpoint[:12]} was published, and it is {sha256[:12]}"
    if logged is not None and not has_logged_statement(logged, directory):
        return "the signed log names another statement of it"
    return None


def has_logged_statement(logged: Published, directory: Path) -> bool:
    """Whether the statement beside a checkpoint is the one that its entry in the log names, if that names one: the
    log of an exported bundle is written before its statements."""
    return logged.statement in (None, file_sha256(directory / ATTESTATION / STATEMENT))


def _statement(
    manifest: Manifest,
    sha256: str,
    parents: Mapping[str, CheckpointRef],
    run: RunFacts,
    started: datetime,
    code: Mapping[str, str | None],
) -> Statement:
    dependencies = [
        {
            "name": role,
            "uri": f"xray:{parent.stage}",
            "digest": {"sha256": parent.sha256},
            "annotations": _data_files(parent.path) if is_a(parent.type, Dataset, Preferences) else {},
        }
        for role, parent in sorted(parents.items())
    ]
    origins, sources = _ancestry(manifest, sha256, parents, run.outside)
    internal = {
        "checkpoint": sha256,
        "key": manifest.key,
        "step": manifest.step,
        "config_digest": manifest.config_digest,
        "code_digest": manifest.code_digest,
        "code": code,
        "environment": provenance.environment(),
        "origins": origins,
        "sources": sources,
    }
    details = {
        "builder": {"id": "urn:xray", "version": {"xray": code["package_sha256"]}},
        "metadata": {
            "invocation_id": run.task_run_id or run.flow_run_id,
            "started": started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "run": run.model_dump(exclude={"outside"}),
    }
    build = {
        "external": manifest.model_dump(include=set(External.model_fields)),
        "internal": internal,
        "dependencies": dependencies + [provenance.outside_source(source) for source in run.outside],
    }
    predicate = Predicate.model_validate({"build": build, "details": details})
    return Statement.of(predicate, {MANIFEST: sha256, **{entry.path: entry.sha256 for entry in manifest.files}})


def _ancestry(
    manifest: Manifest, sha256: str, parents: Mapping[str, CheckpointRef], outside: list[OutsideSource]
) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    """(names of base models and datasets, outside sources) of a checkpoint and its ancestors, each once.

    A fresh model is named by its digest.
    """
    names: dict[str, set[str]] = {"base_models": set(), "datasets": set()}
    for found in outside:
        names["base_models" if found.is_model else "datasets"].add(found.name)
    is_fresh = not names["base_models"] and not any(is_a(parent.type, Model) for parent in parents.values())
    if is_a(manifest.type, Model) and is_fresh:
        names["base_models"].add(f"fresh-{sha256[:12]}")
    sources = {source.model_dump_json(): source.model_dump() for source in outside}
    for parent in parents.values():
        with contextlib.suppress(OSError, ValueError):
            internal = read_statement(parent.path).predicate.build.internal
            for what, own in names.items():
                # A reward model judges a policy, which has none of its weights.
                if what == "datasets" or not is_a(parent.type, RewardModel):
                    own.update(internal.origins.get(what, []))
            sources |= {source.model_dump_json(): source.model_dump() for source in internal.sources}
    return {what: sorted(own) for what, own in names.items()}, [sources[text] for text in sorted(sources)]


def _data_files(dataset: Path) -> dict[str, Any]:
    """Rows and sha256 of a dataset's files."""
    from xray_runtime.data.pairs import HELDOUT, TRAIN, pairs_of

    files = {
        entry.path: {"sha256": entry.sha256, "rows": len(pairs_of(dataset / entry.path))}
        for entry in read_manifest(dataset)[0].files
        if entry.path in (TRAIN, HELDOUT)
    }
    return {"files": files}
