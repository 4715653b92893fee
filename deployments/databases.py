"""Databases of Prefect and MLflow under `xray up`: SQLite files in the server home, or PostgreSQL.

The addresses, with passwords, come from the environment variables of the two programs. Only the process that needs an
address gets it; only host, port and name are saved and shown.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

VARIABLES = {"prefect": "PREFECT_API_DATABASE_CONNECTION_URL", "mlflow": "MLFLOW_BACKEND_STORE_URI"}
"""Service → variable with the address of its database."""
DRIVERS = {"prefect": ("postgresql+asyncpg",), "mlflow": ("postgresql", "postgresql+psycopg2")}
EXTENSION = "pg_trgm"
"""Extension of PostgreSQL that Prefect's migrations need."""
CONNECT_SECONDS = 15.0


def databases(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Service → `HOST:PORT/NAME` of its PostgreSQL, for the services that use one.

    Raises:
        ConfigError: an address is not of PostgreSQL; the message omits it, since it contains a password.
    """
    return {name: _shown(_url(name, environment)) for name, variable in VARIABLES.items() if environment.get(variable)}


def check_databases(remembered: Mapping[str, str], running: set[str], environment: Mapping[str, str]) -> dict[str, str]:
    """`databases`, after checking that each service that is not running yet can use its own.

    Args:
        remembered: `databases` of the last start.
        running: services that are running.

    Raises:
        ConfigError: a database cannot be used, or the records of the last start would be lost.
    """
    current = databases(environment)
    for name, variable in VARIABLES.items():
        before, now = remembered.get(name), current.get(name)
        if before and not now:
            raise ConfigError(
                f"{variable}: is not set, but the records are in PostgreSQL at {before}: set it to that address"
            )
        if now and name in running and before != now:
            raise ConfigError(f"{variable}: {now} is not allowed while {name} is up: `xray down` first")
        if now and name not in running:
            reason = _why_not(name, _url(name, environment))
            if reason:
                raise ConfigError(f"{variable}: {now} cannot be used: {reason}")
    return current


def address(name: str, otherwise: str) -> dict[str, str]:
    """Environment of service `name` with the address of its database; `otherwise` if none is set."""
    return {VARIABLES[name]: os.environ.get(VARIABLES[name]) or otherwise}


def _url(name: str, environment: Mapping[str, str]) -> URL:
    # Every command imports this module, and few need half a second of SQLAlchemy.
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    allowed = " or ".join(f"{driver}://USER:PASSWORD@HOST/NAME" for driver in DRIVERS[name])
    try:
        url = make_url(environment[VARIABLES[name]])
    except ArgumentError:
        raise ConfigError(f"{VARIABLES[name]}: not an address: must be {allowed}") from None
    if url.drivername not in DRIVERS[name]:
        raise ConfigError(f"{VARIABLES[name]}: {url.drivername}:// is not allowed: must be {allowed}")
    return url


def _host(url: URL) -> str:
    named = url.query.get("host")
    return url.host or (named if isinstance(named, str) else "localhost")


def _shown(url: URL) -> str:
    return f"{_host(url)}:{url.port or 5432}/{url.database or url.username or ''}"


def _why_not(name: str, url: URL) -> str | None:
    """Why service `name` cannot use this database; None if it can."""
    if name == "mlflow" and importlib.util.find_spec("psycopg2") is None:
        return "the package psycopg2-binary is not installed (it comes with xray-rlhf[cluster])"
    try:
        import asyncio

        return asyncio.run(_query_database(url, name == "prefect"))
    except Exception as error:
        # Errors of the network, the server or the driver; none of them contains the password.
        return first_line(error)


async def _query_database(url: URL, needs_extension: bool) -> str | None:
    import asyncpg

    connection = await asyncpg.connect(
        host=_host(url),
        port=url.port or 5432,
        user=url.username,
        password=url.password,
        database=url.database,
        timeout=CONNECT_SECONDS,
    )
    try:
        query = "select count(*) from pg_available_extensions where name = $1"
        if needs_extension and not await connection.fetchval(query, EXTENSION):
            return f"it lacks the extension {EXTENSION} (on Debian: postgresql-contrib)"
        return None
    finally:
        await connection.close()
