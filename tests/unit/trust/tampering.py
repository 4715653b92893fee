"""Faults that an intruder puts into an output directory, one of each kind, with the findings that must name it.

`FAULTS` change files; `ROWS` write past MLflow into its database. In the statements, `:policy` is the registered
checkpoint's LoggedModel, `:stage` its run, `:run` the run of the lifecycle and `:name` the registered model.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from tests.unit.trust.long_logs import read_lines
from tests.unit.trust.synthetic import NAME, Lifecycle
from xray_runtime.data.ledger import LedgerShard, read_shard
from xray_runtime.data.pairs import pairs_of, write_pairs
from xray_runtime.kernel.evidence.envelope import PAYLOAD_TYPE, load_signer, new_private_key
from xray_runtime.kernel.evidence.log import END, LOG
from xray_runtime.kernel.evidence.view import RunBegan
from xray_runtime.kernel.store.manifest import ATTESTATION, MANIFEST, SIGNATURE
from xray_runtime.trust.audit.mlflow_schema import COMPARED
from xray_runtime.trust.keys import rotate
from xray_runtime.trust.log import append
from xray_runtime.trust.note import LogCheckpoint
from xray_runtime.trust.signing import read_public, signing_key

Change = Callable[[Path], object]
FAULTS: dict[str, tuple[Change, str]] = {}
"""Name → (change, codes of which one must be found)."""


def _by_code(changes: dict[str, dict[str, Change]]) -> dict[str, tuple[Change, str]]:
    return {name: (change, codes) for codes, named in changes.items() for name, change in named.items()}


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
    signer: CryptoSigner = load_signer(private)
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
FAULTS |= _by_code(
    {
        "file-changed": {"a bit of a file": lambda output: flip(place(output, "sft-*/model.safetensors"))},
        DAMAGED: {"a bit of a manifest": lambda output: flip(place(output, f"sft-*/{MANIFEST}"))},
        "card-changed": {"a bit of a card": lambda output: flip(place(output, "ppo-2-*/README.md"))},
        "card-missing": {"a card removed": lambda output: place(output, "sft-*/README.md").unlink()},
        "file-missing": {"a file removed": lambda output: place(output, "prepare-*/train.arrow").unlink()},
        "file-added": {
            "a file added": lambda output: (place(output, "sft-*") / ".gitignore").write_text("x"),
            "a file in a record": lambda output: (place(output, f"sft-*/{ATTESTATION}") / "x").touch(),
        },
        "parent-missing": {"a checkpoint removed": lambda output: shutil.rmtree(place(output, "sft-*"))},
        "signature-invalid": {
            "a bit of a statement": lambda output: restated(place(output, "ppo-2-*"), _elsewhere, None),
            "a card in a record changed": lambda output: flip(place(output, f"evaluate-*/{ATTESTATION}/card.md")),
            "a card in a record removed": lambda output: place(output, f"evaluate-*/{ATTESTATION}/card.md").unlink(),
            "changes of code that nobody signed": lambda output: (
                place(output, f"sft-*/{ATTESTATION}") / "code.diff"
            ).write_text("+ better"),
            "a model signature of another model": lambda output: shutil.copy(
                place(output, f"ppo-1-*/{SIGNATURE}"), place(output, f"sft-*/{SIGNATURE}")
            ),
        },
        "statement-contradicts": {
            "the statement of another stage": lambda output: shutil.copy(
                place(output, f"sft-*/{ATTESTATION}/statement.json"),
                place(output, f"ppo-2-*/{ATTESTATION}/statement.json"),
            ),
            "the statement of another run, with the key": lambda output: restated(
                place(output, "prepare-*"), _elsewhere, signing_key(output).read_bytes()
            ),
        },
        "signature-foreign": {
            "a statement by a stranger": lambda output: restated(
                place(output, "ppo-2-*"), _elsewhere, new_private_key()
            )
        },
        "mlflow-model-changed": {
            "a statement signed again with the key": lambda output: restated(
                place(output, "ppo-2-*"), _elsewhere, signing_key(output).read_bytes()
            ),
            "a statement dated back by a retired key": lambda output: restated(
                place(output, "sft-*"), _finished("2020-01-01T00:00:00+00:00"), rotated(output)
            ),
        },
        "signature-retired": {
            "a statement by a retired key": lambda output: restated(
                place(output, "sft-*"), _finished("2099-01-01T00:00:00+00:00"), rotated(output)
            )
        },
        "signature-missing": {
            "no signature": lambda output: edit_json(
                place(output, f"sft-*/{ATTESTATION}/statement.json"), signatures=[]
            ),
            "no model signature": lambda output: place(output, f"sft-*/{SIGNATURE}").unlink(),
        },
        "statement-missing": {"no record": lambda output: shutil.rmtree(place(output, f"sft-*/{ATTESTATION}"))},
        "statement-malformed": {
            "a statement of an older format": lambda output: place(
                output, f"sft-*/{ATTESTATION}/statement.json"
            ).write_text('{"_type": "x"}')
        },
        "signature-malformed": {
            "a model signature of nothing": lambda output: place(output, f"sft-*/{SIGNATURE}").write_text("{}")
        },
    }
)


def _signed_model(output: Path, private: bytes, change: Callable[[Any], object]) -> None:
    """Sign the model `sft` again with `model_signing`'s format."""
    path = place(output, f"sft-*/{SIGNATURE}")
    bundle = json.loads(path.read_text())
    content = payload_of(json.dumps(bundle["dsseEnvelope"]).encode())
    change(content["predicate"])
    envelope = json.loads(signed(content, private))
    bundle["verificationMaterial"]["publicKey"]["hint"] = envelope["signatures"][0].pop("keyid")
    path.write_text(json.dumps(bundle | {"dsseEnvelope": envelope}))


