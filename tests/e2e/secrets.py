"""Recognisable secrets, and where they turn up."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

SECRETS = {
    name: f"s3cr3t-of-{name}-5f0c"
    for name in ("mlflow", "prefect", "database", "cloud-key", "cloud-session", "hub", "chat", "model-api")
}

OTHERS = {
    "PREFECT_API_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://xray:{SECRETS['database']}@127.0.0.1:1/none",
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": SECRETS["cloud-key"],
    "AWS_SESSION_TOKEN": SECRETS["cloud-session"],
    "HF_TOKEN": SECRETS["hub"],
    "XRAY_NOTIFY_URL": f"https://127.0.0.1:1/services/{SECRETS['chat']}",
    "VLLM_API_KEY": SECRETS["model-api"],
}
"""What a person's shell may hold besides the addresses of servers."""


def environments(run: int) -> list[tuple[str, dict[str, str]]]:
    """(command line, environment) of each process below `run`."""
    found = []
    for process in psutil.Process(run).children(recursive=True):
        # They come and go.
        with contextlib.suppress(psutil.Error, OSError):
            found.append((" ".join(process.cmdline()), process.environ()))
    return found


def places_of(secrets: set[str], folder: Path) -> list[tuple[str, str]]:
    """(file, secret) wherever one stands in a file below `folder`."""
    found = []
    for path in sorted(folder.rglob("*")):
        # Of a run at work, files may be gone again.
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                found += [(str(path), secret) for secret in secrets if secret.encode() in content]
    return found
