"""Templates of the real schemas: Prefect's server and MLflow work on copies, without migrations of their own."""

from __future__ import annotations

import base64
import os
import sqlite3
import urllib.request
from pathlib import Path

import pytest

from xray.deployments.local_services import prefect_server
from xray_runtime.kernel.tracking.mlflow_tracker import Tracker
from xray_runtime.kernel.tracking.registry import open_client


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "xray"


def schema(path: Path) -> list[tuple[str]]:
    return sqlite3.connect(path).execute("select sql from sqlite_master where sql not null order by sql").fetchall()


def test_a_prefect_server_works_on_a_copy(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with prefect_server(tmp_path / "run"):
        request = urllib.request.Request(os.environ["PREFECT_API_URL"] + "/flows/filter", b"{}")
        login = base64.b64encode(os.environ["PREFECT_API_AUTH_STRING"].encode()).decode()
        request.add_header("Authorization", f"Basic {login}")
        request.add_header("Content-Type", "application/json")
        assert urllib.request.urlopen(request, timeout=30).read() == b"[]"
    (template,) = cache.glob("prefect-*.db")
    assert schema(tmp_path / "run" / "prefect" / "prefect.db") == schema(template)
    assert not {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING"} & set(os.environ)


def test_mlflow_works_on_a_copy(tmp_path: Path, cache: Path) -> None:
    open_client(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (template,) = cache.glob("mlflow-*.db")
    tables = schema(tmp_path / "mlflow.db")
    assert tables == schema(template)
    tracker = Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", "project", tmp_path / "artifacts")
    run = tracker.start_lifecycle(None, "a run", {"seed": 0}, "seed: 0", {})
    assert tracker.client.get_run(run).data.params == {"seed": "0"}
    assert schema(tmp_path / "mlflow.db") == tables