FAULTS |= _by_code(
    {
        "signature-foreign": {
            "a model signed by a stranger": lambda output: _signed_model(output, new_private_key(), lambda _: None)
        },
        "signature-invalid": {
            "a model signature over fewer files": lambda output: _signed_model(
                output, signing_key(output).read_bytes(), lambda model: model["resources"].pop()
            ),
            "a model signature that leaves out the weights": lambda output: _signed_model(
                output,
                signing_key(output).read_bytes(),
                lambda model: model["serialization"]["ignore_paths"].append("model.safetensors"),
            ),
        },
    }
)


@fault("file-changed")
def a_token_of_a_ledger(output: Path) -> None:
    path = place(output, "ppo-2-*/ledger/000001.parquet")
    shard = read_shard(path)
    replies = shard.table["reply_ids"].to_pylist()
    replies[0][0] += 1
    column, field = shard.table.schema.get_field_index("reply_ids"), shard.table.schema.field("reply_ids")
    table = shard.table.set_column(column, field, pa.array(replies, field.type))
    LedgerShard(shard.iteration, shard.policy, table).write(path.parent)


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


FAULTS |= _by_code(
    {
        "rotation-broken": {
            "a retired key removed": lambda output: _retired(output, ".pub").unlink(),
            "the record of a rotation removed": lambda output: _retired(output, ".json").unlink(),
            "a retired key replaced": lambda output: _retired(output, ".pub").write_bytes(b"no key"),
        },
        "key-exposed": {
            "a key that others can read": lambda output: (output / "keys/signing.pem").chmod(416),
            "keys that others can replace": lambda output: (output / "keys").chmod(511),
        },
    }
)


@fault("key-exposed")
def a_key_that_is_a_link(output: Path) -> None:
    shutil.move(output / "keys" / "signing.pem", output / "locks" / "kept.pem")
    (output / "keys" / "signing.pem").symlink_to(output / "locks" / "kept.pem")


# The log

ALIAS = "insert into registered_model_aliases (alias, version, name, workspace) values "
ALIAS_BY_HAND = f"{ALIAS} ('champion', 1, '{NAME}', 'default')"

