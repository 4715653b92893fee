"""Every row of MLflow's own database against the log and the checkpoints.

`tracking` and `registry` ask MLflow for what they know of; here the database in an output directory is read as it is.
A table or column that `COMPARED` and `IGNORED` do not list, and a row that no record explains, are findings: MLflow's
pages and `models:/NAME@champion` show whatever is in there.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.kernel.history.audit_check import Finding
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.tracking.mlflow_tracker import (
    ARTIFACTS,
    ATTEMPTS_TAG,
    CACHED_TAG,
    KEY_TAG,
    PARENT_TAG,
    STAGE_TAG,
    TABLES_TAG,
    model_params,
    params_of,
)
from xray_runtime.kernel.tracking.registry import SHA256_TAG
from xray_runtime.trust.audit.mlflow_schema import Database, Row, check_schema

STAGE_TAGS = {KEY_TAG, STAGE_TAG, CACHED_TAG, ATTEMPTS_TAG}
"""X-ray's tags of a stage's run."""
OUR_MLFLOW_TAGS = {"mlflow.runName", "mlflow.note.content", PARENT_TAG, TABLES_TAG}
PLAIN_RUN = {
    **{"source_type": "UNKNOWN", "source_name": "", "entry_point_name": "", "user_id": "unknown"},
    **{"source_version": "", "lifecycle_stage": "active", "deleted_time": None},
}
PLAIN_VERSION = {"user_id": None, "status": "READY", "status_message": None, "run_link": None, "workspace": "default"}
IMPORTED = "xray.imported"
READY = 2


def check_tables(path: Path, graph: CheckpointGraph, view: LogView, output: Path) -> Iterator[Finding]:
    """Findings about the database at `path`, which is the output directory's own."""
    database = Database(path)
    try:
        yield from check_schema(database)
        yield from _TableRows(database, graph, view, output).check()
    finally:
        database.close()


