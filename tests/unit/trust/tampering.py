"""Faults that an intruder puts into an output directory, one of each kind, with the findings that must name it.

`FAULTS` change files; `ROWS` write past MLflow into its database. In the statements, `:policy` is the registered
checkpoint's LoggedModel, `:stage` its run, `:run` the run of the lifecycle and `:name` the registered model.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from tests.unit.trust.synthetic import NAME, Lifecycle
from xray_runtime.data.ledger import Shard, read_shard
from xray_runtime.data.pairs import pairs_of, write_pairs
from xray_runtime.kernel.evidence.envelope import PAYLOAD_TYPE, load_private, new_private_key
from xray_runtime.kernel.evidence.log import END, LOG, read_lines
from xray_runtime.kernel.evidence.view import RunBegan
from xray_runtime.kernel.store.manifest import ATTESTATION, MANIFEST, SIGNATURE
from xray_runtime.trust.keys import rotate
from xray_runtime.trust.log import append
from xray_runtime.trust.signing import read_public, signing_key

Change = Callable[[Path], object]
FAULTS: dict[str, tuple[Change, str]] = {}
"""Name → (change, codes of which one must be found)."""


def fault(codes: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        FAULTS[change.__name__.strip("_").replace("_", " ")] = change, codes
        return change

    return register


# What faults are made of


def place(output: Path, pattern: str) -> Path:
    return next(iter(sorted(output.glob(f"checkpoints/{pattern}"))))


def checkpoints(output: Path) -> list[Path]:
    return sorted((output / "checkpoints").iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def lines(output: Path) -> list[bytes]:
    return (output / LOG).read_bytes().splitlines(keepends=True)


def write_lines(output: Path, kept: list[bytes]) -> None:
    (output / LOG).write_bytes(b"".join(kept))


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2))


def payload_of(line: bytes) -> Any:
    """The statement in an envelope."""
    return json.loads(base64.b64decode(json.loads(line)["payload"]))


def with_payload(line: bytes, payload: Any) -> bytes:
    """An envelope with other content under the signature it had."""
    changed = {"payload": base64.b64encode(json.dumps(payload).encode()).decode()}
    return json.dumps(json.loads(line) | changed).encode() + b"\n"


def signed(payload: Any, private: bytes) -> bytes:
    """Any content, in an envelope with a valid signature."""
    envelope = Envelope(json.dumps(payload).encode(), PAYLOAD_TYPE, {})
    signer: CryptoSigner = load_private(private)
    envelope.sign(signer)
    return json.dumps(envelope.to_dict()).encode() + b"\n"


def restated(directory: Path, change: Callable[[Any], object], private: bytes | None) -> None:
    """Change the statement beside a checkpoint and sign it; None leaves the signature it had."""
    path = directory / ATTESTATION / "statement.json"
    content = payload_of(path.read_bytes())
    change(content)
    path.write_bytes(signed(content, private) if private else with_payload(path.read_bytes(), content))


def _elsewhere(content: Any) -> None:
    content["predicate"]["buildDefinition"]["internalParameters"]["environment"]["host"] = "elsewhere"


def _finished(at: str) -> Callable[[Any], object]:
    return lambda content: content["predicate"]["runDetails"]["metadata"].update(finishedOn=at)


def rotated(output: Path) -> bytes:
    """Have a new key take over; returns the private half of the old one."""
    old = signing_key(output).read_bytes()
    rotate(output, by="a person", note="")
    return old


def sql(output: Path, *statements: str) -> None:
    """Run statements on an output directory's MLflow, each of which must change something."""
    values = {"run": json.loads((output / "lifecycle.json").read_text()).get("run_id"), "name": NAME}
    with contextlib.closing(sqlite3.connect(output / "mlflow.db")) as database, database:
        database.execute("pragma foreign_keys = off")
        query = "select model_id, source_run_id from logged_models where name = 'synthetic-ppo-2'"
        [(values["policy"], values["stage"])] = database.execute(query).fetchall()
        for statement in statements:
            changed = database.execute(statement, values).rowcount
            assert changed or statement.startswith(("create", "alter")), statement


# Checkpoints

