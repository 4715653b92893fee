"""Ways to falsify what stands beside the checkpoints: log, records, pages, MLflow's runs and registry, keys.

Each returns the codes of which one must be found; some are notes, where what is there is not evidence.
"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

from tests.unit.trust.synthetic import ALIAS, NAME, Lifecycle
from tests.unit.trust.tampering import flip, rows, sql
from xray_runtime.kernel.evidence.log import LOG, read_lines
from xray_runtime.kernel.evidence.view import RunBegan
from xray_runtime.trust.log import append
from xray_runtime.trust.signing import PAYLOAD_TYPE, envelope, signing_key

Tampering = Callable[[random.Random, Path], set[str]]

RECORD_CASES: dict[str, Tampering] = {}
NOT_COVERED: dict[str, Tampering] = {}
"""What docs/lineage.md says no audit looks at."""


def case(function: Tampering) -> Tampering:
    RECORD_CASES[function.__name__] = function
    return function


def lines(output: Path) -> list[bytes]:
    return (output / LOG).read_bytes().splitlines(keepends=True)


def write_lines(output: Path, kept: list[bytes]) -> None:
    (output / LOG).write_bytes(b"".join(kept))


def insert(output: Path, table: str, **values: object) -> None:
    names = ", ".join(values)
    sql(output, f"insert into {table} ({names}) values ({', '.join('?' * len(values))})", *values.values())


def alias_by_hand(output: Path) -> None:
    insert(output, "registered_model_aliases", alias="champion", version=1, name=NAME)


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2))


def stage_runs(output: Path) -> list[str]:
    return [row[0] for row in rows(output, "select run_uuid from tags where key = 'xray.stage' order by 1")]


def lifecycle_run(output: Path) -> str:
    return str(json.loads((output / "lifecycle.json").read_text())["run_id"])


# The log


@case
def the_log_removed(rng: random.Random, output: Path) -> set[str]:
    (output / LOG).unlink()
    return {"log-missing"}


@case
def the_log_removed_and_an_alias_put_by_hand(rng: random.Random, output: Path) -> set[str]:
    (output / LOG).unlink()
    alias_by_hand(output)
    return {"alias-moved"}


@case
def an_alias_put_by_hand(rng: random.Random, output: Path) -> set[str]:
    alias_by_hand(output)
    return {"alias-moved"}


@case
def a_shorter_log(rng: random.Random, output: Path) -> set[str]:
    write_lines(output, lines(output)[: -rng.randint(1, 8)])
    return {"log-shorter"}


@case
def the_newest_entries_taken_off_with_what_they_were_about(rng: random.Random, output: Path) -> set[str]:
    """The decision and its alias, as if the policy had never been registered."""
    write_lines(output, lines(output)[:-2])
    sql(output, "delete from registered_model_aliases where alias = ?", ALIAS)
    return {"log-shorter"}


@case
def a_shorter_log_that_only_the_last_audit_knew_longer(rng: random.Random, output: Path) -> set[str]:
    from xray_runtime.kernel.history.reference import open_lineage_store
    from xray_runtime.trust.audit.checkpoints import audit

    assert audit(open_lineage_store(output, None), since_verified=True).is_sound
    for table in ("tags", "model_version_tags"):
        sql(output, f"delete from {table} where key = 'xray.log'")
    write_lines(output, lines(output)[:-1])
    return {"log-shorter"}


@case
def an_entry_taken_out(rng: random.Random, output: Path) -> set[str]:
    kept = lines(output)
    del kept[rng.randrange(len(kept) - 1)]
    write_lines(output, kept)
    return {"log-broken"}


@case
def two_entries_swapped(rng: random.Random, output: Path) -> set[str]:
    kept = lines(output)
    place = rng.randrange(len(kept) - 1)
    kept[place], kept[place + 1] = kept[place + 1], kept[place]
    write_lines(output, kept)
    return {"log-broken"}


@case
def a_bit_of_the_log(rng: random.Random, output: Path) -> set[str]:
    flip(rng, output / LOG)
    return {"log-broken"}


@case
def an_entry_of_a_stranger(rng: random.Random, output: Path) -> set[str]:
    """In the middle, following what is there; or at the end."""
    import base64

    kept = lines(output)
    place = rng.choice([len(kept) - 1, rng.randrange(len(kept))])
    payload = base64.b64decode(json.loads(kept[place])["payload"])
    key = signing_key(output / "intruder")
    kept[place] = envelope(payload, PAYLOAD_TYPE, key).encode() + b"\n"
    write_lines(output, kept)
    shutil.rmtree(output / "intruder")
    return {"log-broken"}


@case
def a_log_of_another_directory(rng: random.Random, output: Path) -> set[str]:
    Lifecycle(output / "other", tracking=False).add("base", "base", {"x": b""}, {})
    shutil.move(output / "other" / LOG, output / LOG)
    shutil.rmtree(output / "other")
    return {"log-broken"}


@case
def the_log_made_a_link(rng: random.Random, output: Path) -> set[str]:
    shutil.move(output / LOG, output / "logs")
    (output / LOG).symlink_to("logs")
    return {"log-broken"}


@case
def a_line_added_to_the_log(rng: random.Random, output: Path) -> set[str]:
    added = rng.choice([b"{}\n", b"\n", b"approved", lines(output)[0]])
    write_lines(output, [*lines(output), added])
    return {"log-broken"}


# Stores that are gone


@case
def mlflow_removed(rng: random.Random, output: Path) -> set[str]:
    (output / "mlflow.db").unlink()
    return {"tracking-missing"}


@case
def mlflow_and_the_log_removed(rng: random.Random, output: Path) -> set[str]:
    (output / "mlflow.db").unlink()
    (output / LOG).unlink()
    (output / "report.html").write_text("win rate 0.99")
    return {"log-missing"}


@case
def another_mlflow(rng: random.Random, output: Path) -> set[str]:
    Lifecycle(output / "other")
    shutil.move(output / "other" / "mlflow.db", output / "mlflow.db")
    shutil.rmtree(output / "other")
    return {"mlflow-model-missing"}


@case
def the_newest_checkpoint_removed_from_everywhere(rng: random.Random, output: Path) -> set[str]:
    [place] = output.glob("checkpoints/evaluate-*")
    shutil.rmtree(place)
    sql(output, "delete from logged_model_params where param_value like ?", f"%{place.name}")
    return {"checkpoint-missing"}


@case
def a_checkpoint_that_nobody_logged(rng: random.Random, output: Path) -> set[str]:
    """By who has the key: the log is the second thing to falsify."""
    kept = lines(output)
    Lifecycle(output, tracking=False).add(f"late-{rng.random()}", "ppo", {"x": rng.randbytes(9)}, {})
    write_lines(output, kept)
    return {"checkpoint-unlogged"}


# What runs leave for people


@case
def the_numbers_of_a_report(rng: random.Random, output: Path) -> set[str]:
    (output / "report.html").write_text("win rate 0.99")
    return {"run-changed"}


@case
def a_run_made_to_look_at_work(rng: random.Random, output: Path) -> set[str]:
    status = rng.choice(["running", "interrupted", "cancelled", ""])
    hidden = rng.choice([{}, {"seconds": 0.1}, {"seed": 9}, {"project": "another"}])
    edit_json(output / "lifecycle.json", status=status, **hidden)
    return {"run-changed"}


def _began(output: Path, run_id: str) -> None:
    """A run of the same config that was cut short."""
    entry = next(line.entry for line in read_lines(output) if isinstance(line.entry, RunBegan))
    append(output, signing_key(output), entry.model_copy(update={"run_id": run_id, "tracking": "http://elsewhere"}))
    edit_json(output / "lifecycle.json", run_id=run_id, status="running")


@case
def facts_of_a_run_that_was_cut_short(rng: random.Random, output: Path) -> set[str]:
    _began(output, "cut-short")
    name = rng.choice(["seed", "project", "config_digest", "status"])
    edit_json(output / "lifecycle.json", **{name: "completed"})
    return {"run-changed"}


@case
def the_report_beside_a_run_that_was_cut_short(rng: random.Random, output: Path) -> set[str]:
    _began(output, "cut-short")
    (output / "report.html").write_text("win rate 0.99")
    return {"run-changed"}


@case
def the_record_of_an_earlier_run(rng: random.Random, output: Path) -> set[str]:
    """Put back in place of the newer one's."""
    earlier = (output / "lifecycle.json").read_bytes()
    lifecycle = Lifecycle(output)
    edit_json(output / "lifecycle.json", run_id=lifecycle.run_id, **lifecycle.facts())
    lifecycle.end()
    (output / "lifecycle.json").write_bytes(earlier)
    return {"run-changed"}