class _TableRows:
    """The rows that a lifecycle leaves, by what explains them."""

    def __init__(self, database: Database, graph: CheckpointGraph, view: LogView, output: Path) -> None:
        self._db, self._graph, self._view, self._output = database, graph, view, output
        self.runs = {row["run_uuid"]: row for row in database.rows("runs")}
        self.models = {row["model_id"]: row for row in database.rows("logged_models")}
        self.experiments = {row["experiment_id"]: row for row in database.rows("experiments")}
        self.tags = _by(database.rows("tags"), "run_uuid", "key", "value")
        self.params = _by(database.rows("logged_model_params"), "model_id", "param_key", "param_value")
        self._metrics, self._latest_metrics = database.rows("metrics"), database.rows("latest_metrics")
        self._with_metrics = {row["run_uuid"] for row in (*self._metrics, *self._latest_metrics)}
        self._run_params = _by(database.rows("params"), "run_uuid", "key", "value")
        self._sources = {row["source_run_id"] for row in self.models.values()}
        self._keys = {node.manifest.key: node for node in graph.nodes.values()}

    def check(self) -> Iterator[Finding]:
        for check in (self._experiments, self._runs, self._models, self._registry, self._inputs, self._datasets):
            yield from check()
        yield from self._latest()
        for row in self._db.rows("workspaces"):
            if row["name"] != "default" or any(
                row[name] is not None for name in row if name not in ("name", "description")
            ):
                yield Finding(f"MLflow's workspace {row['name']}", "mlflow-row-unexplained", "X-ray makes none")

    @cached_property
    def whole_runs(self) -> set[str]:
        """Runs of whole lifecycles, of commands that published, and of imports."""
        named = {node.run.mlflow_parent_run_id for node in self._graph.nodes.values()}
        imports = {run_id for run_id in self.runs if self._is_import(run_id)}
        return {run_id for run_id in self.runs if run_id in self._view.runs or run_id in named} | imports

    def _is_import(self, run_id: str) -> bool:
        return self.tags[run_id].get(IMPORTED) == "true" and run_id not in self._measured

    @cached_property
    def _measured(self) -> set[str]:
        """Runs with params or metrics: an import has none."""
        return self._with_metrics | set(self._run_params)

    def is_stage(self, run_id: str) -> bool:
        """Whether a run is the child of an explained one."""
        return run_id in self.runs and self.tags[run_id].get(PARENT_TAG) in self.whole_runs

    def node_of(self, run_id: str) -> Node | None:
        """The checkpoint that a stage's run computed, or found."""
        return self._keys.get(self.tags[run_id].get(KEY_TAG, ""))

    def _is_known(self, sha256: str | None) -> bool:
        return sha256 in self._graph.nodes or sha256 in self._view.known

    @cached_property
    def _places(self) -> set[str]:
        """Addresses of the artifacts of this directory, here and where its runs found it before."""
        before = {run.tags.get("xray.output", "") for run in self._view.runs.values()}
        return {
            (Path(place) / ARTIFACTS).as_uri() for place in (*before, str(self._output.absolute())) if place[:1] == "/"
        }

    def _experiments(self) -> Iterator[Finding]:
        used = {row["experiment_id"] for run_id, row in self.runs.items() if run_id in self.whole_runs}
        names, places = {run.experiment for run in self._view.runs.values()}, self._places
        for number, row in self.experiments.items():
            label = f"experiment {row['name']}"
            if row["workspace"] != "default":
                yield Finding(label, "mlflow-row-unexplained", f"its workspace is {row['workspace']}")
            if number == 0 and row["name"] == "Default":
                continue
            if number not in used and row["name"] not in names:
                yield Finding(label, "mlflow-row-unexplained", "it contains no run of the log")
            elif row["artifact_location"] not in places:
                detail = f"its artifacts are at {_shown(row['artifact_location'])}, not in this directory"
                # Without a run, the log does not say where an imported directory was before.
                yield Finding(label, "mlflow-location-changed" if self._view.runs else "mlflow-location-other", detail)

    def _is_at(self, location: object, experiment: object, *parts: str) -> bool:
        """Whether artifacts are where MLflow puts those of an experiment, also of one that was moved."""
        root = self.experiments.get(experiment, {}).get("artifact_location") or ""
        return location in {"/".join((place.rstrip("/"), *parts)) for place in (root, *self._places)}

    def _runs(self) -> Iterator[Finding]:
        for run_id, row in self.runs.items():
            label = f"run {str(run_id)[:12]}"
            whole, stage = run_id in self.whole_runs, self.is_stage(run_id)
            if not whole and not stage:
                if row["lifecycle_stage"] != "deleted":
                    yield Finding(label, "mlflow-row-unexplained", f"no run of the log made {_shown(row['name'])}")
                continue
            differing = [name for name, value in PLAIN_RUN.items() if row[name] != value]
            if not self._is_at(row["artifact_uri"], row["experiment_id"], str(run_id), "artifacts"):
                differing.append("artifact_uri")
            tags = self.tags[run_id]
            if tags.get("mlflow.runName") != row["name"]:
                differing.append("mlflow.runName")
            differing += [tag for tag in tags if tag.startswith("mlflow.") and tag not in OUR_MLFLOW_TAGS]
            if stage and not whole:
                differing += self._stage_differs(run_id, row)
            # A deleted run has a finding of its own.
            differing = [name for name in differing if name not in ("lifecycle_stage", "deleted_time")]
            if differing:
                yield Finding(label, "mlflow-run-changed", ", ".join(sorted(differing)))

    def _stage_differs(self, run_id: str, row: Row) -> list[str]:
        tags, node = self.tags[run_id], self.node_of(run_id)
        parent, found = tags[PARENT_TAG], []
        ended = self._view.ended.get(parent)
        if ended is not None and ended.status == "completed" and row["status"] != "FINISHED":
            found.append("status")
        if node is None:
            # Its stage failed, or its checkpoint was pruned.
            return found
        if (row["name"], tags.get(STAGE_TAG)) != (node.manifest.stage, node.manifest.stage):
            found.append("name")
        found += [tag for tag in tags if tag.startswith("xray.") and tag not in STAGE_TAGS]
        if self._run_params[run_id] != params_of(node.manifest.config) | {"key": node.manifest.key}:
            found.append("params")
        if run_id in self._with_metrics and run_id not in (node.run.mlflow_run_id, *self._sources):
            # It found the checkpoint, and measured nothing.
            found.append("metrics")
        if row["experiment_id"] != self.runs[parent]["experiment_id"]:
            found.append("experiment_id")
        return found

    def _models(self) -> Iterator[Finding]:
        for model_id, row in self.models.items():
            label, params = f"model {model_id}", self.params[model_id]
            node = self._graph.nodes.get(params.get("sha256", ""))
            if row["lifecycle_stage"] == "deleted":
                continue
            if not self._is_known(params.get("sha256")):
                yield Finding(label, "mlflow-row-unexplained", "the log has no checkpoint of its sha256")
                continue
            run_id, differing = row["source_run_id"], []
            experiment = self.experiments.get(row["experiment_id"], {}).get("name")
            if not self._is_at(row["artifact_location"], row["experiment_id"], "models", model_id, "artifacts"):
                differing.append("artifact_location")
            if not self.is_stage(run_id) or self.tags[run_id].get(KEY_TAG) != params.get("key"):
                differing.append("source_run_id")
            elif row["status"] != READY and self.runs[run_id]["status"] == "FINISHED":
                differing.append("status")
            if row["status_message"] is not None:
                differing.append("status_message")
            if node is not None and row["name"] != f"{experiment}-{node.manifest.stage}":
                differing.append("name")
            if node is not None and row["model_type"] != node.manifest.kind:
                differing.append("model_type")
            if node is not None:
                expected = model_params(node.manifest, node.sha256, node.directory) | {"uri": node.directory.name}
                shown = params | {"uri": Path(params.get("uri", "")).name}
                # Older records of a checkpoint that was computed again have another statement.
                names = (expected.keys() | shown.keys()) - {"statement_sha256"}
                differing += sorted(name for name in names if shown.get(name) != expected.get(name))
            if differing:
                yield Finding(label, "mlflow-model-changed", ", ".join(differing))

    def _registry(self) -> Iterator[Finding]:
        decisions, decided = self._view.decisions_by_version, self._view.decided
        names = {decision.name for decision in self._view.decisions}
        for row in self._db.rows("registered_models"):
            if row["name"] not in names or row["workspace"] != "default":
                yield Finding(f"{row['name']}", "registry-unexplained", "no signed decision is about it")
        for row in self._db.rows("registered_model_aliases"):
            if (row["name"], row["alias"]) not in decided:
                yield Finding(f"{row['name']}@{row['alias']}", "alias-moved", f"no decision put it to {row['version']}")
        shas = {
            (r["name"], str(r["version"])): r["value"]
            for r in self._db.rows("model_version_tags")
            if r["key"] == SHA256_TAG
        }
        for row in self._db.rows("model_versions"):
            version = (row["name"], str(row["version"]))
            label, about = "/".join(map(str, version)), decisions.get(version, [])
            if not about:
                yield Finding(label, "registry-unexplained", "no signed decision is about it")
                continue
            checkpoint = about[-1].checkpoint
            model_id = str(row["source"]).removeprefix("models:/")
            model = self.models.get(model_id, {})
            differing = [name for name, value in PLAIN_VERSION.items() if (row[name] or None) != value]
            if row["storage_location"] != model.get("artifact_location"):
                differing.append("storage_location")
            if {checkpoint, shas.get(version)} != {self.params[model_id].get("sha256")}:
                differing.append("source")
            if row["run_id"] != model.get("source_run_id"):
                differing.append("run_id")
            if differing:
                yield Finding(label, "registry-changed", ", ".join(differing))

    def _inputs(self) -> Iterator[Finding]:
        rows = self._db.rows("inputs")
        tags = _by(self._db.rows("input_tags"), "input_uuid", "name", "value")
        made = {(r["source_id"], r["destination_id"]) for r in rows if r["source_type"] == "RUN_OUTPUT"}
        datasets = {row["dataset_uuid"] for row in self._db.rows("datasets")}
        of_stages = {
            (self.tags[r["destination_id"]][PARENT_TAG], r["source_id"], frozenset(tags[r["input_uuid"]].items()))
            for r in rows
            if r["source_type"] == "DATASET" and self.is_stage(r["destination_id"])
        }
        for row in rows:
            kinds, reason = (row["source_type"], row["destination_type"]), None
            run_id = row["destination_id"] if kinds[0] == "DATASET" else row["source_id"]
            sha256 = self.params[row["destination_id"]].get("sha256")
            node = self.node_of(run_id)
            expected: dict[str, str] = {}
            if not self.is_stage(run_id):
                found = frozenset(tags[row["input_uuid"]].items())
                # A lifecycle's run shows the datasets of its stages.
                explained = kinds == ("DATASET", "RUN") and (run_id, row["source_id"], found) in of_stages
                if run_id in self.runs and not explained:
                    reason = f"run {str(run_id)[:12]} belongs to no stage that has it"
            elif kinds == ("RUN_OUTPUT", "MODEL_OUTPUT"):
                if not self._is_known(sha256) or self.params[row["destination_id"]].get("key") != self.tags[run_id].get(
                    KEY_TAG
                ):
                    reason = "the run did not make the model"
                elif node is not None and sha256 == node.sha256 and row["step"] != node.manifest.step:
                    reason = f"step {row['step']} is not {node.manifest.step}"
            elif kinds == ("RUN_INPUT", "MODEL_INPUT"):
                parents = set(node.manifest.parents.values()) if node is not None else set(self._graph.nodes)
                if (
                    sha256 not in parents
                    and (run_id, row["destination_id"]) not in made
                    and sha256 in self._graph.nodes
                ):
                    reason = "the run did not read the model"
            elif kinds == ("DATASET", "RUN") and row["source_id"] in datasets:
                expected = {"mlflow.data.context": str(self.runs[run_id]["name"])}
                if node is not None and node.manifest.dataset is not None:
                    expected[SHA256_TAG] = node.manifest.dataset
            elif kinds != ("DATASET", "RUN"):
                reason = f"{kinds[0]} to {kinds[1]} is unknown"
            shown = tags.pop(row["input_uuid"], {})
            more = set(shown) - {"mlflow.data.context", SHA256_TAG}
            if reason is None and (more or any(shown.get(name) != value for name, value in expected.items())):
                reason = "its tags are others"
            if reason is not None:
                yield Finding(f"MLflow's input {row['input_uuid'][:12]}", "mlflow-input-added", reason)
        for uuid in tags:
            yield Finding(f"MLflow's input {uuid[:12]}", "mlflow-row-unexplained", "tags of an input that is not there")

    def _datasets(self) -> Iterator[Finding]:
        known = {node.sha256[:36]: node for node in self._graph.nodes.values()}
        for row in self._db.rows("datasets"):
            node = known.get(row["digest"])
            if node is None:
                if not any(sha256.startswith(str(row["digest"])) for sha256 in self._view.known):
                    yield Finding(f"dataset {row['name']}", "mlflow-dataset-changed", "no checkpoint has its digest")
                continue
            place = ""
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                place = str(json.loads(row["dataset_source"])["uri"])
            facts = {
                "name": (row["name"], node.manifest.stage),
                "source": (Path(place).name, node.directory.name),
                "source_type": (row["dataset_source_type"], "local"),
                "schema": (row["dataset_schema"], None),
                "profile": (row["dataset_profile"], None),
            }
            differing = [name for name, (shown, expected) in facts.items() if shown != expected]
            if differing:
                yield Finding(f"dataset {row['name']}", "mlflow-dataset-changed", ", ".join(differing))

    def _latest(self) -> Iterator[Finding]:
        """The latest value of each metric, which MLflow's lists show, against its history."""
        last: dict[tuple[str, str], tuple[Any, ...]] = {}
        for row in self._metrics:
            key, point = (row["run_uuid"], row["key"]), (row["step"], row["timestamp"], row["value"], row["is_nan"])
            last[key] = max(last.get(key, point), point, key=lambda p: (p[0], p[1], p[2]))
        differing = defaultdict[str, list[str]](list)
        shown = set()
        for row in self._latest_metrics:
            key = row["run_uuid"], row["key"]
            shown.add(key)
            if last.get(key) != (row["step"], row["timestamp"], row["value"], row["is_nan"]):
                differing[row["run_uuid"]].append(row["key"])
        for run_id, name in last.keys() - shown:
            differing[run_id].append(name)
        for run_id, names in differing.items():
            detail = f"the latest values differ from the history: {', '.join(sorted(names)[:8])}"
            yield Finding(f"run {run_id[:12]}", "mlflow-metric-changed", detail)


def _by(rows: list[Row], of: str, key: str, value: str) -> defaultdict[str, dict[str, str]]:
    found = defaultdict[str, dict[str, str]](dict)
    for row in rows:
        found[row[of]][row[key]] = row[value] if row[value] is not None else ""
    return found


def _shown(value: object) -> str:
    return ascii(str(value))[1:-1][:80]
