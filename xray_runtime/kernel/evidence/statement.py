"""The statement beside every checkpoint: an in-toto Statement v1 with SLSA provenance of how it was made.

The manifest says what a checkpoint is and follows from the inputs alone. The statement says how this copy was made: by
which run, code and machine. Two machines that computed the same checkpoint may write different statements.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.kernel.config.sources import SourceTerms
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.content_digest import Outside
from xray_runtime.kernel.store.manifest import ATTESTATION, CARD, MANIFEST, STATEMENT, Manifest, Sha256

P = TypeVar("P", bound=BaseModel)


class _Model(BaseModel):
    # Otherwise pydantic writes null for NaN, and no later check sees it.
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, ser_json_inf_nan="constants")


class Digests(_Model):
    sha256: Sha256


class StatementSubject(_Model):
    """One file the statement is about."""

    name: str
    digest: Digests

    @classmethod
    def of(cls, name: str, sha256: str) -> Self:
        return cls(name=name, digest=Digests(sha256=sha256))


class Resource(_Model):
    """One thing a stage used: a parent checkpoint (named by its role), an outside source."""

    name: str
    uri: str | None = None
    digest: Digests | None = None
    annotations: dict[str, Any] = Field(default_factory=dict)


class InTotoRecord(_Model, Generic[P]):
    """An in-toto Statement v1; each kind of record names its type of predicate."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field("https://in-toto.io/Statement/v1", alias="_type")
    subject: list[StatementSubject]
    predicate: P

    def to_bytes(self) -> bytes:
        """The one text of this record."""
        content = self.model_dump(mode="json", by_alias=True)
        return (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


class External(_Model):
    """The user's input."""

    stage: str
    kind: str
    type: str
    seed: int
    config: dict[str, Any]
    functions: dict[str, dict[str, Sha256]]


class OutsideSource(_Model):
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


class CodeFacts(_Model):
    git_commit: str | None
    diff_sha256: Sha256 | None
    """Digest of attestation/code.diff, the changes that were not committed."""
    package_sha256: Sha256
    """Digest of the files of flows, tasks and xray_runtime as installed."""


class Internal(_Model):
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


class Build(_Model):
    build_type: Literal["urn:xray:stage:v1"] = Field("urn:xray:stage:v1", alias="buildType")
    external: External = Field(alias="externalParameters")
    internal: Internal = Field(alias="internalParameters")
    dependencies: list[Resource] = Field(alias="resolvedDependencies")


class RunFacts(_Model):
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


class Metadata(_Model):
    invocation_id: str | None = Field(alias="invocationId")
    started: str = Field(alias="startedOn")
    finished: str = Field(alias="finishedOn")


class Details(_Model):
    builder: dict[str, Any]
    metadata: Metadata
    run: RunFacts = Field(alias="xray_run")


class Predicate(_Model):
    build: Build = Field(alias="buildDefinition")
    details: Details = Field(alias="runDetails")


class Statement(InTotoRecord[Predicate]):
    """See https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1."""

    predicate_type: Literal["https://slsa.dev/provenance/v1"] = Field(
        "https://slsa.dev/provenance/v1", alias="predicateType"
    )

    @classmethod
    def read(cls, path: Path) -> Self:
        """The statement in `path`. Raises ValueError when it is missing, too large or malformed."""
        content = read_bounded(path)
        try:
            return cls.model_validate_json(content)
        except (ValidationError, RecursionError) as error:
            raise ValueError(f"{path}: not a statement ({first_line(error)})") from error

    def contradicts(self, manifest: Manifest, sha256: str) -> list[str]:
        """Names of the facts in which this statement and a checkpoint's manifest differ."""
        external, internal = self.predicate.build.external, self.predicate.build.internal
        names = ("key", "step", "config_digest", "code_digest")
        mine = dict(external) | {name: getattr(internal, name) for name in names} | {"parents": self.parents}
        theirs = {name: getattr(manifest, name) for name in mine}
        mine["checkpoint"], theirs["checkpoint"] = internal.checkpoint, sha256
        mine["files"] = {s.name: s.digest.sha256 for s in self.subject if s.name not in (MANIFEST, CARD)}
        theirs["files"] = {entry.path: entry.sha256 for entry in manifest.files}
        return [name for name, value in mine.items() if value != theirs[name]]

    @property
    def parents(self) -> dict[str, str]:
        """Role → checkpoint sha256."""
        return {
            d.name: d.digest.sha256
            for d in self.predicate.build.dependencies
            if d.digest and (d.uri or "").startswith("xray:")
        }


def read_statement(directory: Path) -> Statement:
    """The statement beside a checkpoint. Raises ValueError: it is malformed; OSError: there is none."""
    if (directory / ATTESTATION).is_symlink():
        raise ValueError(f"{directory / ATTESTATION} is a link")
    return Statement.read(directory / ATTESTATION / STATEMENT)


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