DAMAGED = "manifest-malformed manifest-inconsistent statement-contradicts"
FAULTS |= {
    "a bit of a file": (lambda output: flip(place(output, "sft-*/model.safetensors")), "file-changed"),
    "a bit of a manifest": (
        lambda output: flip(place(output, f"sft-*/{MANIFEST}")),
        DAMAGED,
    ),
    "a bit of a card": (lambda output: flip(place(output, "ppo-2-*/README.md")), "card-changed"),
    "a card removed": (lambda output: place(output, "sft-*/README.md").unlink(), "card-missing"),
    "a file removed": (lambda output: place(output, "prepare-*/train.arrow").unlink(), "file-missing"),
    "a file added": (lambda output: (place(output, "sft-*") / ".gitignore").write_text("x"), "file-added"),
    "a file in a record": (lambda output: (place(output, f"sft-*/{ATTESTATION}") / "x").touch(), "file-added"),
    "a checkpoint removed": (lambda output: shutil.rmtree(place(output, "sft-*")), "parent-missing"),
    "a bit of a statement": (
        lambda output: restated(place(output, "ppo-2-*"), _elsewhere, None),
        "signature-invalid",
    ),
    "a statement by a stranger": (
        lambda output: restated(place(output, "ppo-2-*"), _elsewhere, new_private_key()),
        "signature-foreign",
    ),
    # Whoever has the key can sign anything: MLflow still knows the first statement.
    "a statement signed again with the key": (
        lambda output: restated(place(output, "ppo-2-*"), _elsewhere, signing_key(output).read_bytes()),
        "mlflow-model-changed",
    ),
    "a statement by a retired key": (
        lambda output: restated(place(output, "sft-*"), _finished("2099-01-01T00:00:00+00:00"), rotated(output)),
        "signature-retired",
    ),
    "a statement dated back by a retired key": (
        lambda output: restated(place(output, "sft-*"), _finished("2020-01-01T00:00:00+00:00"), rotated(output)),
        "mlflow-model-changed",
    ),
    "no signature": (
        lambda output: edit_json(place(output, f"sft-*/{ATTESTATION}/statement.json"), signatures=[]),
        "signature-missing",
    ),
    "no record": (lambda output: shutil.rmtree(place(output, f"sft-*/{ATTESTATION}")), "statement-missing"),
    "a statement of an older format": (
        lambda output: place(output, f"sft-*/{ATTESTATION}/statement.json").write_text('{"_type": "x"}'),
        "statement-malformed",
    ),
    "a card in a record changed": (
        lambda output: flip(place(output, f"evaluate-*/{ATTESTATION}/card.md")),
        "signature-invalid",
    ),
    "a card in a record removed": (
        lambda output: place(output, f"evaluate-*/{ATTESTATION}/card.md").unlink(),
        "signature-invalid",
    ),
    "changes of code that nobody signed": (
        lambda output: (place(output, f"sft-*/{ATTESTATION}") / "code.diff").write_text("+ better"),
        "signature-invalid",
    ),
    "no model signature": (lambda output: place(output, f"sft-*/{SIGNATURE}").unlink(), "signature-missing"),
    "a model signature of nothing": (
        lambda output: place(output, f"sft-*/{SIGNATURE}").write_text("{}"),
        "signature-malformed",
    ),
    "a model signature of another model": (
        lambda output: shutil.copy(place(output, f"ppo-1-*/{SIGNATURE}"), place(output, f"sft-*/{SIGNATURE}")),
        "signature-invalid",
    ),
}


def _signed_model(output: Path, private: bytes, change: Callable[[Any], object]) -> None:
    """Sign the model `sft` again with `model_signing`'s format."""
    path = place(output, f"sft-*/{SIGNATURE}")
    bundle = json.loads(path.read_text())
    content = payload_of(json.dumps(bundle["dsseEnvelope"]).encode())
    change(content["predicate"])
    envelope = json.loads(signed(content, private))
    bundle["verificationMaterial"]["publicKey"]["hint"] = envelope["signatures"][0].pop("keyid")
    path.write_text(json.dumps(bundle | {"dsseEnvelope": envelope}))


FAULTS |= {
    "a model signed by a stranger": (
        lambda output: _signed_model(output, new_private_key(), lambda _: None),
        "signature-foreign",
    ),
    "a model signature over fewer files": (
        lambda output: _signed_model(output, signing_key(output).read_bytes(), lambda model: model["resources"].pop()),
        "signature-invalid",
    ),
    "a model signature that leaves out the weights": (
        lambda output: _signed_model(
            output,
            signing_key(output).read_bytes(),
            lambda model: model["serialization"]["ignore_paths"].append("model.safetensors"),
        ),
        "signature-invalid",
    ),
}


@fault("file-changed")
def a_token_of_a_ledger(output: Path) -> None:
    path = place(output, "ppo-2-*/ledger/000001.parquet")
    shard = read_shard(path)
    replies = shard.table["reply_ids"].to_pylist()
    replies[0][0] += 1
    column, field = shard.table.schema.get_field_index("reply_ids"), shard.table.schema.field("reply_ids")
    table = shard.table.set_column(column, field, pa.array(replies, field.type))
    Shard(shard.iteration, shard.policy, table).write(path.parent)


