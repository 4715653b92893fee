"""Ways to falsify a store and its MLflow, each with the codes of which one must be found."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.unit.trust.synthetic import ALIAS, NAME
from xray_runtime.data.ledger import Shard, read_shard
from xray_runtime.data.pairs import pairs_of, write_pairs
from xray_runtime.kernel.evidence.log import LOG
from xray_runtime.kernel.store.manifest import ATTESTATION, MANIFEST, SIGNATURE
from xray_runtime.trust.keys import rotate
from xray_runtime.trust.signing import PAYLOAD_TYPE, envelope, fingerprint, make_key, sign, signing_key

Tampering = Callable[[random.Random, Path], set[str]]

CASES: dict[str, Tampering] = {}

SIGNED = {"signature-invalid", "signature-malformed", "signature-foreign", "signature-missing"}
MANIFEST_CODES = {
    "manifest-malformed",
    "manifest-inconsistent",
    "statement-contradicts",
    "file-missing",
    "unsafe-path",
    "file-changed",
}


def case(function: Tampering) -> Tampering:
    CASES[function.__name__] = function
    return function


def checkpoints(output: Path) -> list[Path]:
    return sorted((output / "checkpoints").iterdir())


def payload(directory: Path) -> list[Path]:
    """The files a manifest lists."""
    names = [entry["path"] for entry in json.loads((directory / MANIFEST).read_text())["files"]]
    return [directory / name for name in sorted(names)]


def flip(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def sql(output: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(output / "mlflow.db") as database:
        changed = database.execute(statement, values).rowcount
        assert changed, statement
    database.close()


def rows(output: Path, query: str, *values: object) -> list[tuple]:
    with sqlite3.connect(output / "mlflow.db") as database:
        found = database.execute(query, values).fetchall()
    database.close()
    return found


@case
def a_bit_of_a_file(rng: random.Random, output: Path) -> set[str]:
    flip(rng, rng.choice(payload(rng.choice(checkpoints(output)))))
    return {"file-changed"}


@case
def a_token_of_a_ledger(rng: random.Random, output: Path) -> set[str]:
    path = rng.choice(sorted(output.glob("checkpoints/ppo-*/ledger/*")))
    shard = read_shard(path)
    replies = shard.table["reply_ids"].to_pylist()
    rng.choice(replies)[0] += 1
    place, field = shard.table.schema.get_field_index("reply_ids"), shard.table.schema.field("reply_ids")
    table = shard.table.set_column(place, field, pa.array(replies, field.type))
    Shard(shard.iteration, shard.policy, table).write(path.parent)
    return {"file-changed"}


@case
def a_bit_of_a_manifest(rng: random.Random, output: Path) -> set[str]:
    flip(rng, rng.choice(checkpoints(output)) / MANIFEST)
    return MANIFEST_CODES


@case
def a_bit_of_a_statement(rng: random.Random, output: Path) -> set[str]:
    flip(rng, rng.choice(checkpoints(output)) / ATTESTATION / "statement.json")
    return {"signature-invalid"}


@case
def a_bit_of_a_signature(rng: random.Random, output: Path) -> set[str]:
    path = rng.choice(checkpoints(output)) / SIGNATURE
    bundle = json.loads(path.read_text())
    envelope = bundle["dsseEnvelope"]
    where, name = rng.choice([(envelope, "payload"), (envelope["signatures"][0], "sig")])
    text = list(where[name])
    # The last digits of base64 may hold no bits of the value.
    place = rng.randrange(len(text) - 8)
    text[place] = "A" if text[place] != "A" else "B"
    where[name] = "".join(text)
    path.write_text(json.dumps(bundle))
    return SIGNED


@case
def a_bit_of_a_card(rng: random.Random, output: Path) -> set[str]:
    flip(rng, rng.choice(sorted(output.glob("checkpoints/*/README.md"))))
    return {"card-changed"}


@case
def a_card_removed(rng: random.Random, output: Path) -> set[str]:
    rng.choice(sorted(output.glob("checkpoints/*/README.md"))).unlink()
    return {"card-missing"}


@case
def a_file_added(rng: random.Random, output: Path) -> set[str]:
    folder = rng.choice(["", "extra", ATTESTATION, f"{ATTESTATION}/deep"])
    path = rng.choice(checkpoints(output)) / folder / rng.choice(["x.bin", ".gitignore", ".git"])
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    return {"file-added"}


@case
def a_file_removed(rng: random.Random, output: Path) -> set[str]:
    rng.choice(payload(rng.choice(checkpoints(output)))).unlink()
    return {"file-missing"}


@case
def a_file_of_another_checkpoint(rng: random.Random, output: Path) -> set[str]:
    a, b = rng.sample(sorted(output.glob("checkpoints/*/model.safetensors")), 2)
    shutil.copy(a, b)
    return {"file-changed"}


@case
def a_file_made_a_link(rng: random.Random, output: Path) -> set[str]:
    path = rng.choice(payload(rng.choice(checkpoints(output))))
    elsewhere = output / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return {"file-link"}


@case
def checkpoints_swapped(rng: random.Random, output: Path) -> set[str]:
    a, b = rng.sample(checkpoints(output), 2)
    aside = output / "aside"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)
    return {"misplaced"}


@case
def a_checkpoint_removed(rng: random.Random, output: Path) -> set[str]:
    shutil.rmtree(rng.choice(checkpoints(output)))
    return {"parent-missing", "checkpoint-missing"}


@case
def a_parent_rewritten(rng: random.Random, output: Path) -> set[str]:
    place = rng.choice([p for p in checkpoints(output) if json.loads((p / MANIFEST).read_text())["parents"]])
    content = json.loads((place / MANIFEST).read_text())
    role = rng.choice(sorted(content["parents"]))
    content["parents"][role] = rng.randbytes(32).hex()
    (place / MANIFEST).write_text(json.dumps(content))
    return {"manifest-inconsistent"}


@case
def a_config_value_rewritten(rng: random.Random, output: Path) -> set[str]:
    place = rng.choice(checkpoints(output))
    content = json.loads((place / MANIFEST).read_text())
    content["config"]["lr"] = 99
    (place / MANIFEST).write_text(json.dumps(content))
    return {"manifest-inconsistent"}


@case
def a_statement_rewritten(rng: random.Random, output: Path) -> set[str]:
    path = rng.choice(checkpoints(output)) / ATTESTATION / "statement.json"
    content = json.loads(path.read_text())
    content["predicate"]["runDetails"]["xray_run"]["trigger"] = {"kind": "schedule", "by": "nobody"}
    path.write_text(json.dumps(content))
    return {"signature-invalid"}


@case
def a_statement_signed_with_another_key(rng: random.Random, output: Path) -> set[str]:
    place = rng.choice(checkpoints(output))
    path = place / ATTESTATION / "statement.json"
    content = json.loads(path.read_text())
    content["predicate"]["buildDefinition"]["internalParameters"]["environment"]["host"] = "elsewhere"
    path.write_text(json.dumps(content))
    sign(place / ATTESTATION, place / SIGNATURE, signing_key(output / "intruder"))
    shutil.rmtree(output / "intruder")
    return {"signature-foreign"}


@case
def a_statement_signed_again_with_the_key(rng: random.Random, output: Path) -> set[str]:
    """Who has the key can sign anything; MLflow still knows the first statement."""
    place = rng.choice(checkpoints(output))
    path = place / ATTESTATION / "statement.json"
    content = json.loads(path.read_text())
    content["predicate"]["buildDefinition"]["internalParameters"]["environment"]["host"] = "elsewhere"
    path.write_text(json.dumps(content))
    sign(place / ATTESTATION, place / SIGNATURE, signing_key(output))
    return {"mlflow-model-changed"}


@case
def a_statement_of_another_checkpoint(rng: random.Random, output: Path) -> set[str]:
    a, b = rng.sample(checkpoints(output), 2)
    shutil.rmtree(b / ATTESTATION)
    shutil.copytree(a / ATTESTATION, b / ATTESTATION)
    shutil.copy(a / SIGNATURE, b / SIGNATURE)
    return {"statement-contradicts"}


@case
def a_record_removed(rng: random.Random, output: Path) -> set[str]:
    place = rng.choice(checkpoints(output))
    if rng.random() < 0.5:
        (place / SIGNATURE).unlink()
        return {"signature-missing"}
    shutil.rmtree(place / ATTESTATION)
    return {"statement-missing"}


@case
def a_pair_of_a_dataset(rng: random.Random, output: Path) -> set[str]:
    path = rng.choice(sorted(output.glob("checkpoints/*/train.arrow")))
    pairs: Any = pairs_of(path)
    left = list(pairs)
    of = type(left.pop(rng.randrange(len(left))))
    write_pairs(path, of, left)
    return {"file-changed"}


@case
def the_public_key_replaced(rng: random.Random, output: Path) -> set[str]:
    signing_key(output / "intruder")
    shutil.copy(output / "intruder" / "keys" / "signing.pub", output / "keys" / "signing.pub")
    shutil.rmtree(output / "intruder")
    return {"signature-foreign"}


def _signed_by(key: bytes, place: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the statement in `place` and sign it with a private key one has kept."""
    path = place / ATTESTATION / "statement.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    private = place.parent.parent / "kept.pem"
    private.write_bytes(key)
    sign(place / ATTESTATION, place / SIGNATURE, private)
    private.unlink()


