"""PostgreSQL under `xray up`: bad addresses are one line, no password is shown, records are not left behind unseen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xray.deployments.databases import check_databases, databases
from xray.deployments.server_home import ServerHome, State, new_state
from xray_runtime.kernel.config.validation import ConfigError

PREFECT, MLFLOW = "PREFECT_API_DATABASE_CONNECTION_URL", "MLFLOW_BACKEND_STORE_URI"
BOTH = {
    PREFECT: "postgresql+asyncpg://me:hunter2@db.example:5433/prefect",
    MLFLOW: "postgresql://me:hunter2@db.example/mlflow",
}


def test_shown_addresses_have_no_password() -> None:
    assert databases(BOTH) == {"prefect": "db.example:5433/prefect", "mlflow": "db.example:5432/mlflow"}
    assert databases({PREFECT: ""}) == {}


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (PREFECT, "postgresql://me:hunter2@db/prefect", "postgresql:// is not allowed: must be postgresql+asyncpg://"),
        (PREFECT, "sqlite+aiosqlite:////tmp/hunter2.db", "sqlite+aiosqlite:// is not allowed"),
        (MLFLOW, "hunter2", "not an address"),
        (MLFLOW, "mysql://me:hunter2@db/mlflow", "must be postgresql://USER:PASSWORD@HOST/NAME or"),
    ],
)
def test_other_addresses_are_refused(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        databases({variable: value})
    assert str(refused.value).startswith(f"{variable}: ")
    assert said in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_records_are_not_left_behind_unseen() -> None:
    remembered = databases(BOTH)
    with pytest.raises(ConfigError, match=f"{PREFECT}: is not set, but .* at db.example:5433/prefect"):
        check_databases(remembered, set(), {})
    with pytest.raises(ConfigError, match="not allowed while prefect is up"):
        check_databases({}, {"prefect", "mlflow"}, BOTH)
    assert check_databases(remembered, {"prefect", "mlflow"}, BOTH) == remembered


def test_one_that_does_not_answer_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1/prefect cannot be used: ") as refused:
        new_state(None, None, {}, {PREFECT: "postgresql+asyncpg://me:hunter2@127.0.0.1:1/prefect"})
    assert "hunter2" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_runs_do_not_hear_of_the_databases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in BOTH.items():
        monkeypatch.setitem(os.environ, name, value)
    assert not {PREFECT, MLFLOW} & set(ServerHome(tmp_path).environment(State(tag="m")))