@fault("file-changed")
def a_pair_of_a_dataset(output: Path) -> None:
    path = place(output, "prepare-*/train.arrow")
    pairs: Any = pairs_of(path)
    write_pairs(path, type(pairs[0]), list(pairs)[1:])


@fault("file-link")
def a_file_made_a_link(output: Path) -> None:
    path = place(output, "sft-*/model.safetensors")
    path.rename(output / "elsewhere")
    path.symlink_to(output / "elsewhere")


@fault("misplaced")
def checkpoints_swapped(output: Path) -> None:
    a, b = place(output, "sft-*"), place(output, "base-*")
    a.rename(output / "aside")
    b.rename(a)
    (output / "aside").rename(b)


@fault("manifest-inconsistent")
def a_parent_rewritten(output: Path) -> None:
    path = place(output, f"sft-*/{MANIFEST}")
    edit_json(path, parents=json.loads(path.read_text())["parents"] | {"base": "0" * 64})


@fault("manifest-inconsistent")
def a_config_value_rewritten(output: Path) -> None:
    edit_json(place(output, f"sft-*/{MANIFEST}"), config={"lr": 99})


@fault("statement-contradicts")
def a_statement_of_another_checkpoint(output: Path) -> None:
    shutil.rmtree(place(output, f"sft-*/{ATTESTATION}"))
    shutil.copytree(place(output, f"ppo-1-*/{ATTESTATION}"), place(output, "sft-*") / ATTESTATION)


@fault("checkpoint-missing")
def the_newest_checkpoint_removed_from_everywhere(output: Path) -> None:
    shutil.rmtree(newest := place(output, "evaluate-*"))
    sql(output, f"delete from logged_model_params where param_value like '%{newest.name}'")


@fault("checkpoint-unlogged")
def a_checkpoint_that_nobody_logged(output: Path) -> None:
    """By whoever has the key: the log is the second thing to falsify."""
    kept = lines(output)
    Lifecycle(output, tracking=False).add("late", "ppo", {"x": b"late"}, {})
    write_lines(output, kept)


# Keys


@fault("signature-foreign")
def the_public_key_replaced(output: Path) -> None:
    signing_key(output / "intruder")
    shutil.move(output / "intruder" / "keys" / "signing.pub", output / "keys" / "signing.pub")
    shutil.rmtree(output / "intruder")


@fault("signature-foreign")
def a_key_among_the_retired_without_a_record(output: Path) -> None:
    rotated(output)
    intruder = signing_key(output / "intruder").parent / "signing.pub"
    shutil.copy(intruder, output / "keys" / "retired" / f"{read_public(intruder).sha256[:16]}.pub")
    private = intruder.with_name("signing.pem").read_bytes()
    shutil.rmtree(output / "intruder")
    restated(place(output, "sft-*"), lambda _: None, private)


def _retired(output: Path, suffix: str) -> Path:
    rotated(output)
    [path] = (output / "keys" / "retired").glob(f"*{suffix}")
    return path


@fault("rotation-broken")
def a_rotation_dated_back(output: Path) -> None:
    path = _retired(output, ".json")
    content = payload_of(path.read_bytes())
    content["predicate"]["at"] = "2020-01-01T00:00:00Z"
    path.write_bytes(with_payload(path.read_bytes(), content))


@fault("rotation-broken")
def a_rotation_signed_by_the_new_key_alone(output: Path) -> None:
    path = _retired(output, ".json")
    path.write_bytes(signed(payload_of(path.read_bytes()), signing_key(output).read_bytes()))


@fault("log-broken")
def an_entry_by_a_retired_key_that_claims_an_earlier_time(output: Path) -> None:
    old = rotated(output)
    statement = payload_of(lines(output)[-1])
    earlier = {
        "previous": hashlib.sha256(lines(output)[-1]).hexdigest(),
        "at": "2020-01-01T00:00:00+00:00",
        "action": "decline",
    }
    statement["predicate"] |= earlier
    write_lines(output, [*lines(output), signed(statement, old)])


FAULTS |= {
    "a retired key removed": (lambda output: _retired(output, ".pub").unlink(), "rotation-broken"),
    "the record of a rotation removed": (lambda output: _retired(output, ".json").unlink(), "rotation-broken"),
    "a retired key replaced": (lambda output: _retired(output, ".pub").write_bytes(b"no key"), "rotation-broken"),
    "a key that others can read": (lambda output: (output / "keys/signing.pem").chmod(0o640), "key-exposed"),
    "keys that others can replace": (lambda output: (output / "keys").chmod(0o777), "key-exposed"),
}