@case
def a_record_removed(rng: random.Random, output: Path) -> set[str]:
    (output / rng.choice(["lifecycle.json", "report.html", "config.yaml"])).unlink()
    return {"run-changed"}


@case
def a_page_of_lineage(rng: random.Random, output: Path) -> set[str]:
    page = rng.choice(sorted((output / "lineage").iterdir()))
    if rng.random() < 0.5:
        page.write_text(page.read_text() + "<script>alert(1)</script>")
        return {"run-changed"}
    page.with_name("approved.html").write_text("<script>alert(1)</script>")
    return {"file-unsigned"}


@case
def the_config(rng: random.Random, output: Path) -> set[str]:
    flip(rng, output / "config.yaml")
    return {"run-changed"}


@case
def a_result(rng: random.Random, output: Path) -> set[str]:
    path = rng.choice(sorted((output / "results").iterdir()))
    edit_json(path, **rng.choice([{"seconds": 0.1}, {"attempts": 0}, {"mlflow_run_id": "x"}]))
    return {"run-changed"}


@case
def a_file_added_among_records(rng: random.Random, output: Path) -> set[str]:
    place = rng.choice([output / "records", *sorted((output / "records").iterdir()), output / "results"])
    (place / rng.choice(["better.png", "metrics.csv", ".hidden"])).write_text("x")
    return {"file-unsigned", "file-unknown"}