@case
def a_statement_signed_with_a_retired_key(rng: random.Random, output: Path) -> set[str]:
    """…after it was retired, which the statement says; or before, as it claims: then MLflow knows better."""
    old = signing_key(output).read_bytes()
    rotate(output, by="a person", note="")
    later = rng.random() < 0.5
    finished = "2099-01-01T00:00:00+00:00" if later else "2020-01-01T00:00:00+00:00"
    metadata = {"finishedOn": finished}
    change = lambda content: content["predicate"]["runDetails"]["metadata"].update(metadata)  # noqa: E731
    _signed_by(old, rng.choice(checkpoints(output)), change)
    return {"signature-retired"} if later else {"mlflow-model-changed"}


@case
def a_foreign_signature_after_a_rotation(rng: random.Random, output: Path) -> set[str]:
    rotate(output, by="a person", note="")
    if rng.random() < 0.5:
        # The intruder's key lies among the retired ones, without a record that the owner signed.
        intruder = signing_key(output / "intruder").parent / "signing.pub"
        shutil.copy(intruder, output / "keys" / "retired" / f"{fingerprint(intruder)[:16]}.pub")
        shutil.copy(intruder.with_name("signing.pem"), output / "intruder.pem")
        shutil.rmtree(output / "intruder")
    else:
        make_key(output / "intruder.pem")
    key = (output / "intruder.pem").read_bytes()
    (output / "intruder.pem").unlink()
    _signed_by(key, rng.choice(checkpoints(output)), lambda content: None)
    return {"signature-foreign"}