@fault("key-exposed")
def a_key_that_is_a_link(output: Path) -> None:
    shutil.move(output / "keys" / "signing.pem", output / "locks" / "kept.pem")
    (output / "keys" / "signing.pem").symlink_to(output / "locks" / "kept.pem")


# The log

ALIAS = "insert into registered_model_aliases (alias, version, name, workspace) values "
ALIAS_BY_HAND = f"{ALIAS} ('champion', 1, '{NAME}', 'default')"

FAULTS |= {
    "the log removed": (lambda output: (output / LOG).unlink(), "log-missing"),
    "the log removed and an alias put by hand": (
        lambda output: ((output / LOG).unlink(), sql(output, ALIAS_BY_HAND)),
        "alias-moved",
    ),
    "the last entry removed": (lambda output: write_lines(output, lines(output)[:-1]), "log-shorter"),
    "several entries removed": (lambda output: write_lines(output, lines(output)[:-5]), "log-shorter"),
    "an entry taken out": (lambda output: write_lines(output, lines(output)[:3] + lines(output)[4:]), "log-broken"),
    "two entries swapped": (
        lambda output: write_lines(output, [*lines(output)[1::-1], *lines(output)[2:]]),
        "log-broken",
    ),
    "a bit of the log": (lambda output: flip(output / LOG), "log-broken"),
    "no JSON in the log": (lambda output: write_lines(output, [*lines(output), b"approved\n"]), "log-broken"),
    "an entry again": (lambda output: write_lines(output, [*lines(output), lines(output)[0]]), "log-broken"),
    "an entry by a stranger": (
        lambda output: write_lines(
            output, [*lines(output)[:-1], signed(payload_of(lines(output)[-1]), new_private_key())]
        ),
        "log-broken",
    ),
    "the end of the log removed": (lambda output: (output / END).unlink(), "log-shorter"),
    # A log line is signed with the same key: its type of predicate tells them apart.
    "an entry in the place of the end": (lambda output: (output / END).write_bytes(lines(output)[-1]), "log-shorter"),
    "an end by a stranger": (
        lambda output: (output / END).write_bytes(signed(payload_of((output / END).read_bytes()), new_private_key())),
        "log-shorter",
    ),
}


@fault("log-broken")
def a_decision_rewritten(output: Path) -> None:
    kept = lines(output)
    [number] = [n for n, line in enumerate(kept) if payload_of(line)["predicate"].get("action") == "register"]
    content = payload_of(kept[number])
    content["predicate"]["note"] = "approved"
    kept[number] = with_payload(kept[number], content)
    write_lines(output, kept)


@fault("log-shorter")
def the_newest_entries_taken_off_with_what_they_were_about(output: Path) -> None:
    """The decision and its alias, as if the policy had never been registered."""
    write_lines(output, lines(output)[:-2])
    sql(output, "delete from registered_model_aliases")


@fault("log-shorter")
def a_shorter_log_that_only_the_last_audit_knew_longer(output: Path) -> None:
    from xray_runtime.kernel.history.reference import open_lineage_store
    from xray_runtime.trust.audit.checkpoints import audit

    before = (output / END).read_bytes()
    append(output, next(line.entry for line in read_lines(output) if line.entry.action == "end"))
    assert audit(open_lineage_store(output, None), since_verified=True).is_sound
    write_lines(output, lines(output)[:-1])
    (output / END).write_bytes(before)


@fault("log-broken")
def a_log_of_another_directory(output: Path) -> None:
    Lifecycle(output / "other", tracking=False).add("base", "base", {"x": b""}, {})
    shutil.move(output / "other" / LOG, output / LOG)
    shutil.rmtree(output / "other")


@fault("log-broken")
def the_log_made_a_link(output: Path) -> None:
    shutil.move(output / LOG, output / "logs")
    (output / LOG).symlink_to("logs")


# Records that runs leave


def _record(output: Path, **values: object) -> None:
    edit_json(output / "lifecycle.json", **values)


def _began(output: Path) -> None:
    """A run of the same config that was cut short."""
    entry = next(line.entry for line in read_lines(output) if isinstance(line.entry, RunBegan))
    append(output, entry.model_copy(update={"run_id": "cut-short", "tracking": "http://elsewhere"}))
    _record(output, run_id="cut-short", status="running")


def _page(output: Path) -> Path:
    return next(iter((output / "lineage").iterdir()))


def _artifact(output: Path) -> Path:
    return next(path for path in sorted((output / "mlartifacts").rglob("*")) if path.is_file())


