"""A portable replay: all that one iteration of a PPO stage needs, in one archive.

It is a tar with the layout of an output directory, so that the code of `xray replay` reads it:

    iteration.json    what it is of, and what its update computed: a signed statement that lists every other file
    checkpoints/…     what the stage was made from, whole; of the stage itself its manifest, its signed statement and
                      the shards of its ledger that are compared
    snapshot/         the state before the iteration; none before the first
    source/           the log that says the stage was published: `trust.published_log`
    keys/             the public keys of the directory that it comes from
    sample-ROW.html   the page of a reply, where one was asked for: `sample_page`
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from xray_runtime.data.ledger import iterations, shard_path
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import (
    EvidenceModel,
    InTotoRecord,
    Verifier,
    read_envelope,
    read_record,
    sign,
)
from xray_runtime.kernel.evidence.statement import verified_statement
from xray_runtime.kernel.files import sync
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, inspect, read_bounded
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import ATTESTATION, LEDGER, MANIFEST, STATEMENT, Sha256
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.hacking_monitor import RECORD as WATCHED
from xray_runtime.models.merging import base_of
from xray_runtime.rewards.journal import ANSWERS
from xray_runtime.trust.attestation import foreign_in_record
from xray_runtime.trust.bundle import open_bundle
from xray_runtime.trust.iteration.updates import UpdateNumbers
from xray_runtime.trust.keys import RETIRED, TRUSTED, retirement_files, root_keys, trusted_keys
from xray_runtime.trust.published_log import SOURCE, publish_log, require_published
from xray_runtime.trust.replayable import Replayable, replayable
from xray_runtime.trust.signing import KEY_VARIABLE, PUBLIC, has_signing_key, require_agent, signing_key

RECORD, SNAPSHOT = "iteration.json", "snapshot"


class Iteration(EvidenceModel):
    """One iteration of a stage, computed again by who wrote the bundle and found equal to its ledger."""

    checkpoint: Sha256
    """The stage's."""
    iteration: int = Field(ge=0)
    """Counted from 0."""
    update: UpdateNumbers


class IterationRecord(InTotoRecord[Iteration]):
    predicate_type: Literal["urn:xray:iteration:v1"] = Field(default="urn:xray:iteration:v1", alias="predicateType")


class BundleProblem(Exception):
    """Findings: what is wrong with a bundle, one line each, which begins with the name of the file."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


@dataclass(frozen=True)
class PortableIteration:
    """An iteration in a bundle whose every byte was checked."""

    stage: Replayable
    record: Iteration
    snapshot: Path | None
    """The state before it; None: it is the first."""
    signer: str
    """Digest of the key that signed the bundle."""


def is_iteration(path: Path) -> bool:
    """Whether a file says that it is the bundle of an iteration: by the name of its first member."""
    with path.open("rb") as file:
        return file.read(100).rstrip(b"\0") == RECORD.encode()


def require_key(store: LineageStore) -> None:
    """Raises ConfigError where there is no key to sign a bundle with, or its agent does not have it."""
    if not has_signing_key(store.output):
        raise ConfigError(f"BUNDLE: must be signed, but {store.output} has no private key: set {KEY_VARIABLE}")
    require_agent(signing_key(store.output))


def write_bundle(store: LineageStore, stage: Replayable, record: Iteration, made: Path, path: Path) -> None:
    """Write the bundle of an iteration to `path`, whole or not at all.

    Args:
        made: a directory with its `snapshot`, if it has one, and its pages.
    """
    publish_log(store.output, {stage.node.sha256}, made / SOURCE)
    members = {file.relative_to(made).as_posix(): file for file in sorted(made.rglob("*")) if file.is_file()}
    members |= _keys(store.output) | _of_stage(stage, record.iteration)
    for node in _parents(store, stage):
        found = (file for file in sorted(node.directory.rglob("*")) if file.is_file())
        members |= {f"{CHECKPOINTS}/{node.directory.name}/{f.relative_to(node.directory)}": f for f in found}
    statement = IterationRecord.of(record, {name: file_sha256(file) for name, file in members.items()})
    (made / RECORD).write_bytes(sign(statement, signing_key(store.output).read_bytes()))
    temporary = path.with_name(f"{path.name}.writing")
    try:
        # Without headers of its own before a member: the first is what `is_iteration` reads.
        with tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as archive:
            for name, file in {RECORD: made / RECORD, **members}.items():
                archive.add(file, name, recursive=False)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.absolute().parent)


def _keys(output: Path) -> dict[str, Path]:
    own = {f"keys/{PUBLIC if n == 0 else f'{TRUSTED}/{key.name}'}": key for n, key in enumerate(root_keys(output))}
    return own | {f"keys/{RETIRED}/{file.name}": file for file in retirement_files(output)}


def _of_stage(stage: Replayable, iteration: int) -> dict[str, Path]:
    """The files of the stage's own checkpoint that a replay of the iteration reads."""
    directory, config = stage.node.directory, stage.config
    assert isinstance(config, PPOConfig)
    # The next shard has the digest of the weights; those that were sampled meanwhile, answers of environments.
    wanted = range(iteration, iteration + config.lag + 2)
    shards = [shard_path(stage.ledger, number) for number in iterations(stage.ledger) if number in wanted]
    record = sorted((directory / ATTESTATION).iterdir())
    others = [directory / name for name in (MANIFEST, ANSWERS, WATCHED)]
    files = [file for file in (*others, *record, *shards) if file.is_file()]
    return {f"{CHECKPOINTS}/{directory.name}/{file.relative_to(directory)}": file for file in files}