@case
def a_rotation_rewritten_or_removed(rng: random.Random, output: Path) -> set[str]:
    rotate(output, by="a person", note="")
    path = rng.choice(sorted((output / "keys" / "retired").iterdir()))
    if rng.random() < 0.5:
        path.unlink()
    elif path.suffix == ".json":
        content = json.loads(path.read_text())
        content["predicate"]["at"] = "2099-01-01T00:00:00Z"
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(path.read_bytes()[::-1])
    return {"rotation-broken"}


@case
def a_decision_signed_with_a_retired_key(rng: random.Random, output: Path) -> set[str]:
    """It claims an earlier time, and stands after the new key's first decision."""
    old = signing_key(output).read_bytes()
    rotate(output, by="a person", note="")
    private = output / "kept.pem"
    private.write_bytes(old)
    line = (output / LOG).read_bytes().splitlines(keepends=True)[-1]
    statement = json.loads(base64.b64decode(json.loads(line)["payload"]))
    earlier = {"previous": hashlib.sha256(line).hexdigest(), "at": "2020-01-01T00:00:00+00:00"}
    statement["predicate"] |= earlier | {"action": "decline"}
    with (output / LOG).open("a") as log:
        log.write(envelope(json.dumps(statement).encode(), PAYLOAD_TYPE, private) + "\n")
    private.unlink()
    return {"log-broken"}