@case
def a_file_of_records(rng: random.Random, output: Path) -> set[str]:
    path = rng.choice([path for path in sorted((output / "records").rglob("*")) if path.is_file()])
    if rng.random() < 0.5:
        flip(rng, path)
    else:
        path.unlink()
    return {"run-changed"}


@case
def every_artifact_reversed(rng: random.Random, output: Path) -> set[str]:
    for path in (output / "mlartifacts").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[::-1])
    return {"run-changed"}


@case
def an_artifact(rng: random.Random, output: Path) -> set[str]:
    path = rng.choice([path for path in sorted((output / "mlartifacts").rglob("*")) if path.is_file()])
    how = rng.randrange(3)
    if how == 0:
        path.unlink()
    elif how == 1:
        flip(rng, path)
    else:
        path.with_name("approval.json").write_text("{}")
        return {"file-unsigned"}
    return {"run-changed"}


@case
def a_file_in_the_root(rng: random.Random, output: Path) -> set[str]:
    (output / rng.choice(["REPORT.html", "approval.pdf", "report2.html", ".notes"])).write_text("x")
    return {"file-unknown"}


@case
def a_planted_snapshot(rng: random.Random, output: Path) -> set[str]:
    place = output / "snapshots" / f"ppo-{rng.randrange(9)}-0123456789ab" / "step-0000000004"
    place.mkdir(parents=True)
    (place / "state.json").write_text("{}")
    return {"snapshot-left"}


@case
def a_directory_made_a_link(rng: random.Random, output: Path) -> set[str]:
    name = rng.choice(["checkpoints", "records", "results", "lineage", "mlartifacts", "report.html"])
    shutil.move(output / name, output.parent / f"elsewhere-{rng.random()}")
    [elsewhere] = output.parent.glob("elsewhere-*")
    (output / name).symlink_to(elsewhere)
    return {"file-link"}


# MLflow's runs