def _parents(store: LineageStore, stage: Replayable) -> Iterator[Node]:
    """The checkpoints that the stage was made from, and those that adapters among them belong to."""
    by_directory = {node.directory.absolute(): node for node in store.graph.nodes.values()}
    waiting, found = list(stage.paths.values()), set[Path]()
    while waiting:
        path = waiting.pop().absolute()
        if path not in found:
            found.add(path)
            yield by_directory[path]
            base = base_of(path)
            waiting += [] if base is None else [base.directory]


@contextmanager
def open_iteration(path: Path, public: Path | None) -> Iterator[PortableIteration]:
    """The iteration in a bundle, unpacked into a temporary directory.

    Args:
        public: the key that must have signed it; None: the one that came with it.

    Raises:
        BundleProblem: it is not what was signed.
        ConfigError: it is no such bundle, or cannot be replayed here.
    """
    with open_bundle(path) as store:
        if not (store.output / RECORD).is_file():
            raise ConfigError(
                f"REF: {str(path)!r} is not allowed: there is no {RECORD} in it, which `xray bundle` writes"
            )
        yield _checked(store, public)


def _checked(store: LineageStore, public: Path | None) -> PortableIteration:
    output = store.output
    try:
        keys = trusted_keys(output, public)
        envelope = read_envelope(read_bounded(output / RECORD))
        signer = Verifier(keys).check(envelope)
        statement = read_record(envelope, IterationRecord)
    except (OSError, ValueError) as error:
        raise BundleProblem([f"{RECORD}: {first_line(error)}"]) from None
    _require(_differing(output, statement.files))
    record = statement.predicate
    node = store.graph.nodes.get(record.checkpoint)
    if node is None:
        raise BundleProblem([f"{RECORD}: the checkpoint {record.checkpoint[:12]} that it names is not in the bundle"])
    _require(_of_record(node, Verifier(keys)))
    for role, sha256 in sorted(node.manifest.parents.items()):
        parent = store.graph.nodes.get(sha256)
        if parent is None:
            raise BundleProblem([f"{CHECKPOINTS}: {role} {sha256[:12]} is not in the bundle"])
        damages = inspect(parent.directory, sha256)
        _require([f"{CHECKPOINTS}/{parent.directory.name}: {damage.text}" for damage in damages])
    try:
        require_published(output / SOURCE, node.sha256, [key.key for key in keys])
    except ValueError as error:
        raise BundleProblem([f"{SOURCE}: {first_line(error)}"]) from None
    snapshot = output / SNAPSHOT
    if snapshot.is_dir() != bool(record.iteration):
        raise BundleProblem([f"{SNAPSHOT}: iteration {record.iteration} has none, or needs one"])
    stage = replayable(node, store.graph, record.iteration)
    return PortableIteration(stage, record, snapshot if record.iteration else None, signer)


def _require(findings: list[str]) -> None:
    if findings:
        raise BundleProblem(findings)


def _differing(output: Path, signed: dict[str, str]) -> list[str]:
    """The files that are not what was signed."""
    found = {path.relative_to(output).as_posix(): path for path in output.rglob("*") if path.is_file()}
    del found[RECORD]
    problems = dict.fromkeys(signed.keys() - found.keys(), "is missing")
    problems |= dict.fromkeys(found.keys() - signed.keys(), "was added")
    changed = (name for name in found.keys() & signed.keys() if file_sha256(found[name]) != signed[name])
    problems |= dict.fromkeys(changed, "was changed")
    return [f"{name}: {text}" for name, text in sorted(problems.items())]


def _of_record(node: Node, verifier: Verifier) -> list[str]:
    """The faults of the stage's own files, by the statement that was signed when it was published."""
    where = f"{CHECKPOINTS}/{node.directory.name}"
    try:
        foreign = foreign_in_record(node.directory / ATTESTATION)
        statement = verified_statement(node.directory, verifier)
    except (OSError, ValueError) as error:
        return [f"{where}/{ATTESTATION}/{STATEMENT}: {first_line(error)}"]
    if foreign is not None:
        return [f"{where}/{ATTESTATION}/{foreign[0]}: {foreign[1]}"]
    if differing := statement.contradicts(node.manifest, node.sha256):
        return [f"{where}/{MANIFEST}: its signed statement differs from it in: {', '.join(differing)}"]
    listed: dict[str, Any] = {entry.path: entry.sha256 for entry in node.manifest.files}
    shards = sorted((node.directory / LEDGER).iterdir())
    others = [path for name in (ANSWERS, WATCHED) if (path := node.directory / name).is_file()]
    names = {path.relative_to(node.directory).as_posix(): path for path in (*shards, *others)}
    return [f"{where}/{name}: was changed" for name, path in names.items() if listed.get(name) != file_sha256(path)]
