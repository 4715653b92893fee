"""Templates of the real schemas: Prefect's server and MLflow work on copies, without migrations of their own."""

from __future__ import annotations

import importlib.metadata
import sqlite3
from pathlib import Path

from xray_runtime.kernel.cache import cache_directory
from xray_runtime.kernel.tracking.mlflow_tracker import Tracker
from xray_runtime.kernel.tracking.registry import open_client


def schema(path: Path) -> list[tuple[str]]:
    return sqlite3.connect(path).execute("select sql from sqlite_master where sql not null order by sql").fetchall()


def template(package: str) -> list[tuple[str]]:
    """The schema of this machine's template for the installed version of `package`."""
    return schema(cache_directory() / f"{package}-{importlib.metadata.version(package)}.db")


def test_a_prefect_server_works_on_a_copy(prefect: str, prefect_database: Path) -> None:
    assert len(template("prefect")) > 100
    assert schema(prefect_database) == template("prefect")


def test_mlflow_works_on_a_copy(tmp_path: Path) -> None:
    open_client(f"sqlite:///{tmp_path / 'mlflow.db'}")
    tables = schema(tmp_path / "mlflow.db")
    assert len(tables) > 50
    assert tables == template("mlflow")
    tracker = Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", "project", tmp_path / "artifacts")
    run = tracker.start_lifecycle(None, "a run", {"seed": 0}, "seed: 0", {})
    assert tracker.client.get_run(run).data.params == {"seed": "0"}
    assert schema(tmp_path / "mlflow.db") == tables