FAULTS |= {
    "a number of the record": (lambda output: _record(output, evaluation={"win_rate": 0.99}), "record-differs"),
    "a run made to look at work": (lambda output: _record(output, status="running", seed=9), "run-changed"),
    "facts of a run that was cut short": (lambda output: (_began(output), _record(output, seed=9)), "run-changed"),
    "the report beside a run that was cut short": (
        lambda output: (_began(output), (output / "report.html").write_text("win rate 0.99")),
        "run-changed",
    ),
    "the numbers of a report": (lambda output: (output / "report.html").write_text("0.99"), "run-changed"),
    "a record removed": (lambda output: (output / "lifecycle.json").unlink(), "run-changed"),
    "the config": (lambda output: flip(output / "config.yaml"), "run-changed"),
    "a script in a page": (lambda output: _page(output).write_text("<script>alert(1)</script>"), "run-changed"),
    "a page added": (lambda output: _page(output).with_name("approved.html").write_text("x"), "file-unsigned"),
    "a result": (
        lambda output: edit_json(next(iter((output / "results").iterdir())), seconds=0.1),
        "run-changed",
    ),
    "a metric on disk": (lambda output: flip(next(output.glob("records/ppo-2-*/metrics.jsonl"))), "run-changed"),
    "a figure added": (lambda output: (next(output.glob("records/ppo-2-*")) / "b.png").touch(), "file-unsigned"),
    "a figure removed": (lambda output: next(output.glob("records/ppo-2-*/training.png")).unlink(), "run-changed"),
    "an artifact": (lambda output: flip(_artifact(output)), "run-changed"),
    "an artifact removed": (lambda output: _artifact(output).unlink(), "run-changed"),
    "an artifact added": (lambda output: _artifact(output).with_name("approval.json").touch(), "file-unsigned"),
    "a file in the root": (lambda output: (output / "approval.pdf").write_text("x"), "file-unknown"),
    "mlflow removed": (lambda output: (output / "mlflow.db").unlink(), "tracking-missing"),
    "mlflow and the log removed": (
        lambda output: ((output / "mlflow.db").unlink(), (output / LOG).unlink()),
        "log-missing",
    ),
}


@fault("record-differs")
def a_checkpoint_of_the_record(output: Path) -> None:
    stages = json.loads((output / "lifecycle.json").read_text())["stages"]
    stages[0]["checkpoint"]["sha256"] = "0" * 64
    _record(output, stages=stages)


@fault("run-changed")
def the_record_of_an_earlier_run_put_back(output: Path) -> None:
    earlier = (output / "lifecycle.json").read_bytes()
    lifecycle = Lifecycle(output)
    _record(output, run_id=lifecycle.run_id, **lifecycle.facts())
    lifecycle.end()
    (output / "lifecycle.json").write_bytes(earlier)


@fault("snapshot-left")
def a_planted_snapshot(output: Path) -> None:
    planted = output / "snapshots" / "ppo-1-0123456789ab" / "step-0000000004"
    planted.mkdir(parents=True)
    (planted / "state.json").write_text("{}")


@fault("file-link")
def a_directory_made_a_link(output: Path) -> None:
    shutil.move(output / "records", output.parent / "elsewhere")
    (output / "records").symlink_to(output.parent / "elsewhere")


@fault("mlflow-model-missing")
def another_mlflow(output: Path) -> None:
    Lifecycle(output / "other")
    shutil.move(output / "other" / "mlflow.db", output / "mlflow.db")
    shutil.rmtree(output / "other")


# Rows of MLflow

