"""The tables and columns of MLflow's database: what an audit compares, and what it leaves out for which reason."""

from __future__ import annotations

CLOCK = "MLflow's clock"
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
"""Table → its columns. Columns whose names speak of time (`CLOCK`), and tags that X-ray does not write (`PEOPLE`), are
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