FAULTS |= _by_code(
    {
        "log-missing": {"the log removed": lambda output: (output / LOG).unlink()},
        "alias-moved": {
            "the log removed and an alias put by hand": lambda output: (
                (output / LOG).unlink(),
                sql(output, ALIAS_BY_HAND),
            )
        },
        "log-shorter": {
            "the last entry removed": lambda output: write_lines(output, lines(output)[:-1]),
            "several entries removed": lambda output: write_lines(output, lines(output)[:-5]),
            "the end of the log removed": lambda output: (output / END).unlink(),
            "an entry in the place of the end": lambda output: (output / END).write_bytes(lines(output)[-1]),
            "an end by a stranger": lambda output: (output / END).write_text(
                str(replace(LogCheckpoint.parse((output / END).read_text()), signatures=()).signed(new_private_key()))
            ),
        },
        "log-broken": {
            "an entry taken out": lambda output: write_lines(output, lines(output)[:3] + lines(output)[4:]),
            "two entries swapped": lambda output: write_lines(output, [*lines(output)[1::-1], *lines(output)[2:]]),
            "a bit of the log": lambda output: flip(output / LOG),
            "no JSON in the log": lambda output: write_lines(output, [*lines(output), b"approved\n"]),
            "an entry again": lambda output: write_lines(output, [*lines(output), lines(output)[0]]),
            "an entry by a stranger": lambda output: write_lines(
                output, [*lines(output)[:-1], signed(payload_of(lines(output)[-1]), new_private_key())]
            ),
        },
    }
)


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


FAULTS |= _by_code(
    {
        "record-differs": {"a number of the record": lambda output: _record(output, evaluation={"win_rate": 0.99})},
        "run-changed": {
            "a run made to look at work": lambda output: _record(output, status="running", seed=9),
            "facts of a run that was cut short": lambda output: (_began(output), _record(output, seed=9)),
            "the report beside a run that was cut short": lambda output: (
                _began(output),
                (output / "report.html").write_text("win rate 0.99"),
            ),
            "the numbers of a report": lambda output: (output / "report.html").write_text("0.99"),
            "a record removed": lambda output: (output / "lifecycle.json").unlink(),
            "the config": lambda output: flip(output / "config.yaml"),
            "a script in a page": lambda output: _page(output).write_text("<script>alert(1)</script>"),
            "a result": lambda output: edit_json(next(iter((output / "results").iterdir())), seconds=0.1),
            "a metric on disk": lambda output: flip(next(output.glob("records/ppo-2-*/metrics.jsonl"))),
            "a figure removed": lambda output: next(output.glob("records/ppo-2-*/training.svg")).unlink(),
            "an artifact": lambda output: flip(_artifact(output)),
            "an artifact removed": lambda output: _artifact(output).unlink(),
        },
        "file-unsigned": {
            "a page added": lambda output: _page(output).with_name("approved.html").write_text("x"),
            "a figure added": lambda output: (next(output.glob("records/ppo-2-*")) / "b.png").touch(),
            "an artifact added": lambda output: _artifact(output).with_name("approval.json").touch(),
        },
        "file-unknown": {"a file in the root": lambda output: (output / "approval.pdf").write_text("x")},
        "tracking-missing": {"mlflow removed": lambda output: (output / "mlflow.db").unlink()},
        "log-missing": {
            "mlflow and the log removed": lambda output: ((output / "mlflow.db").unlink(), (output / LOG).unlink())
        },
    }
)


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


IN_MLFLOW = {
    *("a statement signed again with the key", "a statement dated back by a retired key", "an artifact"),
    *("the newest checkpoint removed from everywhere", "the log removed and an alias put by hand"),
    *("the newest entries taken off with what they were about", "an artifact removed", "an artifact added"),
    *("mlflow removed", "mlflow and the log removed", "another mlflow", "a decision rewritten"),
    *("facts of a run that was cut short", "the report beside a run that was cut short"),
}
"""Faults that MLflow shows, or in what only a run with MLflow leaves: files, a decision, the entry that it began."""


