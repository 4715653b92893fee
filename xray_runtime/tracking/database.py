"""MLflow's SQLite database of an output directory, made from a template."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from xray_runtime.template_database import copy_template


def prepare_mlflow_database(path: Path) -> None:
    """Make MLflow's database `path` before it is opened; does nothing if it exists."""
    copy_template(path, "mlflow", _make)


def _make(path: Path) -> None:
    command = [sys.executable, "-m", "mlflow", "db", "upgrade", f"sqlite:///{path}"]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