@case
def a_param_of_a_model(rng: random.Random, output: Path) -> set[str]:
    keys = ("key", "config_digest", "code_digest", "seed", "dataset_sha256", "statement_sha256", "uri")
    key, models = rng.choice(keys), rows(output, "select model_id from logged_models")
    model = rng.choice(models)[0]
    statement = "update logged_model_params set param_value = 'x' where param_key = ? and model_id = ?"
    sql(output, statement, key, model)
    return {"mlflow-model-changed"}


@case
def the_identity_of_a_model(rng: random.Random, output: Path) -> set[str]:
    model = rng.choice(rows(output, "select model_id from logged_models"))[0]
    statement = "update logged_model_params set param_value = ? where param_key = 'sha256' and model_id = ?"
    sql(output, statement, rng.randbytes(32).hex(), model)
    return {"mlflow-model-missing"}


@case
def a_param_of_a_run(rng: random.Random, output: Path) -> set[str]:
    key, run = rng.choice(
        rows(output, "select p.key, run_uuid from params p join tags using (run_uuid) where tags.key = 'xray.key'")
    )
    sql(output, "update params set value = 'x' where key = ? and run_uuid = ?", key, run)
    return {"mlflow-run-changed"}


@case
def a_tag_of_a_run(rng: random.Random, output: Path) -> set[str]:
    tags = "('xray.key', 'xray.stage', 'mlflow.parentRunId')"
    key, run = rng.choice(rows(output, f"select key, run_uuid from tags where key in {tags}"))
    sql(output, "update tags set value = 'x' where key = ? and run_uuid = ?", key, run)
    return {"mlflow-run-changed"}


@case
def a_late_input(rng: random.Random, output: Path) -> set[str]:
    def ancestors(model: str) -> set[str]:
        query = "select destination_id from inputs where source_type = 'RUN_INPUT' and source_id = ?"
        return {row[0] for row in rows(output, query, made[model])} | {model}

    made = dict(rows(output, "select model_id, source_run_id from logged_models"))
    model = rng.choice(sorted(made))
    late = rng.choice(sorted(set(made) - ancestors(model)))
    values = (rng.randbytes(16).hex(), "RUN_INPUT", made[model], "MODEL_INPUT", late, 0)
    sql(output, "insert into inputs values (?, ?, ?, ?, ?, ?)", *values)
    return {"mlflow-input-added"}


@case
def an_input_removed(rng: random.Random, output: Path) -> set[str]:
    kinds = "('RUN_INPUT', 'DATASET')"
    uuid = rng.choice(rows(output, f"select input_uuid from inputs where source_type in {kinds}"))[0]
    sql(output, "delete from inputs where input_uuid = ?", uuid)
    return {"mlflow-input-missing"}


@case
def a_dataset_in_mlflow(rng: random.Random, output: Path) -> set[str]:
    if rng.random() < 0.5:
        sql(output, "update datasets set digest = 'x'")
    else:
        sql(output, "update input_tags set value = 'x' where name = 'xray.sha256'")
    return {"mlflow-dataset-changed"}


@case
def a_parent_deleted_in_mlflow(rng: random.Random, output: Path) -> set[str]:
    query = "select distinct destination_id from inputs where source_type = 'RUN_INPUT'"
    model = rng.choice(rows(output, query))[0]
    sql(output, "update logged_models set lifecycle_stage = 'deleted' where model_id = ?", model)
    return {"mlflow-model-missing"}