# Rows of MLflow


def _all(table: str, columns: str, where: str, **other: str) -> str:
    """Copy a row, with other values in some columns."""
    names = [*other, *columns.split()]
    return f"insert into {table} ({', '.join(names)}) select {', '.join([*other.values(), *columns.split()])} {where}"


def _row(table: str, **values: str) -> str:
    return f"insert into {table} ({', '.join(values)}) values ({', '.join(values.values())})"


def _updates(table: str, *changes: str, where: str = "") -> list[tuple[str]]:
    """A statement each; what stands behind a `|` narrows it."""
    split = [change.partition(" | ") for change in changes]
    return [(f"update {table} set {change} {f'where {narrow}' if narrow else where}",) for change, _, narrow in split]


FOREIGN_MODEL = (
    _all(
        "logged_models",
        COMPARED["logged_models"].replace("model_id ", ""),
        "from logged_models where model_id = :policy",
        model_id="'m-evil'",
    ),
    "update logged_models set artifact_location = 'file:///evil' where model_id = 'm-evil'",
    _all(
        "logged_model_params",
        "experiment_id param_key param_value",
        "from logged_model_params where model_id = :policy",
        model_id="'m-evil'",
    ),
)
VERSION_COLUMNS = re.sub(r"\b(version|source|storage_location) ", "", COMPARED["model_versions"])
SECOND_VERSION = _all(
    "model_versions",
    VERSION_COLUMNS,
    "from model_versions",
    version="2",
    source="'models:/m-evil'",
    storage_location="'file:///evil'",
)
RUN_COLUMNS = COMPARED["runs"].replace("run_uuid name ", "")
FOREIGN_RUN = _all("runs", RUN_COLUMNS, "from runs where run_uuid = :run", run_uuid="'evil'", name="'best model'")
SECOND_MODEL = _row(
    "registered_models", name="'approved-policy'", creation_time="1", last_updated_time="1", workspace="'default'"
)
POLICY, STAGE, RUN = "where model_id = :policy", "where run_uuid = :stage", "where run_uuid = :run"
POINT = f"{STAGE} and key = 'ppo/loss' and step = 1"


def _alias(alias: str, version: int, name: str = NAME) -> str:
    return f"{ALIAS} ('{alias}', {version}, '{name}', 'default')"


def _tag(key: str, run: str) -> str:
    return _row("tags", key=f"'{key}'", value="'yes'", run_uuid=run)


def _metric(run: str, *tables: str) -> tuple[str, ...]:
    values = {"key": "'ppo/reward'", "value": "9", "timestamp": "5", "step": "0", "is_nan": "0", "run_uuid": run}
    return tuple(_row(table, **values) for table in tables)


def _input(uuid: str, source: str, source_id: str, kind: str, step: int) -> str:
    return f"insert into inputs values ('{uuid}', '{source}', {source_id}, '{kind}', :policy, {step})"


def _sft(column: str) -> str:
    return f"(select {column} from logged_models where model_type = 'sft')"


OF_RUN = "input_uuid in (select input_uuid from inputs where destination_id = :run)"

