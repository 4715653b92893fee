"""The tables and columns of MLflow's database: what an audit compares, and what it leaves out for which reason."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from xray_runtime.kernel.history.audit_check import Finding

Row = dict[str, Any]
PEOPLE = "notes and tags of people"
BY_API = "compared with what the log and the checkpoint say by `tracking` and `registry`"

COMPARED: dict[str, str] = {
    "datasets": "dataset_uuid experiment_id name digest dataset_source_type dataset_source dataset_schema "
    "dataset_profile",
    "experiments": "experiment_id name artifact_location lifecycle_stage creation_time last_update_time workspace",
    "input_tags": "input_uuid name value",
    "inputs": "input_uuid source_type source_id destination_type destination_id step",
    "latest_metrics": "key value timestamp step is_nan run_uuid",
    "logged_model_params": "model_id experiment_id param_key param_value",
    "logged_models": "model_id experiment_id name artifact_location creation_timestamp_ms last_updated_timestamp_ms "
    "status lifecycle_stage model_type source_run_id status_message",
    "metrics": "key value timestamp run_uuid step is_nan",
    "model_version_tags": "key value name version workspace",
    "model_versions": "name version creation_time last_updated_time description user_id current_stage source run_id "
    "status status_message run_link storage_location workspace",
    "params": "key value run_uuid",
    "registered_model_aliases": "alias version name workspace",
    "registered_model_tags": "key value name workspace",
    "registered_models": "name creation_time last_updated_time description workspace",
    "runs": "run_uuid name source_type source_name entry_point_name user_id status start_time end_time source_version "
    "lifecycle_stage artifact_uri experiment_id deleted_time",
    "tags": "key value run_uuid",
    "workspaces": "name description default_artifact_root trace_archival_location trace_archival_retention",
}
"""Table → its columns. Columns whose names speak of time, and tags that X-ray does not write (`PEOPLE`), are
not compared; all others are, here or by `tracking` and `registry`."""
NEVER_WRITTEN = {
    *("budget_policies", "endpoint_bindings", "endpoint_model_mappings", "endpoint_tags", "endpoints"),
    *("guardrail_configs", "guardrails", "logged_model_metrics", "mcp_access_endpoints", "mcp_server_aliases"),
    *("mcp_server_tags", "mcp_server_version_tags", "mcp_server_versions", "mcp_servers", "model_definitions"),
    *("online_scoring_configs", "secrets", "webhook_events", "webhooks"),
}
"""Tables in which X-ray writes nothing, and MLflow nothing by itself: any row is a finding."""
SHOWN = (
    "recorded answers that MLflow shows for review, and traces and judgements of people: evidence is the signed chain"
)
WORK = "MLflow's own work"
IGNORED: dict[str, str] = {
    "alembic_version": "MLflow opens no database of another version",
    "experiment_tags": PEOPLE,
    "logged_model_tags": BY_API,
    **dict.fromkeys(
        (
            *("assessments", "entity_associations", "evaluation_dataset_records", "evaluation_dataset_tags"),
            *("evaluation_datasets", "issues", "label_schemas", "review_queue_items", "review_queue_label_schemas"),
            *("review_queue_users", "review_queues", "scorer_versions", "scorers", "span_metrics", "spans"),
            *("trace_info", "trace_metrics", "trace_request_metadata", "trace_tags"),
        ),
        SHOWN,
    ),
    **dict.fromkeys(
        (
            *("job_locks", "jobs", "scheduler_leases", "sql_assessment_daily_rollups", "sql_span_cost_daily_rollups"),
            *("sql_trace_metric_daily_rollups", "sql_trace_rollup_rebuild_queue"),
        ),
        WORK,
    ),
}
"""Table that is not compared → the reason."""
OWN_TRIGGER = ("trigger", "prevent_secrets_aad_mutation", "secrets")
"""MLflow's only one. Another could change any row while MLflow works."""


class Database:
    """The rows of an SQLite database, which is only read. Raises sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "backslashreplace")
        master = self._connection.execute("SELECT type, name, tbl_name FROM sqlite_master")
        self.objects: dict[str, tuple[str, str]] = {name: (kind, table) for kind, name, table in master}

    def close(self) -> None:
        self._connection.close()

    def columns(self, table: str) -> list[str]:
        return [row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")')]

    def rows(self, table: str) -> list[Row]:
        """The rows of one of our tables; [] without it."""
        if table not in self.objects:
            return []
        cursor = self._connection.execute(f'SELECT * FROM "{table}"')
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]


def check_schema(database: Database) -> Iterator[Finding]:
    """Tables, columns, views and triggers that no audit knows, and rows where there must be none."""
    for name, (kind, table) in sorted(database.objects.items()):
        if kind == "index" or name == "sqlite_sequence" or (kind, name, table) == OWN_TRIGGER:
            continue
        if kind != "table" or not (name in COMPARED or name in IGNORED or name in NEVER_WRITTEN):
            yield Finding(f"MLflow's {kind} {name}", "tracking-unknown", "it is not compared with anything")
        elif name in NEVER_WRITTEN and database.rows(name):
            yield Finding(f"MLflow's {name}", "mlflow-row-unexplained", "X-ray writes none of its rows")
        elif name in COMPARED and (more := sorted(set(database.columns(name)) - set(COMPARED[name].split()))):
            yield Finding(f"MLflow's {name}", "tracking-unknown", f"its columns {', '.join(more)} are not compared")