MODEL_COLUMNS = (
    "experiment_id, name, artifact_location, creation_timestamp_ms, last_updated_timestamp_ms, status, "
    "lifecycle_stage, model_type, source_run_id, status_message"
)
FOREIGN_MODEL = (
    f"insert into logged_models (model_id, {MODEL_COLUMNS}) select 'm-evil', {MODEL_COLUMNS} from logged_models "
    "where model_id = :policy",
    "update logged_models set artifact_location = 'file:///evil' where model_id = 'm-evil'",
    "insert into logged_model_params select 'm-evil', experiment_id, param_key, param_value from logged_model_params "
    "where model_id = :policy",
)
VERSION_COLUMNS = (
    "creation_time, last_updated_time, description, user_id, current_stage, run_id, status, status_message, run_link, "
    "workspace"
)
SECOND_VERSION = (
    f"insert into model_versions (name, version, source, storage_location, {VERSION_COLUMNS}) select name, 2, "
    f"'models:/m-evil', 'file:///evil', {VERSION_COLUMNS} from model_versions",
)
RUN_COLUMNS = (
    "source_type, source_name, entry_point_name, user_id, status, start_time, end_time, source_version, "
    "lifecycle_stage, artifact_uri, experiment_id, deleted_time"
)
FOREIGN_RUN = (
    f"insert into runs (run_uuid, name, {RUN_COLUMNS}) select 'evil', 'best model', {RUN_COLUMNS} from runs where "
    "run_uuid = :run",
)
SECOND_MODEL = (
    "insert into registered_models (name, creation_time, last_updated_time, description, workspace) values "
    "('approved-policy', 1, 1, '', 'default')",
)
VERSION = "update model_versions set "
POLICY = "update logged_models set {} where model_id = :policy"
STAGE = "update runs set {} where run_uuid = :stage"
RUN = "update runs set {} where run_uuid = :run"
METRIC = "(key, value, timestamp, step, is_nan, run_uuid) values ('ppo/reward', 9, 5, 0, 0, {})"
POINT = "where run_uuid = :stage and key = 'ppo/loss' and step = 1"
TAG = "insert into tags (key, value, run_uuid) values ({}, 'yes', {})"

ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "alias-moved": {
        "an alias moved": (ALIAS + "('champion', 1, 'synthetic-policy', 'default')",),
        "an alias removed": ('delete from registered_model_aliases',),
        "champion of a second version": (
            *FOREIGN_MODEL,
            *SECOND_VERSION,
            ALIAS + " ('champion', 2, 'synthetic-policy', 'default')",
        ),
        "champion of a version that is not there": (ALIAS + " ('champion', 9, 'synthetic-policy', 'default')",),
        "an alias of one's own": (ALIAS + " ('production', 1, 'synthetic-policy', 'default')",),
        "champion of a second registered model": (
            *SECOND_MODEL,
            ALIAS + " ('champion', 1, 'approved-policy', 'default')",
        ),
    },
    "registry-changed": {
        "the source of a version": (
            VERSION + "source = 'models:/' || (select model_id from logged_models where model_type = 'sft')",
        ),
        "a path as source": (VERSION + "source = '/evil/model'",),
        "storage location": (VERSION + "storage_location = 'file:///evil'",),
        "no storage location": (VERSION + 'storage_location = null',),
        "the run of a version": (VERSION + 'run_id = :run',),
        "status of a version": (VERSION + "status = 'FAILED_REGISTRATION'",),
        "message of a version": (VERSION + "status_message = 'approved'",),
        "author of a version": (VERSION + "user_id = 'the board'",),
        "link of a version": (VERSION + "run_link = 'http://evil'",),
        "workspace of a version": (VERSION + "workspace = 'other'",),
        "digest of a version": ("update model_version_tags set value = 'x' where key = 'xray.sha256'",),
        "address of a version": ("update model_version_tags set value = 'x' where key = 'xray.uri'",),
    },
    "registry-page-changed": {
        "page of a version": (VERSION + "description = description || ' approved'",),
        "stage of a version": (VERSION + "current_stage = 'Production'",),
        "a tag of a page removed": ("delete from model_version_tags where key = 'xray.evaluation'",),
        "a tag of ours on a version": (
            "insert into model_version_tags (key, value, name, version, workspace) values ('xray.approved', 'yes', "
            ":name, 1, 'default')",
        ),
        "page of a registered model": ("update registered_models set description = 'at will'",),
        "a tag of ours on a registered model": (
            "insert into registered_model_tags (key, value, name, workspace) values ('xray.approved', 'yes', :name, "
            "'default')",
        ),
    },
    "registry-unexplained": {
        "second version": (*FOREIGN_MODEL, *SECOND_VERSION),
        "second registered model": (*SECOND_MODEL,),
    },
    "mlflow-model-changed": {
        "a twin of the model that a version names": (
            *FOREIGN_MODEL,
            VERSION + "source = 'models:/m-evil', storage_location = 'file:///evil'",
        ),
        "a param of a model": (
            "update logged_model_params set param_value = 'x' where param_key = 'code_digest' and model_id = :policy",
        ),
        "a tag of ours on a model": (
            "insert into logged_model_tags (model_id, experiment_id, tag_key, tag_value) select model_id, "
            "experiment_id, 'xray.approved', 'yes' from logged_models where model_id = :policy",
        ),
        "artifacts of a model": (POLICY.format("artifact_location = 'file:///evil'"),),
        "name of a model": (POLICY.format("name = 'gpt'"),),
        "status of a model": (POLICY.format('status = 3'),),
        "message of a model": (POLICY.format("status_message = 'approved'"),),
        "an older record of a checkpoint with another parent": (
            *FOREIGN_MODEL,
            "update logged_model_params set param_value = '00' where model_id = 'm-evil' and param_key like 'parent.%'",
        ),
    },
    "mlflow-model-missing": {
        "identity of a model": (
            "update logged_model_params set param_value = 'ff' where param_key = 'sha256' and model_id = :policy",
        ),
        "a parent deleted": ("update logged_models set lifecycle_stage = 'deleted' where model_type = 'sft'",),
    },
    "mlflow-row-unexplained": {
        "a model of nothing": (
            *FOREIGN_MODEL,
            "update logged_model_params set param_value = 'ff' where model_id = 'm-evil'",
        ),
        "metrics of a model": (
            "insert into logged_model_metrics (model_id, metric_name, metric_timestamp_ms, metric_step, "
            "metric_value, experiment_id, run_id) select :policy, 'win rate', 1, 0, 0.99, experiment_id, :stage from "
            "logged_models where model_id = :policy",
        ),
        "a run of one's own": (*FOREIGN_RUN,),
        "a run that calls itself an import": (
            *FOREIGN_RUN,
            "insert into tags (key, value, run_uuid) values ('xray.imported', 'true', 'evil')",
            "insert into latest_metrics (key, value, timestamp, step, is_nan, run_uuid) values ('ppo/reward', 9, 5, "
            "0, 0, 'evil')",
        ),
        "an experiment of one's own": (
            "insert into experiments (name, artifact_location, lifecycle_stage, creation_time, last_update_time, "
            "workspace) values ('approved', 'file:///evil', 'active', 1, 1, 'default')",
        ),
        "artifacts of a workspace": ("update workspaces set default_artifact_root = 'file:///evil'",),
        "a webhook": (
            "insert into webhooks (webhook_id, name, url, status, creation_timestamp, last_updated_timestamp, "
            "workspace) values ('w', 'w', 'http://evil', 'ACTIVE', 1, 1, 'default')",
        ),
    },
    "mlflow-run-changed": {
        "a param of a run": ("update params set value = 'x' where key = 'lr' and run_uuid = :stage",),
        "a tag of a run": ("update tags set value = 'x' where key = 'xray.key' and run_uuid = :stage",),
        "attempts of a run": ("update tags set value = '77' where key = 'xray.attempts' and run_uuid = :stage",),
        "a tag of ours on a run": ("insert into tags (key, value, run_uuid) values ('xray.approved', 'yes', :stage)",),
        "a tag of ours on the lifecycle": (
            "insert into tags (key, value, run_uuid) values ('xray.approved', 'yes', :run)",
        ),
        "a param of the lifecycle": ("update params set value = '9' where key = 'seed' and run_uuid = :run",),
        "name of the lifecycle": (RUN.format("name = 'approved'"),),
        "status of the lifecycle": (RUN.format("status = 'FAILED'"),),
        "status of a stage": (STAGE.format("status = 'FAILED'"),),
        "artifacts of a run": (STAGE.format("artifact_uri = 's3://evil'"),),
        "artifacts of the lifecycle": (RUN.format("artifact_uri = 'file:///evil'"),),
        "user of a run": (RUN.format("user_id = 'the board'"),),
        "source of a run": (STAGE.format("source_name = 'audited.py'"),),
        "version of a run": (STAGE.format("source_version = 'abcdef'"),),
        "experiment of a run": (STAGE.format('experiment_id = 0'),),
        "source in tags": (
            "insert into tags (key, value, run_uuid) values ('mlflow.source.git.commit', 'yes', :stage)",
        ),
        "name in tags": ("update tags set value = 'approved' where key = 'mlflow.runName' and run_uuid = :stage",),
        "a run below the lifecycle": (
            *FOREIGN_RUN,
            "insert into tags (key, value, run_uuid) values ('mlflow.parentRunId', :run, 'evil'), ('mlflow.runName', "
            "'best model', 'evil'), ('xray.key', (select value from tags where run_uuid = :stage and key = "
            "'xray.key'), 'evil')",
        ),
        "name of an experiment": ("update experiments set name = 'approved' where name = 'synthetic'",),
    },
    "mlflow-run-deleted": {
        "a stage's run deleted": (STAGE.format("lifecycle_stage = 'deleted'"),),
        "the lifecycle's run deleted": (RUN.format("lifecycle_stage = 'deleted'"),),
        "an experiment deleted": ("update experiments set lifecycle_stage = 'deleted'",),
    },
    "mlflow-run-missing": {
        "the lifecycle's run removed": (
            'delete from tags where run_uuid = :run',
            'delete from params where run_uuid = :run',
            'delete from runs where run_uuid = :run',
        ),
    },
    "log-shorter": {
        "the log's mark": ("update tags set value = replace(value, ':', ':9') where key = 'xray.log'",),
        "the log's mark on a version": (
            "update model_version_tags set value = replace(value, ':', ':9') where key = 'xray.log'",
        ),
    },
    "mlflow-location-changed": {
        "artifacts of an experiment": (
            "update experiments set artifact_location = 'file:///evil' where name = 'synthetic'",
        ),
    },
    "mlflow-metric-changed": {
        "a number of the evaluation": ("update latest_metrics set value = value + 0.1 where key = 'evaluate/kl'",),
        "a value of a history": (
            "update metrics set value = 9 where run_uuid = :stage and key = 'ppo/loss' and step = 1",
        ),
        "a step of a history": (
            "update metrics set step = 7 where run_uuid = :stage and key = 'ppo/loss' and step = 1",
        ),
        "a time of a history": (
            "update metrics set timestamp = 77 where run_uuid = :stage and key = 'ppo/loss' and step = 1",
        ),
        "a point removed": ("delete from metrics where run_uuid = :stage and key = 'ppo/loss' and step = 1",),
        "a metric added": (
            "insert into metrics (key, value, timestamp, step, is_nan, run_uuid) values ('ppo/reward', 9, 5, 0, 0, "
            ":stage)",
            "insert into latest_metrics (key, value, timestamp, step, is_nan, run_uuid) values ('ppo/reward', 9, 5, "
            "0, 0, :stage)",
        ),
        "latest value": ("update latest_metrics set value = 9 where run_uuid = :stage and key = 'ppo/loss'",),
        "latest step": ("update latest_metrics set step = 99 where run_uuid = :stage and key = 'ppo/loss'",),
        "no latest value": ("delete from latest_metrics where run_uuid = :stage and key = 'ppo/loss'",),
        "latest value of a lifecycle": (
            "insert into latest_metrics (key, value, timestamp, step, is_nan, run_uuid) values ('ppo/reward', 9, 5, "
            "0, 0, :run)",
        ),
    },
    "mlflow-input-added": {
        "a late input": (
            "insert into inputs values ('late', 'RUN_INPUT', (select source_run_id from logged_models where "
            "model_type = 'sft'), 'MODEL_INPUT', :policy, 0)",
        ),
        "step of an output": ("update inputs set step = 9 where source_type = 'RUN_OUTPUT' and source_id = :stage",),
        "an output of another run": (
            "insert into inputs values ('evil', 'RUN_OUTPUT', (select run_uuid from runs where name = 'sft'), "
            "'MODEL_OUTPUT', :policy, 1)",
        ),
        "an input of an unknown kind": (
            "insert into inputs values ('evil', 'APPROVED_BY', :stage, 'MODEL_INPUT', :policy, 0)",
        ),
        "context of a dataset": ("update input_tags set value = 'evaluation' where name = 'mlflow.data.context'",),
        "a tag of an input": (
            "insert into input_tags select input_uuid, 'licence', 'MIT' from inputs where source_type = 'DATASET'",
        ),
    },
    "mlflow-input-missing": {
        "an input removed": ("delete from inputs where source_type = 'RUN_INPUT' and source_id = :stage",),
    },
    "mlflow-dataset-changed": {
        "digest of a dataset": ("update datasets set digest = 'x'",),
        "digest of an input": ("update input_tags set value = 'x' where name = 'xray.sha256'",),
        "name of a dataset": ("update datasets set name = 'licensed'",),
        "source of a dataset": ('update datasets set dataset_source = \'{"uri": "/evil"}\'',),
        "schema of a dataset": ("update datasets set dataset_schema = '{}'",),
    },
    "tracking-unknown": {
        "a table": ('create table approvals (name text)',),
        "a column": ('alter table model_versions add column approved text',),
        "a view": ('create view approved as select * from runs',),
        "a trigger": (
            "create trigger moved after update on registered_model_aliases begin update model_versions set "
            "storage_location = 'file:///evil'; end",
        ),
    },
}  # fmt: skip
"""Code that must be found → name → statements."""

NOT_COVERED: dict[str, Change] = {
    "logs and caches": lambda output: (output / "digests.sqlite").write_bytes(b"x"),
    "notes and tags of people": lambda output: sql(
        output, TAG.format("'mlflow.note.content'", ":stage"), TAG.format("'team'", ":run")
    ),
    "metrics of the lifecycle": lambda output: sql(
        output, *(f"insert into {table} {METRIC.format(':run')}" for table in ("metrics", "latest_metrics"))
    ),
}  # fmt: skip
"""What docs/lineage.md says no audit looks at."""
