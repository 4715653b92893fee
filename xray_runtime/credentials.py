"""Passwords in addresses: kept where libraries look for them, and out of everything that is written or shown.

People write `MLFLOW_TRACKING_URI=http://user:password@host`. An address ends up on pages, in tags and in errors, so the
login is moved, as early as possible, into the variables that MLflow and Prefect read it from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from urllib.parse import unquote, urlsplit

TRACKING = "MLFLOW_TRACKING_URI"
PREFECT = "PREFECT_API_URL"
API_KEYS = "XRAY_API_KEYS"
"""`host=key` pairs, separated by commas, a port with the host where the address has one. A config may come from
anybody: so the environment says which host a key is for, and the config names none."""
FORWARDED = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "XRAY_ALLOWED_IMPORTS",
    API_KEYS,
)
"""Variables that a stage needs on another machine, whose environment may lack them."""

_LOGIN = re.compile(r"://\S*@")
_QUERY = re.compile(r"(://[^\s?#]*)[?#]\S*")


def strip_credentials(text: str) -> str:
    """`text` with addresses that hold no login, no query and no fragment. Rather too much goes than too little."""
    return _QUERY.sub(r"\1", _LOGIN.sub("://", text))


def has_login(address: str) -> bool:
    """Whether a login stands in an address; a path may have an @ in it."""
    return "@" in urlsplit(address).netloc


def hide_logins(environment: MutableMapping[str, str] = os.environ) -> None:
    """Move the logins of Prefect's and MLflow's HTTP addresses into the variables made for them.

    Where such a variable is set already, it wins.
    """
    user, password = _take(environment, PREFECT)
    if user or password:
        environment.setdefault("PREFECT_API_AUTH_STRING", f"{user}:{password}")
    user, password = _take(environment, TRACKING)
    if user or password:
        environment.setdefault("MLFLOW_TRACKING_USERNAME", user)
        environment.setdefault("MLFLOW_TRACKING_PASSWORD", password)


def tracking_address(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """MLFLOW_TRACKING_URI, its login hidden; None where it is not set."""
    hide_logins(environment)
    return environment.get(TRACKING) or None


def api_key(address: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key that the environment has for the host of an address."""
    pairs = (pair.strip().partition("=") for pair in environment.get(API_KEYS, "").split(","))
    keys = {host.lower(): key for host, _, key in pairs}
    return keys.get(urlsplit(address).netloc.lower()) or None


def _take(environment: MutableMapping[str, str], name: str) -> tuple[str, str]:
    """(user, password) of an address, which stands without them afterwards."""
    address = environment.get(name, "")
    if not address.startswith(("http://", "https://")) or not has_login(address):
        return "", ""
    parts = urlsplit(address)
    login, _, host = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    environment[name] = parts._replace(netloc=host).geturl()
    return unquote(user), unquote(password)