@case
def a_run_deleted(rng: random.Random, output: Path) -> set[str]:
    run = rng.choice(rows(output, "select run_uuid from runs"))[0]
    sql(output, "update runs set lifecycle_stage = 'deleted' where run_uuid = ?", run)
    return {"mlflow-run-deleted"}


@case
def a_number_of_the_evaluation(rng: random.Random, output: Path) -> set[str]:
    key, run = rng.choice(rows(output, "select key, run_uuid from latest_metrics where key like 'evaluate/%'"))
    sql(output, "update latest_metrics set value = value + 0.1 where key = ? and run_uuid = ?", key, run)
    return {"mlflow-metric-changed"}


@case
def a_registered_version(rng: random.Random, output: Path) -> set[str]:
    others = rows(output, "select model_id from logged_models where model_type != 'ppo'")
    sql(output, "update model_versions set source = ? where name = ?", f"models:/{rng.choice(others)[0]}", NAME)
    return {"registry-changed"}


@case
def a_tag_of_a_registered_version(rng: random.Random, output: Path) -> set[str]:
    key = rng.choice(["xray.sha256", "xray.uri"])
    sql(output, "update model_version_tags set value = 'x' where key = ? and name = ?", key, NAME)
    return {"registry-changed"}


@case
def the_page_of_a_registered_version(rng: random.Random, output: Path) -> set[str]:
    if rng.random() < 0.5:
        sql(output, "update model_versions set description = description || ' approved' where name = ?", NAME)
    else:
        key = rng.choice(["xray.statement", "xray.evaluation", "xray.signed_by", "xray.promote"])
        sql(output, "delete from model_version_tags where key = ? and name = ?", key, NAME)
    return {"registry-page-changed"}


@case
def an_alias_moved_or_removed(rng: random.Random, output: Path) -> set[str]:
    if rng.random() < 0.5:
        sql(output, "delete from registered_model_aliases where alias = ?", ALIAS)
    else:
        sql(output, "update registered_model_aliases set alias = 'champion' where alias = ?", ALIAS)
    return {"alias-moved"}


@case
def a_decision_rewritten(rng: random.Random, output: Path) -> set[str]:
    lines = (output / LOG).read_bytes().splitlines(keepends=True)
    [place] = [i for i, line in enumerate(lines) if b'"register"' in base64.b64decode(json.loads(line)["payload"])]
    content = json.loads(lines[place])
    payload = base64.b64decode(content["payload"]).replace(b'"note": ""', b'"note": "approved"')
    lines[place] = json.dumps(content | {"payload": base64.b64encode(payload).decode()}).encode() + b"\n"
    (output / LOG).write_bytes(b"".join(lines))
    return {"log-broken"}


@case
def the_record_of_the_run(rng: random.Random, output: Path) -> set[str]:
    path = output / "lifecycle.json"
    content = json.loads(path.read_text())
    if rng.random() < 0.5:
        content["evaluation"]["win_rate"] = 0.99
    else:
        rng.choice(content["stages"])["checkpoint"]["sha256"] = rng.randbytes(32).hex()
    path.write_text(json.dumps(content))
    return {"record-differs"}


@case
def what_a_run_left_for_people(rng: random.Random, output: Path) -> set[str]:
    files = [output / "report.html", output / "lifecycle.json", *sorted((output / "records").rglob("*.*"))]
    path = rng.choice(files)
    how = rng.randrange(4)
    if how == 0:
        flip(rng, path)
    elif how == 1:
        path.unlink()
    elif how == 2:
        # As if it were at work, whose record nobody has signed yet.
        record = output / "lifecycle.json"
        record.write_text(record.read_text().replace('"completed"', '"running"'))
    else:
        path.rename(output / "elsewhere")
        path.symlink_to(output / "elsewhere")
    return {"run-changed"}


COUNT = int(os.environ.get("XRAY_TAMPER_CASES", "60"))
