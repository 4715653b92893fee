"""What lies beside the files of a checkpoint: the statement, uncommitted code, the model card, and the signature.

    manifest.json, model.safetensors, …   the checkpoint, as its manifest lists it
    README.md                             the model card (models and reward models alone)
    attestation/statement.json            how this copy was made: in-toto with SLSA provenance
    attestation/code.diff                 what was not committed, where anything was not
    attestation/card.md                   in an evaluation: the card of the policy with its results
    attestation.sig                       signs attestation/, which lists every other file by sha256

It is written before the checkpoint is published, so there is none without it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import HELDOUT, TRAIN, pairs_of
from xray_runtime.files import write_atomic
from xray_runtime.graph.artifacts import Dataset, Evaluation, Model, Preferences, RewardModel, is_a
from xray_runtime.lineage import provenance
from xray_runtime.lineage.card import model_card
from xray_runtime.lineage.signing import sign
from xray_runtime.lineage.statement import OutsideSource, RunFacts, Statement
from xray_runtime.stages.kinds import find_kind
from xray_runtime.store.checkpoints import read_bounded, read_manifest
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import ATTESTATION, CARD, MANIFEST, SIGNATURE, STATEMENT, Manifest
from xray_runtime.store.ref import CheckpointRef

DIFF, EVALUATED_CARD = "code.diff", "card.md"


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
        directory: where its files and its manifest are.
        parents: role → checkpoint.
        started: when the stage started.
        private_key: see `signing.signing_key`.
    """
    record = directory / ATTESTATION
    record.mkdir()
    code, diff = provenance.code()
    if diff:
        (record / DIFF).write_bytes(diff)
    statement = _statement(directory, manifest, sha256, parents, run, started, code)
    if is_a(manifest.type, Model, RewardModel):
        (directory / CARD).write_text(model_card(manifest, sha256, statement, None), encoding="utf-8")
        card = {"name": CARD, "digest": {"sha256": file_sha256(directory / CARD)}}
        statement = Statement.model_validate(
            statement.model_dump() | {"subject": [*(s.model_dump() for s in statement.subject), card]}
        )
    kind = find_kind(manifest.kind)
    if is_a(manifest.type, Evaluation) and kind is not None and kind.sides and kind.results:
        card_text = _evaluated_card(directory / kind.results, parents[kind.sides[0]].path)
        if card_text is not None:
            (record / EVALUATED_CARD).write_text(card_text, encoding="utf-8")
    (record / STATEMENT).write_bytes(statement.to_bytes())
    sign(record, directory / SIGNATURE, private_key)


def publish_card(evaluation: Path, policy: Path) -> None:
    """Put the card with the results of `evaluation` beside the weights of the policy it judged."""
    card = evaluation / ATTESTATION / EVALUATED_CARD
    if not card.is_file():
        return
    content = read_bounded(card)
    write_atomic(policy / CARD, content)


def read_statement(directory: Path) -> Statement:
    """The statement beside a checkpoint. Raises ValueError: it is malformed; OSError: there is none."""
    if (directory / ATTESTATION).is_symlink():
        raise ValueError(f"{directory / ATTESTATION} is a link")
    return Statement.read(directory / ATTESTATION / STATEMENT)


def _statement(
    directory: Path,
    manifest: Manifest,
    sha256: str,
    parents: Mapping[str, CheckpointRef],
    run: RunFacts,
    started: datetime,
    code: Mapping[str, str | None],
) -> Statement:
    subjects = [(MANIFEST, sha256), *((f.path, f.sha256) for f in manifest.files)]
    dependencies = [
        {
            "name": role,
            "uri": f"xray:{parent.stage}",
            "digest": {"sha256": parent.sha256},
            "annotations": _data_files(parent.path) if is_a(parent.type, Dataset, Preferences) else {},
        }
        for role, parent in sorted(parents.items())
    ]
    return Statement.model_validate(
        {
            "subject": [{"name": name, "digest": {"sha256": value}} for name, value in subjects],
            "predicate": {
                "build": {
                    "external": {
                        "stage": manifest.stage,
                        "kind": manifest.kind,
                        "type": manifest.type,
                        "seed": manifest.seed,
                        "config": manifest.config,
                        "functions": manifest.functions,
                    },
                    "internal": {
                        "checkpoint": sha256,
                        "key": manifest.key,
                        "step": manifest.step,
                        "config_digest": manifest.config_digest,
                        "code_digest": manifest.code_digest,
                        "code": code,
                        "environment": provenance.environment(),
                        "origins": _origins(manifest, sha256, parents, run.outside),
                        "sources": _sources(parents, run.outside),
                    },
                    "dependencies": dependencies + [provenance.outside_source(found) for found in run.outside],
                },
                "details": {
                    "builder": {"id": "urn:xray", "version": {"xray": code["package_sha256"]}},
                    "metadata": {
                        "invocation_id": run.task_run_id or run.flow_run_id,
                        "started": started.isoformat(timespec="seconds"),
                        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                    },
                    "run": run.model_dump(exclude={"outside"}),
                },
            },
        }
    )


def _origins(
    manifest: Manifest, sha256: str, parents: Mapping[str, CheckpointRef], outside: list[OutsideSource]
) -> dict[str, list[str]]:
    """Names of base models and datasets, its own and its parents'; a fresh model is named by its digest."""
    models = {found.name for found in outside if found.is_model}
    datasets = {found.name for found in outside if not found.is_model}
    if is_a(manifest.type, Model) and not models and not any(is_a(parent.type, Model) for parent in parents.values()):
        models = {f"fresh-{sha256[:12]}"}
    for parent in parents.values():
        try:
            origins = read_statement(parent.path).predicate.build.internal.origins
        except (OSError, ValueError):
            continue
        # A policy is judged by a reward model, and has no weight of it.
        models |= set() if is_a(parent.type, RewardModel) else set(origins.get("base_models", []))
        datasets |= set(origins.get("datasets", []))
    return {"base_models": sorted(models), "datasets": sorted(datasets)}


def _sources(parents: Mapping[str, CheckpointRef], outside: list[OutsideSource]) -> list[dict[str, Any]]:
    """All that it and its parents go back to, each once."""
    found = list(outside)
    for parent in parents.values():
        with contextlib.suppress(OSError, ValueError):
            found += read_statement(parent.path).predicate.build.internal.sources
    once = {source.model_dump_json(): source.model_dump() for source in found}
    return [once[text] for text in sorted(once)]


def _data_files(dataset: Path) -> dict[str, Any]:
    """Rows and sha256 of a dataset's files."""
    manifest, _ = read_manifest(dataset)
    files: dict[str, Any] = {}
    for entry in manifest.files:
        if entry.path in (TRAIN, HELDOUT):
            files[entry.path] = {"sha256": entry.sha256, "rows": len(pairs_of(dataset / entry.path))}
    return {"files": files}


def _evaluated_card(results: Path, policy: Path) -> str | None:
    try:
        statement = read_statement(policy)
    except (OSError, ValueError):
        return None
    manifest, sha256 = read_manifest(policy)
    return model_card(manifest, sha256, statement, json.loads(results.read_text()))
