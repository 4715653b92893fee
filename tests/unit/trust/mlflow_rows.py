"""Rows of MLflow's database that an intruder writes past MLflow, each with the code of the finding.

In the statements, `:policy` is the registered checkpoint's LoggedModel, `:stage` its run, `:run` the lifecycle's run.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

NAME = "synthetic-policy"
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
ALIAS = "insert into registered_model_aliases (alias, version, name, workspace) values "

ATTACKS: dict[str, tuple[tuple[str, ...], str]] = {
    # The registry
    "storage location": (("update model_versions set storage_location = 'file:///evil'",), "registry-changed"),
    "no storage location": (("update model_versions set storage_location = null",), "registry-changed"),
    "second version": (FOREIGN_MODEL + SECOND_VERSION, "registry-unexplained"),
    "champion of a second version": (
        (*FOREIGN_MODEL, *SECOND_VERSION, f"{ALIAS} ('champion', 2, '{NAME}', 'default')"),
        "alias-moved",
    ),
    "champion of a version that is not there": ((f"{ALIAS} ('champion', 9, '{NAME}', 'default')",), "alias-moved"),
    "an alias of one's own": ((f"{ALIAS} ('production', 1, '{NAME}', 'default')",), "alias-moved"),
    "second registered model": (SECOND_MODEL, "registry-unexplained"),
    "champion of a second registered model": (
        (*SECOND_MODEL, f"{ALIAS} ('champion', 1, 'approved-policy', 'default')"),
        "alias-moved",
    ),
    "a twin of the model that a version names": (
        (*FOREIGN_MODEL, "update model_versions set source = 'models:/m-evil', storage_location = 'file:///evil'"),
        "mlflow-model-changed",
    ),
    "a path as source": (("update model_versions set source = '/evil/model'",), "registry-changed"),
    "status of a version": (("update model_versions set status = 'FAILED_REGISTRATION'",), "registry-changed"),
    "message of a version": (("update model_versions set status_message = 'approved'",), "registry-changed"),
    "author of a version": (("update model_versions set user_id = 'the board'",), "registry-changed"),
    "link of a version": (("update model_versions set run_link = 'http://evil'",), "registry-changed"),
    "workspace of a version": (("update model_versions set workspace = 'other'",), "registry-changed"),
    # LoggedModels
    "artifacts of a model": (
        ("update logged_models set artifact_location = 'file:///evil' where model_id = :policy",),
        "mlflow-model-changed",
    ),
    "name of a model": (("update logged_models set name = 'gpt' where model_id = :policy",), "mlflow-model-changed"),
    "status of a model": (("update logged_models set status = 3 where model_id = :policy",), "mlflow-model-changed"),
    "message of a model": (
        ("update logged_models set status_message = 'approved' where model_id = :policy",),
        "mlflow-model-changed",
    ),
    "a model of nothing": (
        (*FOREIGN_MODEL, "update logged_model_params set param_value = 'ff' where model_id = 'm-evil'"),
        "mlflow-row-unexplained",
    ),
    "an older record of a checkpoint with another parent": (
        (
            *FOREIGN_MODEL,
            "update logged_model_params set param_value = '00' where model_id = 'm-evil' and param_key like 'parent.%'",
        ),
        "mlflow-model-changed",
    ),
    "metrics of a model": (
        (
            "insert into logged_model_metrics (model_id, metric_name, metric_timestamp_ms, metric_step, metric_value, "
            "experiment_id, run_id) select :policy, 'win rate', 1, 0, 0.99, experiment_id, :stage from logged_models "
            "where model_id = :policy",
        ),
        "mlflow-row-unexplained",
    ),
    # Runs
    "a run of one's own": (FOREIGN_RUN, "mlflow-row-unexplained"),
    "a run that calls itself an import": (
        (
            *FOREIGN_RUN,
            "insert into tags (key, value, run_uuid) values ('xray.imported', 'true', 'evil')",
            "insert into latest_metrics (key, value, timestamp, step, is_nan, run_uuid) values ('win', 1, 1, 0, 0, "
            "'evil')",
        ),
        "mlflow-row-unexplained",
    ),
    "a run below the lifecycle": (
        (
            *FOREIGN_RUN,
            "insert into tags (key, value, run_uuid) values ('mlflow.parentRunId', :run, 'evil'), "
            "('mlflow.runName', 'best model', 'evil'), ('xray.key', (select value from tags where run_uuid = :stage "
            "and key = 'xray.key'), 'evil')",
        ),
        "mlflow-run-changed",
    ),
    "status of a stage": (("update runs set status = 'FAILED' where run_uuid = :stage",), "mlflow-run-changed"),
    "artifacts of a run": (
        ("update runs set artifact_uri = 's3://evil' where run_uuid = :stage",),
        "mlflow-run-changed",
    ),
    "artifacts of the lifecycle": (
        ("update runs set artifact_uri = 'file:///evil' where run_uuid = :run",),
        "mlflow-run-changed",
    ),
    "user of a run": (("update runs set user_id = 'the board' where run_uuid = :run",), "mlflow-run-changed"),
    "source of a run": (("update runs set source_name = 'audited.py' where run_uuid = :stage",), "mlflow-run-changed"),
    "version of a run": (("update runs set source_version = 'abcdef' where run_uuid = :stage",), "mlflow-run-changed"),
    "experiment of a run": (("update runs set experiment_id = 0 where run_uuid = :stage",), "mlflow-run-changed"),
    "source in tags": (
        ("insert into tags (key, value, run_uuid) values ('mlflow.source.git.commit', 'ab', :stage)",),
        "mlflow-run-changed",
    ),
    "name in tags": (
        ("update tags set value = 'approved' where key = 'mlflow.runName' and run_uuid = :stage",),
        "mlflow-run-changed",
    ),
    # Experiments and workspaces
    "artifacts of an experiment": (
        ("update experiments set artifact_location = 'file:///evil' where name = 'synthetic'",),
        "mlflow-location-changed",
    ),
    "an experiment of one's own": (
        (
            "insert into experiments (name, artifact_location, lifecycle_stage, creation_time, last_update_time, "
            "workspace) values ('approved', 'file:///evil', 'active', 1, 1, 'default')",
        ),
        "mlflow-row-unexplained",
    ),
    "artifacts of a workspace": (
        ("update workspaces set default_artifact_root = 'file:///evil'",),
        "mlflow-row-unexplained",
    ),
    # Metrics, inputs, datasets
    "latest value": (
        ("update latest_metrics set value = 9 where run_uuid = :stage and key = 'ppo/loss'",),
        "mlflow-metric-changed",
    ),
    "latest step": (
        ("update latest_metrics set step = 99 where run_uuid = :stage and key = 'ppo/loss'",),
        "mlflow-metric-changed",
    ),
    "no latest value": (
        ("delete from latest_metrics where run_uuid = :stage and key = 'ppo/loss'",),
        "mlflow-metric-changed",
    ),
    "latest value of a lifecycle": (
        (
            "insert into latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
            "values ('win', 1, 1, 0, 0, :run)",
        ),
        "mlflow-metric-changed",
    ),
    "step of an output": (
        ("update inputs set step = 9 where source_type = 'RUN_OUTPUT' and source_id = :stage",),
        "mlflow-input-added",
    ),
    "an output of another run": (
        (
            "insert into inputs values ('evil', 'RUN_OUTPUT', (select run_uuid from runs where name = 'sft'), "
            "'MODEL_OUTPUT', :policy, 1)",
        ),
        "mlflow-input-added",
    ),
    "an input of an unknown kind": (
        ("insert into inputs values ('evil', 'APPROVED_BY', :stage, 'MODEL_INPUT', :policy, 0)",),
        "mlflow-input-added",
    ),
    "context of a dataset": (
        ("update input_tags set value = 'evaluation' where name = 'mlflow.data.context'",),
        "mlflow-input-added",
    ),
    "a tag of an input": (
        ("insert into input_tags select input_uuid, 'licence', 'MIT' from inputs where source_type = 'DATASET'",),
        "mlflow-input-added",
    ),
    "name of a dataset": (("update datasets set name = 'licensed'",), "mlflow-dataset-changed"),
    "source of a dataset": (
        ("""update datasets set dataset_source = '{"uri": "/evil"}'""",),
        "mlflow-dataset-changed",
    ),
    "schema of a dataset": (("update datasets set dataset_schema = '{}'",), "mlflow-dataset-changed"),
    # The database
    "a webhook": (
        (
            "insert into webhooks (webhook_id, name, url, status, creation_timestamp, last_updated_timestamp, "
            "workspace) values ('w', 'w', 'http://evil', 'ACTIVE', 1, 1, 'default')",
        ),
        "mlflow-row-unexplained",
    ),
    "a table": (("create table approvals (name text)",), "tracking-unknown"),
    "a column": (("alter table model_versions add column approved text",), "tracking-unknown"),
    "a view": (("create view approved as select * from runs",), "tracking-unknown"),
    "a trigger": (
        (
            "create trigger moved after update on registered_model_aliases begin update model_versions set "
            "storage_location = 'file:///evil'; end",
        ),
        "tracking-unknown",
    ),
}


def attack(output: Path, statements: tuple[str, ...]) -> None:
    """Run statements on an output directory's MLflow, each of which must change something."""
    run = json.loads((output / "lifecycle.json").read_text())["run_id"]
    with contextlib.closing(sqlite3.connect(output / "mlflow.db")) as database, database:
        database.execute("pragma foreign_keys = off")
        [(policy, stage)] = database.execute(
            "select model_id, source_run_id from logged_models where name = 'synthetic-ppo-2'"
        ).fetchall()
        for statement in statements:
            changed = database.execute(statement, {"policy": policy, "stage": stage, "run": run}).rowcount
            assert changed or statement.startswith(("create", "alter")), statement
