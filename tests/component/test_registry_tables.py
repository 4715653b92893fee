"""References to registered models are read from MLflow's tables: each answer is compared with MLflow's own."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest

from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.tracking import registry
from xray_runtime.kernel.tracking.mlflow_tracker import Tracker

NAMED = """
import sys
from xray_runtime.kernel.tracking.registry import registered_checkpoint
print(registered_checkpoint(*sys.argv[1:])[0], "mlflow" in sys.modules)
"""


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[Tracker]:
    before = mlflow.get_tracking_uri()
    yield Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", "registry", tmp_path / "artifacts")
    mlflow.set_tracking_uri(before)


def logged(tracker: Tracker, digit: str) -> CheckpointRef:
    """A logged model with a checkpoint's params."""
    sha256, uri = digit * 64, f"/runs/checkpoints/ppo-{digit}"
    model = tracker.client.create_logged_model(
        tracker.experiment_id, name="ppo", params={"sha256": sha256, "uri": uri, "kind": "ppo"}
    )
    return CheckpointRef(
        uri=uri, sha256=sha256, stage="ppo", kind="ppo", type="Policy", step=1, mlflow_model_id=model.model_id
    )


def register(tracker: Tracker, name: str, ref: CheckpointRef) -> None:
    run = tracker.client.create_run(tracker.experiment_id).info.run_id
    tracker.registry.register(name, ref, run, "candidate")


def test_the_tables_name_what_mlflow_names(tracker: Tracker) -> None:
    uri, client = tracker.client.tracking_uri, tracker.client
    first, second = logged(tracker, "a"), logged(tracker, "b")
    for ref in (first, second):
        register(tracker, "policy", ref)

    def named(reference: str) -> str | None:
        read, asked = registry._read_checkpoint(uri, reference), registry._ask_checkpoint(uri, reference)
        assert read == asked, reference
        assert read is None or read[1] == f"/runs/checkpoints/ppo-{read[0][0]}"
        return None if read is None else read[0][0]

    assert [named(ref) for ref in ("policy/1", "policy/2", "policy@candidate")] == ["a", "b", "b"]
    # As a person does on MLflow's pages.
    client.set_registered_model_alias("policy", "candidate", "1")
    client.set_registered_model_alias("policy", "champion", "2")
    assert [named(ref) for ref in ("policy@candidate", "policy@champion")] == ["a", "b"]
    for reference in ("policy@none", "policy/3", "policy/x", "none/1", "none@candidate", "policy@Candidate", "@x"):
        assert named(reference) is None
    client.delete_registered_model_alias("policy", "candidate")
    assert named("policy@candidate") is None
    client.rename_registered_model("policy", "renamed")
    assert [named(ref) for ref in ("policy/2", "renamed/2", "renamed@champion")] == [None, "b", "b"]
    client.delete_model_version("renamed", "2")
    assert [named(ref) for ref in ("renamed/2", "renamed@champion", "renamed/1")] == [None, None, "a"]
    client.delete_logged_model(first.mlflow_model_id)
    assert named("renamed/1") is None


def test_mlflow_is_imported_only_where_its_tables_do_not_answer(tracker: Tracker, tmp_path: Path) -> None:
    ref = logged(tracker, "a")
    register(tracker, "policy", ref)

    def answer(reference: str) -> list[str]:
        command = [sys.executable, "-c", NAMED, tracker.client.tracking_uri, reference]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert answer("policy@candidate") == [ref.sha256, "False"]
    # MLflow's own alias for the newest version is in no table.
    assert answer("policy@latest") == [ref.sha256, "True"]
    # A store of another MLflow may have other tables.
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE registered_models (name TEXT)")
    assert registry._read_checkpoint(f"sqlite:///{tmp_path / 'other.db'}", "policy@candidate") is None
