"""Whatever somebody puts into a shared store, or in place of a checkpoint here, is never used.

Each attack changes a store that holds one signed checkpoint with its result and records; another directory, which signs
with the same key, then asks for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.kernel.store import published
from tests.unit.trust.tampering import edit_json, restated
from xray.tasks.spec import StageResult
from xray.tasks.stored_results import PUBLISHED, RESULTS, find_result, keep_result
from xray_runtime.kernel.evidence.lines import LogRecord
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.statement import RunFacts
from xray_runtime.kernel.evidence.view import Published
from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.kernel.store.identity import Identity, file_sha256
from xray_runtime.kernel.store.manifest import ATTESTATION, MANIFEST
from xray_runtime.kernel.store.shared import INDEX, SharedStore
from xray_runtime.kernel.tracking.recorder import RECORDS, records_directory
from xray_runtime.trust.attestation import attest, open_store
from xray_runtime.trust.keys import exchange_keys
from xray_runtime.trust.log import log_checkpoints, sign_line
from xray_runtime.trust.signing import KEY_VARIABLE, make_key, public_key, signing_key

IDENTITY = published.IDENTITY.model_copy(update={"parents": {}})
KEY = IDENTITY.key
NAME = f"sft-{KEY[:12]}"
WEIGHTS = b"weights"
EVIL = b"evil, which is longer than the weights"


def publish(output: Path, shared: Path | None, content: bytes = WEIGHTS, identity: Identity = IDENTITY) -> StageResult:
    """A stage that has just run in `output`, signed with its key, and its copy in the store."""
    key = signing_key(output)
    store = open_store(output, SharedStore(shared.as_uri()) if shared is not None else None)
    with store.building(identity.stage, identity.key) as built:
        (built / "model.bin").write_bytes(content)
        record = partial(attest, parents={}, run=RunFacts(), started=datetime.now(UTC), private_key=key)
        ref = store.publish(built, identity, type="Model", step=3, dataset=None, attest=record)
    records = records_directory(output, identity.stage, identity.key)
    records.mkdir(parents=True, exist_ok=True)
    (records / "metrics.jsonl").write_text('{"step": 0, "time_ms": 1, "metrics": {"sft/loss": 2.0}}\n')
    result = StageResult(
        name=identity.stage,
        kind="sft",
        key=identity.key,
        checkpoint=ref,
        parents=identity.parents,
        dataset=None,
        mlflow_run_id="run-1",
        seconds=1.5,
        attempts=1,
    )
    keep_result(result, output, store)
    return result


def copy_of(shared: Path) -> Path:
    """The directory of the copy that counts."""
    index = json.loads((shared / "checkpoints" / NAME / INDEX).read_text())
    return shared / "checkpoints" / NAME / index["copy_name"]


def indexed(shared: Path, folder: str = "checkpoints") -> None:
    """Write an index that fits the files that are there now."""
    place = shared / folder / NAME
    index = json.loads((place / INDEX).read_text())
    copy = place / index["copy_name"]
    paths = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())
    index["files"] = [{"path": p, "sha256": file_sha256(copy / p), "size": (copy / p).stat().st_size} for p in paths]
    (place / INDEX).write_text(json.dumps(index))


def fitting_manifest(copy: Path) -> str:
    """Make a manifest fit the files beside it; returns its digest."""
    manifest = json.loads((copy / MANIFEST).read_text())
    for entry in manifest["files"]:
        path = copy / entry["path"]
        entry |= {"sha256": file_sha256(path), "size": path.stat().st_size}
    (copy / MANIFEST).write_text(json.dumps(manifest, sort_keys=True, indent=2) + "\n")
    return file_sha256(copy / MANIFEST)


def other_weights(copy: Path) -> None:
    (copy / "model.bin").write_bytes(EVIL)
    fitting_manifest(copy)


def fit_statement(copy: Path, private: Path | None = None) -> None:
    """Make the statement fit, under the signature it had or that of a stranger."""
    digests = {"model.bin": file_sha256(copy / "model.bin"), MANIFEST: file_sha256(copy / MANIFEST)}

    def fit(content: Any) -> None:
        for subject in content["subject"]:
            subject["digest"]["sha256"] = digests.get(subject["name"], subject["digest"]["sha256"])
        content["predicate"]["buildDefinition"]["internalParameters"]["checkpoint"] = digests[MANIFEST]

    restated(copy, fit, private.read_bytes() if private is not None else None)


def signed_by_a_stranger(shared: Path) -> None:
    other_weights(copy_of(shared))
    fit_statement(copy_of(shared), key_of_a_stranger(shared.parent / "stranger"))
    indexed(shared)


def signed_by_a_stranger_whose_key_lies_there(shared: Path) -> None:
    signed_by_a_stranger(shared)
    exchange_keys(shared.parent / "stranger", SharedStore(shared.as_uri()))


def of_another_stage(shared: Path) -> None:
    """Properly signed, and another computation."""
    other = IDENTITY.model_copy(update={"config": {"lr": 9.0}})
    publish(shared.parent / "other", shared, EVIL, other)
    shutil.rmtree(shared / "checkpoints" / NAME)
    shutil.copytree(shared / "checkpoints" / f"sft-{other.key[:12]}", shared / "checkpoints" / NAME)


def with_index(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """A change of a copy's files, to which its index then fits."""
    return lambda shared: (change(copy_of(shared)), indexed(shared))[1]


