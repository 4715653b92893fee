"""MLflow's registry: versions of registered models, the aliases that point to them, and their pages."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.kernel.network import require_mlflow
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.template_database import copy_template, sqlite_address

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"
SHA256_TAG = "xray.sha256"
"""Tag of a registered version: its checkpoint."""
URI_TAG = "xray.uri"
"""Tag of a registered version: the checkpoint's directory at that time."""
LOG_TAG = "xray.log"
"""Tag of a registered version and of a run: the log's mark at that time."""
TRAINING = "?workflowType=machine_learning"
"""Ends the address of an experiment or a run on MLflow's pages. Without it they open on an empty dashboard of traces,
whatever the experiment's tag `mlflow.experimentKind` says (MLflow 3.17)."""
ADDRESS = "MLFLOW_TRACKING_URI or --tracking-uri"
"""The settings that name a store, for messages."""


def own_store(output: Path) -> str:
    """The address of an output directory's own store. Raises ConfigError as `sqlite_address`."""
    return sqlite_address(output.absolute() / "mlflow.db")


def store_module() -> str:
    """The module to import before `open_client`: of MLflow's databases, unless the environment names a server."""
    return "mlflow" if os.environ.get("MLFLOW_TRACKING_URI") else "mlflow.store.tracking.sqlalchemy_store"


def open_client(uri: str) -> MlflowClient:
    """A client of the MLflow store at `uri`, without telemetry and without notes in the log.

    A missing SQLite database is copied from a template, which takes milliseconds instead of seconds.
    """
    if uri.startswith(SQLITE):
        copy_template(Path(uri.removeprefix(SQLITE)), "mlflow", _make_database)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    import mlflow

    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def _make_database(path: Path) -> None:
    command = [sys.executable, "-m", "mlflow", "db", "upgrade", f"sqlite:///{path}"]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)


class ModelRegistry:
    """The registry of one MLflow store."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def register(self, name: str, ref: CheckpointRef, run_id: str, alias: str) -> str:
        """Register `ref` as a version of `name` and set `alias` to it; returns the version.

        The same checkpoint is registered once: registering it again only moves the alias.
        """
        from mlflow.exceptions import MlflowException

        version = self.version_of(name, ref.sha256)
        # Asking for the model itself would make MLflow read all its versions.
        if version is None and not self._client.search_model_versions(f"name = '{name}'", max_results=1):
            try:
                self._client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
        if version is None:
            made = self._client.create_model_version(
                name,
                source=f"models:/{ref.mlflow_model_id}",
                run_id=run_id,
                model_id=ref.mlflow_model_id,
                tags={SHA256_TAG: ref.sha256, URI_TAG: ref.uri},
            )
            version = str(made.version)
        self._client.set_registered_model_alias(name, alias, version)
        return version

    def version_of(self, name: str, sha256: str) -> str | None:
        """The version of the registered model `name` that is the checkpoint `sha256`."""
        if "'" in name:
            # MLflow's filter cannot quote a quote; our names have none.
            return None
        # By tag: a name may have more versions than one answer holds.
        versions = self._client.search_model_versions(f"name = '{name}' and tags.`{SHA256_TAG}` = '{sha256}'")
        return next((str(v.version) for v in versions), None)

    def set_aliases(self, name: str, aliases: Mapping[str, str]) -> None:
        """Point each alias of the registered model `name` to its version."""
        for alias, version in aliases.items():
            self._client.set_registered_model_alias(name, alias, version)

    def describe_model(self, name: str, description: str, tags: Mapping[str, str]) -> None:
        """Write the page of a registered model."""
        known = self._client.get_registered_model(name)
        if known.description != description:
            self._client.update_registered_model(name, description=description)
        for tag, value in tags.items():
            if known.tags.get(tag) != value:
                self._client.set_registered_model_tag(name, tag, value)

    def describe_version(self, name: str, version: str, description: str, tags: Mapping[str, str]) -> None:
        """Write the page of a registered version."""
        self._client.update_model_version(name, version, description=description)
        for tag, value in tags.items():
            self._client.set_model_version_tag(name, version, tag, value)

    def experiment_of(self, run_id: str) -> str | None:
        """The experiment of a run; None if the store does not know the run."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.get_run(run_id).info.experiment_id)
        except MlflowException:
            return None


def registered_checkpoint(uri: str, reference: str) -> tuple[str, Path] | None:
    """(sha256, directory) of `name@alias` or `name/version`; None when there is none."""
    require_mlflow(ADDRESS, uri)
    with contextlib.suppress(OSError, ValueError):
        check_store(uri)
        if (found := _read_checkpoint(uri, reference) or _ask_checkpoint(uri, reference)) is not None:
            sha256, directory = found
            if re.fullmatch(r"[0-9a-f]{64}", sha256):
                return sha256, Path(directory)
    return None


CHECKPOINT_QUERY = """
    SELECT sha256.param_value, directory.param_value
    FROM model_versions AS version
    JOIN logged_models AS model ON version.source = 'models:/' || model.model_id
    JOIN logged_model_params AS sha256 ON sha256.model_id = model.model_id AND sha256.param_key = 'sha256'
    JOIN logged_model_params AS directory ON directory.model_id = model.model_id AND directory.param_key = 'uri'
    WHERE version.current_stage != 'Deleted_Internal' AND model.lifecycle_stage != 'deleted' AND version.name = ?
    AND version.version IN """
ALIASED = "(SELECT version FROM registered_model_aliases WHERE name = version.name AND alias = ?)"


def _parts(reference: str) -> tuple[str, str, bool]:
    """(name, alias or version, whether it is an alias)."""
    name, _, alias = reference.rpartition("@")
    if name:
        return name, alias, True
    name, _, version = reference.rpartition("/")
    return name, version, False


def _read_checkpoint(uri: str, reference: str) -> tuple[str, str] | None:
    """`_ask_checkpoint`, from the tables of an SQLite store: importing MLflow takes 3 CPU seconds.

    None where they do not give exactly one answer (another version of MLflow may have other tables): then MLflow must
    be asked.
    """
    if not uri.startswith(SQLITE):
        return None
    name, wanted, is_alias = _parts(reference)
    query = CHECKPOINT_QUERY + (ALIASED if is_alias else "(?)")
    address = f"{Path(uri.removeprefix(SQLITE)).absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
            rows = database.execute(query, (name, wanted)).fetchall()
    except sqlite3.Error:
        return None
    return rows[0] if len(rows) == 1 else None


def _ask_checkpoint(uri: str, reference: str) -> tuple[str, str] | None:
    from mlflow.exceptions import MlflowException

    with contextlib.suppress(MlflowException):
        client = open_client(uri)
        name, wanted, is_alias = _parts(reference)
        find = client.get_model_version_by_alias if is_alias else client.get_model_version
        version = find(name, wanted)
        params = client.get_logged_model(version.source.removeprefix("models:/")).params
        return params.get("sha256", ""), params.get("uri", "")
    return None


def check_store(uri: str) -> None:
    """Raises OSError where an SQLite file is missing, ValueError where it is none, since MLflow would make tables in
    it, or where a server does not answer."""
    require_mlflow(ADDRESS, uri)
    if uri.startswith(SQLITE) and not is_sqlite(Path(uri.removeprefix(SQLITE))):
        raise ValueError("not an SQLite database")


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database. Raises OSError."""
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"
