"""MLflow in an audit: runs, models, the registry, and the rows of the output directory's own database."""

from __future__ import annotations

from collections.abc import Iterator

from xray_runtime.kernel.history.audit_check import AuditCheck, Audited, Finding, Meaning
from xray_runtime.trust.audit.tracking import check_tracking

_RESTORE = "Restore the database from a copy, or run the lifecycle again to record the checkpoint anew."
CODES = {
    "evaluation-missing": Meaning(
        "The registered policy was never evaluated.", "Run the lifecycle to its end.", is_note=True
    ),
    "tracking-unchecked": Meaning(
        "Runs are recorded in another MLflow, which was not asked.", "Name it with --tracking-uri.", is_note=True
    ),
    "mlflow-location-other": Meaning(
        "MLflow keeps artifacts of an imported checkpoint elsewhere, as after its directory was moved.",
        "If it was not moved, ask who changed it.",
        is_note=True,
    ),
    "mlflow-metric-earlier": Meaning(
        "MLflow has points of an interrupted attempt, beside those of the last.", "", is_note=True
    ),
    "registry-page-unchecked": Meaning(
        "MLflow's page was written by another release with other wording; it was not compared.",
        "Run the lifecycle again: it writes the page anew.",
        is_note=True,
    ),
    "tracking-missing": Meaning(
        "MLflow's store, where the runs were recorded, is gone: nothing of it was checked.",
        "Restore mlflow.db from a copy, or run the lifecycle again to record it anew.",
    ),
    "tracking-unreadable": Meaning(
        "MLflow's store cannot be read.", "Restore it, or name another with --tracking-uri."
    ),
    "mlflow-model-missing": Meaning("MLflow does not know this checkpoint.", _RESTORE),
    "mlflow-model-changed": Meaning("MLflow's record of the checkpoint does not agree with the checkpoint.", _RESTORE),
    "mlflow-run-missing": Meaning("The MLflow run that made the checkpoint is gone.", _RESTORE),
    "mlflow-run-deleted": Meaning(
        "The MLflow run that made the checkpoint, or its experiment, was deleted.",
        "Restore it: `mlflow runs restore`, `mlflow experiments restore`.",
    ),
    "mlflow-run-changed": Meaning("Name, params or tags of the MLflow run are not what was signed.", _RESTORE),
    "mlflow-row-unexplained": Meaning(
        "MLflow has a row that no signed record explains: somebody else wrote it.",
        "Delete it in MLflow, and ask who put it there.",
    ),
    "mlflow-location-changed": Meaning("MLflow looks for artifacts outside this directory.", _RESTORE),
    "tracking-unknown": Meaning(
        "MLflow's database has a table, column, view or trigger that this audit does not know.",
        "If MLflow was upgraded, use the version that X-ray requires; if not, ask who put it there.",
    ),
    "registry-unexplained": Meaning(
        "MLflow has a registered model or version that no signed decision explains.",
        "Delete it in MLflow, and ask who put it there.",
    ),
    "mlflow-input-added": Meaning("MLflow shows an input that was not used: it was added later.", _RESTORE),
    "mlflow-input-missing": Meaning("MLflow does not show a parent or dataset that was used.", _RESTORE),
    "mlflow-dataset-changed": Meaning("The dataset MLflow shows is not the one that was used.", _RESTORE),
    "mlflow-metric-changed": Meaning("Numbers in MLflow are not those that were signed.", _RESTORE),
    "registry-changed": Meaning(
        "A registered version does not point to the model it names.",
        "Delete the version and run the lifecycle again, which registers the policy anew.",
    ),
    "registry-page-changed": Meaning(
        "MLflow's page of a registered model does not agree with the signed records.",
        "Run the lifecycle again, or `xray promote`: both write the page anew. Delete tags that they did not write.",
    ),
    "alias-moved": Meaning(
        "An alias does not point where the last signed decision put it.",
        "Set it back, or promote the model with `xray promote`.",
    ),
}


def _check(audited: Audited) -> Iterator[Finding]:
    yield from check_tracking(audited.store, audited.log, list(audited.nodes), audited.whole, list(audited.changed))


CHECK = AuditCheck("MLflow's runs, models, registry and pages against the signed records", CODES, _check)
