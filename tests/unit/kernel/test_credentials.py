"""Logins in addresses: where they go, and what is left of an address that is recorded or shown."""

from __future__ import annotations

import pytest

from xray.deployments.automations import webhook
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.credentials import api_key, hide_logins, strip_credentials, tracking_address
from xray_runtime.kernel.history.reference import check_tracking_uri
from xray_runtime.trust.provenance import variables


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("http://host:5000", "http://host:5000"),
        ("http://user:secret@host:5000/api", "http://host:5000/api"),
        ("http://user:sec/r@et@host/a", "http://host/a"),
        ("postgresql+asyncpg://u:secret@host/db?password=secret#secret", "postgresql+asyncpg://host/db"),
        ("http://a:secret@one,http://b:secret@two", "http://two"),
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
        ("a sentence? with @ signs", "a sentence? with @ signs"),
    ],
)
def test_addresses_are_shown_without_credentials(text: str, left: str) -> None:
    assert strip_credentials(text) == left


def test_logins_move_into_the_variables_made_for_them() -> None:
    environment = {
        "PREFECT_API_URL": "https://me:pass%3Aword@host:4200/api",
        "MLFLOW_TRACKING_URI": "http://you:p%40ss@host:5000",
    }
    hide_logins(environment)
    moved = {
        "PREFECT_API_URL": "https://host:4200/api",
        "PREFECT_API_AUTH_STRING": "me:pass:word",
        "MLFLOW_TRACKING_URI": "http://host:5000",
        "MLFLOW_TRACKING_USERNAME": "you",
        "MLFLOW_TRACKING_PASSWORD": "p@ss",
    }
    assert environment == moved
    hide_logins(environment)
    assert environment == moved


def test_a_variable_that_is_set_wins_and_other_addresses_are_left_alone() -> None:
    given = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "mine"}
    environment = {"MLFLOW_TRACKING_URI": "http://you:yours@host"} | given
    assert tracking_address(environment) == "http://host"
    assert environment == {"MLFLOW_TRACKING_URI": "http://host"} | given
    for uri in ("sqlite:////a/b@c.db", "postgresql://u:p@host/db", "http://host/a"):
        assert tracking_address({"MLFLOW_TRACKING_URI": uri}) == uri
    assert tracking_address({"MLFLOW_TRACKING_URI": ""}) is None


def test_records_hold_what_matters_and_no_secret() -> None:
    secret = "s3cr3t"
    environment = {
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MLFLOW_TRACKING_URI": f"http://me:{secret}/x@host:5000/?key={secret}",
        "PREFECT_API_URL": "http://host:4200/api",
    }
    secrets = {
        "XRAY_NOTIFY_URL": f"https://chat/services/{secret}",
        "PREFECT_API_DATABASE_CONNECTION_URL": f"postgresql://u:{secret}@h/d",
        "PREFECT_API_AUTH_STRING": f"me:{secret}",
        "MLFLOW_TRACKING_PASSWORD": secret,
        "RAY_AUTH_TOKEN": secret,
        "RAY_JOB_CONFIG_JSON_ENV_VAR": secret,
        "VLLM_API_KEY": secret,
        "HF_TOKEN": secret,
        "AWS_SECRET_ACCESS_KEY": secret,
    }
    recorded = variables(environment | secrets)
    assert recorded == environment | {"MLFLOW_TRACKING_URI": "http://host:5000/"}


def test_passwords_on_command_lines_are_refused() -> None:
    check_tracking_uri(None)
    check_tracking_uri("sqlite:////a@b.db")
    with pytest.raises(ConfigError, match=r"--tracking-uri: .*set MLFLOW_TRACKING_USERNAME and MLFLOW_TRAC") as caught:
        check_tracking_uri("http://me:s3cr3t@host")
    assert "s3cr3t" not in str(caught.value)


def test_the_address_for_notices_is_not_shown_and_works() -> None:
    block = webhook("https://chat/services/s3cr3t")
    assert "s3cr3t" not in block.model_dump_json() + repr(block)
    sent = block._build_request_args("the body", "the subject")
    assert sent["url"] == "https://chat/services/s3cr3t"
    assert sent["json"] == {"text": "the body"}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://api.example.com/v1", "sk=1"),
        ("https://API.example.com/v1", "sk=1"),
        ("http://localhost:8000/v1", "two"),
        ("http://localhost:8001/v1", None),
        ("https://example.com", None),
        ("https://api.example.com.evil.org", None),
        ("https://empty", None),
    ],
)
def test_a_key_is_for_its_host(address: str, expected: str | None) -> None:
    environment = {"XRAY_API_KEYS": "api.example.com=sk=1, localhost:8000=two,empty=,"}
    assert api_key(address, environment) == expected
    assert api_key(address, {}) is None