def index_of(shared: Path) -> Path:
    return shared / "checkpoints" / NAME / INDEX


COPIES: dict[str, Callable[[Path], object]] = {
    "other weights": with_index(other_weights),
    # The statement fits; its signature does not.
    "and their statement": with_index(lambda copy: (other_weights(copy), fit_statement(copy))),
    "signed by a stranger": signed_by_a_stranger,
    "whose key lies there": signed_by_a_stranger_whose_key_lies_there,
    "no record": with_index(lambda copy: (other_weights(copy), shutil.rmtree(copy / ATTESTATION))),
    "no signature": with_index(lambda copy: edit_json(copy / ATTESTATION / "statement.json", signatures=[])),
    "another stage": of_another_stage,
    "a file more": with_index(lambda copy: (copy / "modeling.py").write_text("import os")),
    "a file more in the record": with_index(lambda copy: (copy / ATTESTATION / "approved.txt").write_text("yes")),
    # The manifest and its record are as they were.
    "weights that only the index has": with_index(lambda copy: (copy / "model.bin").write_bytes(EVIL)),
    "a path that leads out": lambda shared: index_of(shared).write_text(
        index_of(shared).read_text().replace('"model.bin"', '"../../model.bin"')
    ),
    "a record of any size": with_index(lambda copy: os.truncate(copy / ATTESTATION / "statement.json", 40 * 2**20)),
    "a damaged index": lambda shared: index_of(shared).write_text("{"),
}


@pytest.fixture(autouse=True)
def one_key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines that share the store sign with one key; an intruder does not have it."""
    private = tmp_path_factory.mktemp("key") / "signing.pem"
    make_key(private)
    monkeypatch.setenv(KEY_VARIABLE, str(private))


def key_of_a_stranger(output: Path) -> Path:
    """The key of another directory, made if need be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(KEY_VARIABLE)
        return signing_key(output)


def asking(tmp_path: Path) -> tuple[Path, Store]:
    """Another directory, and its store."""
    output, shared = tmp_path / "here", tmp_path / "shared"
    signing_key(output)
    exchange_keys(output, SharedStore(shared.as_uri()))
    return output, open_store(output, SharedStore(shared.as_uri()))


def test_signed_results_are_used(tmp_path: Path) -> None:
    made = publish(tmp_path / "there", tmp_path / "shared")
    output, store = asking(tmp_path)
    found = find_result("sft", KEY, output, store)
    assert found is not None
    assert found.checkpoint.sha256 == made.checkpoint.sha256
    assert (found.checkpoint.path / "model.bin").read_bytes() == WEIGHTS
    assert (records_directory(output, "sft", KEY) / "metrics.jsonl").exists()
    # The log here says what was brought, records too.
    assert view(output).published[NAME].checkpoint == made.checkpoint.sha256
    assert f"{RECORDS}/{NAME}/metrics.jsonl" in view(output).files


@pytest.mark.parametrize("attack", COPIES)
def test_a_planted_copy_is_not_used(attack: str, tmp_path: Path) -> None:
    made, shared = publish(tmp_path / "there", tmp_path / "shared"), tmp_path / "shared"
    COPIES[attack](shared)
    output, store = asking(tmp_path)
    assert store.find("sft", KEY) is None
    assert find_result("sft", KEY, output, store) is None
    ref = made.checkpoint.model_copy(update={"uri": str(store.directory("sft", KEY))})
    with pytest.raises(RuntimeError, match="missing or was changed"):
        open_store(output, store.shared).ensure_local(ref)
    # The stage is computed again, here and there.
    again = publish(output, shared)
    assert (again.checkpoint.path / "model.bin").read_bytes() == WEIGHTS
    assert (copy_of(shared) / "model.bin").read_bytes() == WEIGHTS


def changed_result(shared: Path) -> None:
    path = shared / RESULTS / f"{NAME}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 0.1}))


def unsigned_result(shared: Path) -> None:
    (shared / PUBLISHED / f"{NAME}.json").unlink()


def entry_of_a_stranger(shared: Path) -> None:
    changed_result(shared)
    files = {f"{RESULTS}/{NAME}.json": file_sha256(shared / RESULTS / f"{NAME}.json")}
    entry = Published(action="publish", directory=NAME, checkpoint="ab" * 32)
    line = sign_line(shared, LogRecord, entry, files, private=key_of_a_stranger(shared.parent / "stranger"))
    (shared / PUBLISHED / f"{NAME}.json").write_bytes(line)