@case
def the_last_value_of_a_metric(rng: random.Random, output: Path) -> set[str]:
    run, key = rng.choice(rows(output, "select run_uuid, key from latest_metrics order by 1, 2"))
    for table in rng.choice([("latest_metrics",), ("latest_metrics", "metrics"), ("metrics",)]):
        sql(output, f"update {table} set value = value + 0.1 where run_uuid = ? and key = ?", run, key)
        if table == "latest_metrics" and key.split("/")[0] not in ("evaluate", "compare"):
            # MLflow shows histories; the latest values are a cache that it keeps of them.
            sql(output, "update metrics set value = value + 0.1 where run_uuid = ? and key = ? and step = 2", run, key)
    return {"mlflow-metric-changed"}


@case
def a_point_of_a_history(rng: random.Random, output: Path) -> set[str]:
    run, key = rng.choice(rows(output, "select distinct run_uuid, key from metrics order by 1, 2"))
    how = rng.choice(
        [
            "update metrics set value = value * 2 + 1 where run_uuid = ? and key = ? and step = 1",
            "delete from metrics where run_uuid = ? and key = ? and step = 1",
            "update metrics set step = 7 where run_uuid = ? and key = ? and step = 1",
            "update metrics set timestamp = 77 where run_uuid = ? and key = ? and step = 0",
        ]
    )
    sql(output, how, run, key)
    return {"mlflow-metric-changed"}


@case
def a_metric_added(rng: random.Random, output: Path) -> set[str]:
    run, point = rng.choice(stage_runs(output)), {"key": "ppo/reward", "value": 9.0, "timestamp": 5, "step": 0}
    for table in ("metrics", "latest_metrics"):
        insert(output, table, run_uuid=run, is_nan=0, **point)
    return {"mlflow-metric-changed"}


@case
def a_param_of_the_lifecycle(rng: random.Random, output: Path) -> set[str]:
    run = lifecycle_run(output)
    if rng.random() < 0.5:
        insert(output, "params", key="approved", value="yes", run_uuid=run)
    else:
        sql(output, "update params set value = '9' where key = 'seed' and run_uuid = ?", run)
    return {"mlflow-run-changed"}


@case
def the_name_of_a_run(rng: random.Random, output: Path) -> set[str]:
    run = rng.choice([lifecycle_run(output), *stage_runs(output)])
    sql(output, "update runs set name = 'approved' where run_uuid = ?", run)
    sql(output, "update tags set value = 'approved' where key = 'mlflow.runName' and run_uuid = ?", run)
    return {"mlflow-run-changed"}


@case
def a_tag_of_ours(rng: random.Random, output: Path) -> set[str]:
    how = rng.randrange(3)
    if how == 0:
        run = rng.choice([lifecycle_run(output), *stage_runs(output)])
        insert(output, "tags", key="xray.approved", value="yes", run_uuid=run)
        return {"mlflow-run-changed"}
    if how == 1:
        model, experiment = rng.choice(rows(output, "select model_id, experiment_id from logged_models"))
        values = {"tag_key": "xray.approved", "tag_value": "yes"}
        insert(output, "logged_model_tags", model_id=model, experiment_id=experiment, **values)
        return {"mlflow-model-changed"}
    insert(output, "model_version_tags", key="xray.approved", value="yes", name=NAME, version=1)
    return {"registry-page-changed"}


@case
def the_value_of_a_tag(rng: random.Random, output: Path) -> set[str]:
    key = rng.choice(["xray.attempts", "xray.output"])
    runs = rows(output, "select run_uuid from tags where key = ? order by 1", key)
    sql(output, "update tags set value = '77' where key = ? and run_uuid = ?", key, rng.choice(runs)[0])
    return {"mlflow-run-changed"}


@case
def the_mark_of_the_log(rng: random.Random, output: Path) -> set[str]:
    table = rng.choice(["tags", "model_version_tags"])
    sql(output, f"update {table} set value = replace(value, ':', ':9') where key = 'xray.log'")
    return {"log-shorter"}


