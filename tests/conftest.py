"""What holds for all tests."""

import pytest
from hypothesis import settings

# No test asserts a wall time.
settings.register_profile("xray", deadline=None)
settings.load_profile("xray")


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow keeps the address it was last given in the environment, where the next test would find it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