def entry_of_another_stage(shared: Path) -> None:
    other = IDENTITY.model_copy(update={"config": {"lr": 9.0}})
    publish(shared.parent / "other", shared, EVIL, other)
    for folder in (PUBLISHED, RESULTS):
        shutil.copy(shared / folder / f"sft-{other.key[:12]}.json", shared / folder / f"{NAME}.json")


def no_entry(shared: Path) -> None:
    (shared / PUBLISHED / f"{NAME}.json").write_text("[" * 2000)


RESULTS_OF_STRANGERS = (changed_result, unsigned_result, entry_of_a_stranger, entry_of_another_stage, no_entry)


@pytest.mark.parametrize("attack", RESULTS_OF_STRANGERS, ids=lambda attack: attack.__name__)
def test_a_planted_result_is_not_used(attack: Callable[[Path], None], tmp_path: Path) -> None:
    publish(tmp_path / "there", tmp_path / "shared")
    attack(tmp_path / "shared")
    output, store = asking(tmp_path)
    assert find_result("sft", KEY, output, store) is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.svg", "rollouts.json"])
def test_planted_records_do_not_come_along(name: str, tmp_path: Path) -> None:
    """A report shows them, with a picture as it is."""
    publish(tmp_path / "there", tmp_path / "shared")
    place = tmp_path / "shared" / RECORDS / NAME
    copy = place / json.loads((place / INDEX).read_text())["copy_name"]
    (copy / name).write_text("<script>alert(1)</script>")
    indexed(tmp_path / "shared", RECORDS)
    output, store = asking(tmp_path)
    assert find_result("sft", KEY, output, store) is not None
    records = records_directory(output, "sft", KEY)
    assert {path.name for path in records.glob("*")} <= {"metrics.jsonl"} - (
        {name} if name == "metrics.jsonl" else set()
    )


def planted_here(output: Path, content: bytes = EVIL) -> Path:
    """Other weights with a fitting manifest and statement in place of a checkpoint."""
    directory = output / "checkpoints" / NAME
    (directory / "model.bin").write_bytes(content)
    fitting_manifest(directory)
    fit_statement(directory)
    return directory


@pytest.mark.parametrize("how", ["statement", "no keys", "no record", "record of another", "unsigned line", "stranger"])
def test_a_checkpoint_planted_here_is_not_used(how: str, tmp_path: Path) -> None:
    output = tmp_path / "here"
    publish(output, None)
    directory = planted_here(output)
    if how == "no keys":
        shutil.rmtree(output / "keys")
    elif how == "no record":
        shutil.rmtree(directory / ATTESTATION)
    elif how == "record of another":
        other = publish(output, None, EVIL, IDENTITY.model_copy(update={"config": {"lr": 9.0}}))
        shutil.copytree(other.checkpoint.path / ATTESTATION, directory / ATTESTATION, dirs_exist_ok=True)
    elif how == "stranger":
        fit_statement(directory, key_of_a_stranger(tmp_path / "stranger"))
    elif how == "unsigned line":
        sha256 = file_sha256(directory / MANIFEST)
        log_checkpoints(output, {NAME: sha256}, here=True, private=key_of_a_stranger(tmp_path / "stranger"))
    store = open_store(output)
    assert store.find("sft", KEY) is None
    assert find_result("sft", KEY, output, store) is None


def test_an_older_signed_checkpoint_is_not_the_one_that_the_log_names(tmp_path: Path) -> None:
    """The same computation, signed with the right key, with other bytes."""
    older = publish(tmp_path / "older", None, b"older")
    newer = publish(tmp_path / "here", None)
    assert older.checkpoint.path.name == newer.checkpoint.path.name
    shutil.rmtree(newer.checkpoint.path)
    shutil.copytree(older.checkpoint.path, newer.checkpoint.path)
    assert open_store(tmp_path / "here").find("sft", KEY) is None
    assert open_store(tmp_path / "older").find("sft", KEY) is not None


@pytest.mark.parametrize("where", [RESULTS, "log"])
def test_a_planted_result_here_is_not_used(where: str, tmp_path: Path) -> None:
    output = tmp_path / "here"
    publish(output, None)
    path = output / RESULTS / f"{NAME}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 0.1}))
    if where == "log":
        # A stranger's entry, which `log.view` reads and an audit names.
        files = {f"{RESULTS}/{NAME}.json": hashlib.sha256(path.read_bytes()).hexdigest()}
        sha256 = view(output).published[NAME].checkpoint
        private = key_of_a_stranger(tmp_path / "stranger")
        log_checkpoints(output, {NAME: sha256}, files, here=True, renew=True, private=private)
        assert view(output).files[f"{RESULTS}/{NAME}.json"] == files[f"{RESULTS}/{NAME}.json"]
    assert find_result("sft", KEY, output, open_store(output)) is None


def test_a_key_is_not_needed_twice(tmp_path: Path) -> None:
    """The public half lies with what it signed, and nothing else is trusted."""
    publish(tmp_path / "there", tmp_path / "shared")
    output, _ = asking(tmp_path)
    assert public_key(output).exists()
    assert not (output / "keys" / "trusted").exists()