ROWS: dict[str, list[tuple[str, ...]]] = {
    "alias-moved": [
        (ALIAS_BY_HAND,),
        ("delete from registered_model_aliases",),
        (*FOREIGN_MODEL, SECOND_VERSION, _alias("champion", 2)),
        (_alias("champion", 9),),
        (_alias("production", 1),),
        (SECOND_MODEL, _alias("champion", 1, "approved-policy")),
    ],
    "registry-changed": [
        *_updates("model_versions", f"source = 'models:/' || {_sft('model_id')}"),
        *_updates("model_versions", "source = '/evil/model'", "storage_location = 'file:///evil'"),
        *_updates("model_versions", "storage_location = null", "run_id = :run", "status = 'FAILED_REGISTRATION'"),
        *_updates("model_versions", "status_message = 'approved'", "user_id = 'the board'", "workspace = 'other'"),
        *_updates("model_versions", "run_link = 'http://evil'"),
        *_updates("model_version_tags", "value = 'x' | key = 'xray.sha256'", "value = 'x' | key = 'xray.uri'"),
    ],
    "registry-unexplained": [(*FOREIGN_MODEL, SECOND_VERSION), (SECOND_MODEL,)],
    "mlflow-model-changed": [
        # A twin of the model that a version names.
        (*FOREIGN_MODEL, "update model_versions set source = 'models:/m-evil', storage_location = 'file:///evil'"),
        *_updates("logged_model_params", "param_value = 'x' | param_key = 'code_digest' and model_id = :policy"),
        (
            "insert into logged_model_tags (model_id, experiment_id, tag_key, tag_value) select model_id, "
            f"experiment_id, 'xray.approved', 'yes' from logged_models {POLICY}",
        ),
        *_updates("logged_models", "artifact_location = 'file:///evil'", "name = 'gpt'", "status = 3", where=POLICY),
        *_updates("logged_models", "status_message = 'approved'", where=POLICY),
        # An older record of a checkpoint, with another parent.
        (
            *FOREIGN_MODEL,
            "update logged_model_params set param_value = '00' where model_id = 'm-evil' and param_key like 'parent.%'",
        ),
    ],
    "mlflow-model-missing": [
        *_updates("logged_model_params", "param_value = 'ff' | param_key = 'sha256' and model_id = :policy"),
        *_updates("logged_models", "lifecycle_stage = 'deleted' | model_type = 'sft'"),
    ],
    "mlflow-row-unexplained": [
        (*FOREIGN_MODEL, "update logged_model_params set param_value = 'ff' where model_id = 'm-evil'"),
        (
            "insert into logged_model_metrics (model_id, metric_name, metric_timestamp_ms, metric_step, "
            "metric_value, experiment_id, run_id) select :policy, 'win rate', 1, 0, 0.99, experiment_id, :stage from "
            f"logged_models {POLICY}",
        ),
        (FOREIGN_RUN,),
        (FOREIGN_RUN, _tag("xray.imported", "'evil'"), *_metric("'evil'", "latest_metrics")),
        (
            "insert into experiments (name, artifact_location, lifecycle_stage, creation_time, last_update_time, "
            "workspace) values ('approved', 'file:///evil', 'active', 1, 1, 'default')",
        ),
        *_updates("workspaces", "default_artifact_root = 'file:///evil'"),
        (
            "insert into webhooks (webhook_id, name, url, status, creation_timestamp, last_updated_timestamp, "
            "workspace) values ('w', 'w', 'http://evil', 'ACTIVE', 1, 1, 'default')",
        ),
    ],
    "mlflow-run-changed": [
        *_updates(
            "params", "value = 'x' | key = 'lr' and run_uuid = :stage", "value = '9' | key = 'seed' and run_uuid = :run"
        ),
        *_updates("tags", "value = 'x' | key = 'xray.key' and run_uuid = :stage"),
        *_updates("tags", "value = '77' | key = 'xray.attempts' and run_uuid = :stage"),
        *_updates("tags", "value = 'approved' | key = 'mlflow.runName' and run_uuid = :stage"),
        (_tag("xray.approved", ":stage"),),
        (_tag("xray.approved", ":run"),),
        (_tag("mlflow.source.git.commit", ":stage"),),
        *_updates("runs", "name = 'approved'", "status = 'FAILED'", "user_id = 'the board'", where=RUN),
        *_updates("runs", "artifact_uri = 'file:///evil'", where=RUN),
        *_updates("runs", "status = 'FAILED'", "artifact_uri = 's3://evil'", "experiment_id = 0", where=STAGE),
        *_updates("runs", "source_name = 'audited.py'", "source_version = 'abcdef'", where=STAGE),
        (
            FOREIGN_RUN,
            "insert into tags (key, value, run_uuid) values ('mlflow.parentRunId', :run, 'evil'), ('mlflow.runName', "
            "'best model', 'evil'), ('xray.key', (select value from tags where run_uuid = :stage and key = "
            "'xray.key'), 'evil')",
        ),
        *_updates("experiments", "name = 'approved' | name = 'synthetic'"),
    ],
    "mlflow-run-deleted": [
        *(_updates("runs", "lifecycle_stage = 'deleted'", where=where)[0] for where in (STAGE, RUN)),
        *_updates("experiments", "lifecycle_stage = 'deleted'"),
    ],
    "mlflow-run-missing": [tuple(f"delete from {table} {RUN}" for table in ("tags", "params", "runs"))],
    "log-shorter": [
        *_updates("tags", "value = replace(value, ':', ':9') | key = 'xray.log'"),
        *_updates("model_version_tags", "value = replace(value, ':', ':9') | key = 'xray.log'"),
    ],
    "mlflow-location-changed": _updates("experiments", "artifact_location = 'file:///evil' | name = 'synthetic'"),
    "mlflow-metric-changed": [
        *_updates("latest_metrics", "value = value + 0.1 | key = 'evaluate/kl'"),
        *_updates("metrics", "value = 9", "step = 7", "timestamp = 77", where=POINT),
        (f"delete from metrics {POINT}",),
        _metric(":stage", "metrics", "latest_metrics"),
        *_updates("latest_metrics", "value = 9", "step = 99", where=f"{STAGE} and key = 'ppo/loss'"),
        (f"delete from latest_metrics {STAGE} and key = 'ppo/loss'",),
        _metric(":run", "latest_metrics"),
    ],
    "mlflow-input-added": [
        (_input("late", "RUN_INPUT", _sft("source_run_id"), "MODEL_INPUT", 0),),
        *_updates("inputs", "step = 9 | source_type = 'RUN_OUTPUT' and source_id = :stage"),
        (_input("evil", "RUN_OUTPUT", _sft("source_run_id"), "MODEL_OUTPUT", 1),),
        (_input("evil", "APPROVED_BY", ":stage", "MODEL_INPUT", 0),),
        (_input("evil", "RUN_INPUT", ":run", "MODEL_INPUT", 0),),
        (f"update input_tags set value = 'training' where name = 'mlflow.data.context' and {OF_RUN}",),
        *_updates("input_tags", "value = 'evaluation' | name = 'mlflow.data.context'"),
        ("insert into input_tags select input_uuid, 'licence', 'MIT' from inputs where source_type = 'DATASET'",),
    ],
    "mlflow-input-missing": [("delete from inputs where source_type = 'RUN_INPUT' and source_id = :stage",)],
    "mlflow-dataset-changed": [
        (f"update input_tags set value = 'x' where name = 'xray.sha256' and {OF_RUN}",),
        *_updates("datasets", "digest = 'x'", "name = 'licensed'", 'dataset_source = \'{"uri": "/evil"}\''),
        *_updates("datasets", "dataset_schema = '{}'"),
        *_updates("input_tags", "value = 'x' | name = 'xray.sha256'"),
    ],
    "tracking-unknown": [
        ("create table approvals (name text)",),
        ("alter table model_versions add column approved text",),
        ("create view approved as select * from runs",),
        (
            "create trigger moved after update on registered_model_aliases begin update model_versions set "
            "storage_location = 'file:///evil'; end",
        ),
    ],
}
"""Code that must be found → statements, some at a time."""

NOT_COVERED: dict[str, Change] = {
    "logs and caches": lambda output: (output / "digests.sqlite").write_bytes(b"x"),
    "notes and tags of people": lambda output: sql(output, _tag("mlflow.note.content", ":stage"), _tag("team", ":run")),
    "metrics of the lifecycle": lambda output: sql(output, *_metric(":run", "metrics", "latest_metrics")),
}
"""What docs/lineage.md says no audit looks at."""
