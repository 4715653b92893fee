"""The statement beside every checkpoint: an in-toto Statement v1 with SLSA provenance of how it was made.

The manifest says what a checkpoint is and follows from the inputs alone. The statement says how this copy was made: by
which run, code and machine. Two machines that computed the same checkpoint may write different statements.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from xray_runtime.kernel.config.sources import SourceTerms
from xray_runtime.kernel.evidence.envelope import (
    Digests,
    EvidenceModel,
    InTotoRecord,
    SignatureProblem,
    Verifier,
    read_envelope,
    read_record,
)
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.content_digest import Outside
from xray_runtime.kernel.store.manifest import ATTESTATION, CARD, MANIFEST, STATEMENT, Manifest, Sha256

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
DIFF = "code.diff"
"""Uncommitted changes, in `ATTESTATION`."""
MAX_DIFF_BYTES = 2**30


class Resource(EvidenceModel):
    """One thing a stage used: a parent checkpoint (named by its role), an outside source."""

    name: str
    uri: str | None = None
    digest: Digests | None = None
    annotations: dict[str, Any] = Field(default_factory=dict)


class External(EvidenceModel):
    """The user's input."""

    stage: str
    kind: str
    type: str
    seed: int
    config: dict[str, Any]
    functions: dict[str, dict[str, Sha256]]


class OutsideSource(EvidenceModel):
    """Something a stage read from outside the store; see `kernel.store.content_digest.Outside`."""

    field: str
    """Stage and field that name it: `prepare.source`."""
    name: str
    """As the user wrote it."""
    kind: str
    """file, directory, hub or package."""
    digest: str
    """sha256 of the bytes; of a hub name the commit; of a package `name==version`."""
    terms: SourceTerms = SourceTerms()

    @property
    def is_model(self) -> bool:
        """Whether it is a model, and not data."""
        return self.field.rpartition(".")[2] == "model"


class CodeFacts(EvidenceModel):
    git_commit: str | None
    diff_sha256: Sha256 | None
    """Digest of attestation/code.diff, the changes that were not committed."""
    package_sha256: Sha256
    """Digest of the files of flows, tasks and xray_runtime as installed."""


class Internal(EvidenceModel):
    """Facts that X-ray and the machine added."""

    checkpoint: Sha256
    key: Sha256
    step: int
    config_digest: Sha256
    code_digest: Sha256
    code: CodeFacts
    environment: dict[str, Any]
    origins: dict[str, list[str]]
    """`base_models` and `datasets` this goes back to, by their own names."""
    sources: list[OutsideSource] = Field(default_factory=list)
    """Everything that it and its ancestors read from outside the store."""


class Build(EvidenceModel):
    build_type: Literal["urn:xray:stage:v1"] = Field("urn:xray:stage:v1", alias="buildType")
    external: External = Field(alias="externalParameters")
    internal: Internal = Field(alias="internalParameters")
    dependencies: list[Resource] = Field(alias="resolvedDependencies")


class RunFacts(EvidenceModel):
    """Which run made it."""

    flow_run_id: str | None = None
    task_run_id: str | None = None
    trigger: dict[str, str] = Field(default_factory=dict)
    """`kind`: command, schedule or deployment; `by`: who."""
    attempts: int = 1
    mlflow_run_id: str | None = None
    mlflow_parent_run_id: str | None = None
    outside: list[OutsideSource] = Field(default_factory=list)
    """Sources outside the store that the stage read, by the names the user wrote; the statement lists them among the
    dependencies."""
    gates: dict[str, Any] | None = None
    """For an evaluation, the gates of the lifecycle that made the candidate (a `PromotionConfig`)."""
    device_seconds: float = 0.0
    """Time in which this attempt's models were open, times the devices that they held."""
    readings: dict[str, float] = Field(default_factory=dict)
    """Checkpoints that its generators read from their files, the stage itself for its own: mean difference in nats of
    their log-probabilities of a few tokens from those that the trainer published beside the files."""
    energy_joules: dict[str, float] = Field(default_factory=dict)
    """Used meanwhile by processors and GPUs of the machine that ran the stage, where it tells (`kernel.energy`)."""