@case
def a_run_or_its_experiment_deleted(rng: random.Random, output: Path) -> set[str]:
    if rng.random() < 0.5:
        sql(output, "update experiments set lifecycle_stage = 'deleted' where name = 'synthetic'")
    else:
        sql(output, "update runs set lifecycle_stage = 'deleted' where run_uuid = ?", lifecycle_run(output))
    return {"mlflow-run-deleted"}


@case
def the_name_of_the_experiment_or_the_status(rng: random.Random, output: Path) -> set[str]:
    if rng.random() < 0.5:
        sql(output, "update experiments set name = 'approved' where name = 'synthetic'")
    else:
        sql(output, "update runs set status = 'FAILED' where run_uuid = ?", lifecycle_run(output))
    return {"mlflow-run-changed"}


@case
def the_lifecycle_run_removed(rng: random.Random, output: Path) -> set[str]:
    run = lifecycle_run(output)
    with sqlite3.connect(output / "mlflow.db") as database:
        for table in ("tags", "params", "metrics", "latest_metrics", "runs"):
            database.execute(f"delete from {table} where run_uuid = ?", (run,))
    database.close()
    return {"mlflow-run-missing"}


# The registry


@case
def the_page_of_a_version(rng: random.Random, output: Path) -> set[str]:
    how = rng.choice(["description = 'approved by all'", "current_stage = 'Production'", "description = ''"])
    sql(output, f"update model_versions set {how} where name = ?", NAME)
    return {"registry-page-changed"}


@case
def the_run_of_a_version(rng: random.Random, output: Path) -> set[str]:
    others = rows(output, "select run_uuid from tags where key = 'xray.stage' and value != 'ppo-2' order by 1")
    run = rng.choice([*others, (lifecycle_run(output),), ("nobody",)])[0]
    sql(output, "update model_versions set run_id = ? where name = ?", run, NAME)
    return {"registry-changed"}


@case
def the_page_of_a_registered_model(rng: random.Random, output: Path) -> set[str]:
    if rng.random() < 0.5:
        sql(output, "update registered_models set description = 'promote at will' where name = ?", NAME)
    else:
        insert(output, "registered_model_tags", key="xray.approved", value="yes", name=NAME)
    return {"registry-page-changed"}


# Keys


@case
def a_key_that_others_can_use(rng: random.Random, output: Path) -> set[str]:
    keys = output / "keys"
    how = rng.randrange(3)
    if how == 0:
        (keys / "signing.pem").chmod(rng.choice([0o644, 0o640, 0o666, 0o604]))
    elif how == 1:
        keys.chmod(rng.choice([0o777, 0o755, 0o750]))
    else:
        shutil.move(keys / "signing.pem", output / "locks" / "kept.pem")
        (keys / "signing.pem").symlink_to(output / "locks" / "kept.pem")
    return {"key-exposed"}


def _uncovered(function: Tampering) -> Tampering:
    NOT_COVERED[function.__name__] = function
    return function


@_uncovered
def logs_locks_and_caches(rng: random.Random, output: Path) -> set[str]:
    for name in ("logs/xray.log", "locks/more.lock", "digests.sqlite", "prefect/prefect.db"):
        (output / name).parent.mkdir(exist_ok=True, parents=True)
        (output / name).write_bytes(rng.randbytes(9))
    return set()


@_uncovered
def tags_and_notes_of_people(rng: random.Random, output: Path) -> set[str]:
    run = rng.choice([lifecycle_run(output), *stage_runs(output)])
    insert(output, "tags", key="mlflow.note.content", value="look at this", run_uuid=run)
    insert(output, "tags", key="team", value="ours", run_uuid=run)
    return set()


@_uncovered
def metrics_of_the_lifecycle_run(rng: random.Random, output: Path) -> set[str]:
    point = {"key": "search/value", "value": 9.0, "timestamp": 5, "step": 0, "is_nan": 0}
    for table in ("metrics", "latest_metrics"):
        insert(output, table, run_uuid=lifecycle_run(output), **point)
    return set()
