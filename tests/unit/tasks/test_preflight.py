"""Servers that only one machine of a cluster can reach are refused."""

from __future__ import annotations

import pytest

from xray.tasks.preflight import check_ray_address, check_servers
from xray_runtime.config.validation import ConfigError

BOTH = {"PREFECT_API_URL": "http://prefect.lan:4200/api", "MLFLOW_TRACKING_URI": "http://10.0.0.9:5000"}


def test_rays_client_is_refused() -> None:
    check_ray_address({})
    check_ray_address({"RAY_ADDRESS": "10.0.0.1:6379"})
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS: 'ray://10.0.0.1:10001' is not allowed: must be HOST:PORT"):
        check_ray_address({"RAY_ADDRESS": "ray://10.0.0.1:10001"})


def test_one_machine_needs_no_servers_of_its_own() -> None:
    check_servers({"10.0.0.1"}, {"PREFECT_API_URL": "http://127.0.0.1:4200/api"})


def test_servers_that_all_can_reach_are_taken() -> None:
    check_servers({"10.0.0.1", "10.0.0.2"}, BOTH)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("PREFECT_API_URL", "http://127.0.0.1:4200/api"),
        ("PREFECT_API_URL", "http://localhost:4200/api"),
        ("MLFLOW_TRACKING_URI", None),
        ("MLFLOW_TRACKING_URI", "sqlite:////shared/mlflow.db"),
        ("MLFLOW_TRACKING_URI", "http://[::1]:5000"),
    ],
)
def test_others_are_refused(name: str, address: str | None) -> None:
    environment = BOTH | {name: address} if address else {k: v for k, v in BOTH.items() if k != name}
    with pytest.raises(ConfigError, match=f"^{name}: .* is not allowed on a cluster of 2 machines"):
        check_servers({"10.0.0.1", "10.0.0.2"}, environment)
