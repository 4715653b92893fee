"""New SQLite databases as copies of a template, since the migrations of Prefect and MLflow take seconds.

A template is an empty database with a package's schema. The first process that needs it makes it, once per version of
the package, in `$XDG_CACHE_HOME/xray` (`~/.cache/xray`). It only saves time: if the directory cannot be used or making
the template fails, the package itself creates the database.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from xray_runtime.kernel.cache import cache_directory
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.files import sync, write_atomic

log = logging.getLogger(__name__)

MAKE_SECONDS = 240.0
"""Time to wait for another process that makes the template."""


def sqlite_address(path: Path, driver: str = "sqlite") -> str:
    """The address of a database file. Raises ConfigError: SQLAlchemy would cut its path at a question mark."""
    if "?" in str(path):
        raise ConfigError(f"output: {str(path.parent)!r} is not allowed: must have no question mark in its path")
    return f"{driver}:///{path}"


def copy_template(path: Path, package: str, make: Callable[[Path], None]) -> None:
    """Make the database `path` unless it exists.

    Args:
        package: owner of the schema.
        make: writes a new, empty database of the installed version to the given path.
    """
    if path.exists():
        return
    temporary = path.with_name(f"{path.name}.copying-{uuid.uuid4().hex[:8]}")
    try:
        shutil.copyfile(_template(package, make), temporary)
        sync(temporary)
        # Unlike a rename, a link never replaces a database that another process has made in the meantime.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    except Exception as error:
        log.info("%s is made without a template (%s: %s)", path, type(error).__name__, error)
    finally:
        temporary.unlink(missing_ok=True)


def _template(package: str, make: Callable[[Path], None]) -> Path:
    directory = cache_directory()
    template = directory / f"{package}-{importlib.metadata.version(package)}.db"
    if template.exists():
        return template
    with FileLock(f"{template}.lock", timeout=MAKE_SECONDS):
        if not template.exists():
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                made, whole = Path(scratch) / "made.db", Path(scratch) / "whole.db"
                make(made)
                # This merges a write-ahead log into one file.
                with contextlib.closing(sqlite3.connect(made)) as connection:
                    connection.execute("VACUUM INTO ?", (str(whole),))
                write_atomic(template, whole.read_bytes())
    return template
