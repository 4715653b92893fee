"""Passwords in addresses: moved to the variables that libraries read, and removed from everything written or shown.

People write `MLFLOW_TRACKING_URI=http://user:password@host`. Addresses appear on pages, in tags and in errors, so the
login is moved as early as possible into the variables from which MLflow and Prefect read it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from urllib.parse import unquote, urlsplit

TRACKING = "MLFLOW_TRACKING_URI"
PREFECT = "PREFECT_API_URL"
API_KEYS = "XRAY_API_KEYS"
"""`host=key` pairs, separated by commas; the host includes the port if the address has one. Configs are untrusted, so
the environment decides which host a key is for."""
FORWARDED = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "XRAY_ALLOWED_IMPORTS",
    "XRAY_ALLOWED_COMMANDS",
    "XRAY_ALLOWED_PATHS",
    API_KEYS,
)
"""Variables that stages need on other machines, whose environment may lack them."""

_LOGIN = re.compile(r"://\S*@")
_QUERY = re.compile(r"(://[^\s?#]*)[?#]\S*")


def strip_credentials(text: str) -> str:
    """`text` without logins, queries and fragments in addresses. In doubt, more is removed."""
    return _QUERY.sub(r"\1", _LOGIN.sub("://", text))


def has_login(address: str) -> bool:
    """Whether an address contains a login; an @ in the path does not count."""
    return "@" in urlsplit(address).netloc


def hide_logins(environment: MutableMapping[str, str] = os.environ) -> None:
    """Move the logins of Prefect's and MLflow's HTTP addresses into their own variables.

    A variable that is set already takes precedence.
    """
    user, password = _take(environment, PREFECT)
    if user or password:
        environment.setdefault("PREFECT_API_AUTH_STRING", f"{user}:{password}")
    user, password = _take(environment, TRACKING)
    if user or password:
        environment.setdefault("MLFLOW_TRACKING_USERNAME", user)
        environment.setdefault("MLFLOW_TRACKING_PASSWORD", password)


def tracking_address(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """MLFLOW_TRACKING_URI without its login; None if it is not set."""
    hide_logins(environment)
    return environment.get(TRACKING) or None


def api_key(address: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The environment's key for the host of an address."""
    pairs = (pair.strip().partition("=") for pair in environment.get(API_KEYS, "").split(","))
    keys = {host.lower(): key for host, _, key in pairs}
    return keys.get(urlsplit(address).netloc.lower()) or None


def key_header(address: str) -> dict[str, str]:
    """The header with the environment's key for the host of an address."""
    key = api_key(address)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _take(environment: MutableMapping[str, str], name: str) -> tuple[str, str]:
    """(user, password) of an address, and the address without them."""
    address = environment.get(name, "")
    if not address.startswith(("http://", "https://")) or not has_login(address):
        return "", ""
    parts = urlsplit(address)
    login, _, host = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    environment[name] = parts._replace(netloc=host).geturl()
    return unquote(user), unquote(password)
