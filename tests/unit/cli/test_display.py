"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from xray.cli.display import mlflow_page_lines

PAGE = "#/experiments/1/runs/ab?workflowType=machine_learning"


@pytest.mark.parametrize(
    ("address", "page", "says"),
    [
        ("", PAGE, "mlflow ui --backend-store-uri sqlite:////runs/x/mlflow.db"),
        ("sqlite:////elsewhere/mlflow.db", PAGE, "mlflow ui --backend-store-uri sqlite:////elsewhere/mlflow.db"),
        ("http://host:5000", f"http://host:5000/{PAGE}", f"http://host:5000/{PAGE}"),
    ],
)
def test_where_mlflow_shows_a_run(address: str, page: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    lines = mlflow_page_lines(page, Path("/runs/x"))
    assert lines[0] == f"in MLflow   {says}"
    assert lines[1:] == ([] if page.startswith("http") else [f"            and then http://127.0.0.1:5000/{PAGE}"])