class Metadata(EvidenceModel):
    invocation_id: str | None = Field(alias="invocationId")
    started: str = Field(alias="startedOn")
    finished: str = Field(alias="finishedOn")


class Details(EvidenceModel):
    builder: dict[str, Any]
    metadata: Metadata
    run: RunFacts = Field(alias="xray_run")


class Predicate(EvidenceModel):
    build: Build = Field(alias="buildDefinition")
    details: Details = Field(alias="runDetails")


class Statement(InTotoRecord[Predicate]):
    """See https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1."""

    predicate_type: Literal["https://slsa.dev/provenance/v1"] = Field(
        default="https://slsa.dev/provenance/v1", alias="predicateType"
    )

    def contradicts(self, manifest: Manifest, sha256: str) -> list[str]:
        """Names of the facts in which this statement and a checkpoint's manifest differ."""
        external, internal = self.predicate.build.external, self.predicate.build.internal
        names = ("key", "step", "config_digest", "code_digest")
        mine = dict(external) | {name: getattr(internal, name) for name in names} | {"parents": self.parents}
        theirs = {name: getattr(manifest, name) for name in mine}
        mine["checkpoint"], theirs["checkpoint"] = internal.checkpoint, sha256
        beside = (MANIFEST, CARD, *self.record_files)
        mine["files"] = {name: digest for name, digest in self.files.items() if name not in beside}
        theirs["files"] = {entry.path: entry.sha256 for entry in manifest.files}
        mine["diff"] = internal.code.diff_sha256
        theirs["diff"] = self.record_files.get(f"{ATTESTATION}/{DIFF}")
        return [name for name, value in mine.items() if value != theirs[name]]

    @property
    def record_files(self) -> dict[str, str]:
        """Path → sha256 of the other files of the record."""
        return {name: digest for name, digest in self.files.items() if name.startswith(f"{ATTESTATION}/")}

    @property
    def parents(self) -> dict[str, str]:
        """Role → checkpoint sha256."""
        return {
            d.name: d.digest.sha256
            for d in self.predicate.build.dependencies
            if d.digest and (d.uri or "").startswith("xray:")
        }


def read_statement(directory: Path) -> Statement:
    """The statement beside a checkpoint, unchecked. Raises ValueError: it is malformed; OSError: there is none."""
    return read_record(statement_envelope(directory), Statement)


def statement_envelope(directory: Path) -> Envelope:
    """The statement beside a checkpoint in its envelope. Raises as `read_statement`."""
    if (directory / ATTESTATION).is_symlink():
        raise ValueError(f"{directory / ATTESTATION} is a link")
    return read_envelope(read_bounded(directory / ATTESTATION / STATEMENT))


def signer_of(directory: Path) -> str:
    """The id of the key that a checkpoint's statement names, unchecked. Raises as `read_statement`."""
    return next(iter(statement_envelope(directory).signatures), "")


def verified_statement(directory: Path, verifier: Verifier) -> Statement:
    """The statement beside a checkpoint, which a trusted key signed with the other files of the record.

    Raises SignatureProblem, or as `read_statement`.
    """
    envelope = statement_envelope(directory)
    statement = read_record(envelope, Statement)
    verifier.check(envelope, statement.predicate.details.metadata.finished)
    record = directory / ATTESTATION
    there = {f"{ATTESTATION}/{path.name}": path for path in record.iterdir() if path.name != STATEMENT}
    for name in sorted(there.keys() | statement.record_files):
        signed = statement.record_files.get(name)
        if name not in there or hashlib.sha256(read_bounded(there[name], MAX_DIFF_BYTES)).hexdigest() != signed:
            raise SignatureProblem("invalid", f"{name} is not what was signed")
    return statement


def terms_of(outside: Outside, declared: SourceTerms | None) -> SourceTerms:
    """The declared terms, completed with the licence and name of a package."""
    terms = declared or SourceTerms()
    if outside.kind != "package":
        return terms
    metadata = importlib.metadata.metadata(outside.digest.partition("==")[0])
    stated = next((metadata[field] for field in ("License-Expression", "License") if field in metadata), None)
    return terms.model_copy(
        update={
            "license": terms.license or (stated if stated and "\n" not in stated else None),
            "origin": terms.origin or f"the package {outside.digest}",
        }
    )
