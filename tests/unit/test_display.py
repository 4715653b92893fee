"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from xray.cli.display import where_lineage_is_seen


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "mlflow ui --backend-store-uri sqlite:////runs/x/mlflow.db"),
        ("sqlite:////elsewhere/mlflow.db", "mlflow ui --backend-store-uri sqlite:////elsewhere/mlflow.db"),
        ("http://host:5000", "http://host:5000"),
    ],
)
def test_where_to_look_for_lineage(address: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert where_lineage_is_seen(Path("/runs/x")) == says
