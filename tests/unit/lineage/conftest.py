"""One synthetic lifecycle, copied for every case."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.lineage.synthetic import Lifecycle


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("untouched") / "run"
    Lifecycle(output).whole()
    return output


@pytest.fixture
def fresh(untouched: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the untouched output under a name of one's own."""

    def copy(name: str = "run") -> Path:
        output = Path(shutil.copytree(untouched, tmp_path / name, symlinks=True))
        # MLflow keeps where an experiment's artifacts go: those of runs to come belong to the copy.
        with contextlib.closing(sqlite3.connect(output / "mlflow.db")) as connection, connection:
            move = "update experiments set artifact_location = replace(artifact_location, ?, ?)"
            connection.execute(move, (str(untouched), str(output)))
        return output

    return copy
