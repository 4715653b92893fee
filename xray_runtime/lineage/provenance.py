"""Facts about where and with what a stage ran: code, packages, hardware, environment variables, outside sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from xray_runtime.credentials import strip_credentials
from xray_runtime.lineage.statement import OutsideSource
from xray_runtime.store.identity import digest, file_sha256

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "xray_runtime")
GIT_SECONDS = 60

RELEVANT = re.compile(
    r"(CUBLAS|CUDA|DEEPSPEED|DS|GLOO|KMP|MALLOC|MKL|NCCL|NVIDIA|OMP|TORCH|VLLM)_\w+|HF_ENDPOINT|HF_HOME|HF_HUB_OFFLINE|"
    r"LD_PRELOAD|MLFLOW_TRACKING_URI|PREFECT_API_URL|PYTHONHASHSEED|PYTHONPATH|RAY_ADDRESS|TOKENIZERS_PARALLELISM|"
    r"XRAY_ALLOWED_IMPORTS|XRAY_HOME"
)
"""What can change numbers, and where things were. Of the servers' many variables no others: they hold passwords too."""
SECRET = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|HEADER|PRIVATE", re.IGNORECASE)


@cache
def code() -> tuple[dict[str, str | None], bytes]:
    """(git commit, digest of uncommitted changes, digest of the package), and the uncommitted changes themselves.

    Outside of a git checkout of X-ray there is no commit; the package's digest is always known.
    """
    commit = _git("rev-parse", "HEAD") if _git("ls-files", "--error-unmatch", "xray_runtime/__init__.py") else b""
    diff = b""
    if commit:
        diff = _git("diff", "--binary", "HEAD", "--", *PACKAGES, "pyproject.toml")
        for path in _git("ls-files", "-z", "--others", "--exclude-standard", "--", *PACKAGES).split(b"\0"):
            # Other files that lie there are nobody's business.
            if path.endswith((b".py", b".html", b".md")):
                diff += _git("diff", "--binary", "--no-index", "--", os.devnull, os.fsdecode(path))
    facts = {
        "git_commit": commit.decode().strip() or None,
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
        "package_sha256": package_digest(),
    }
    return facts, diff


def environment() -> dict[str, Any]:
    """Package versions, hardware and the environment variables that can matter, secrets left out."""
    return {
        "packages": _packages(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu(),
        "cpus": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "variables": variables(os.environ),
    }


def variables(values: Any) -> dict[str, str]:
    """The variables that can matter: nothing whose name sounds like a secret, addresses without login or query."""
    return {
        name: strip_credentials(value)
        for name, value in sorted(values.items())
        if RELEVANT.fullmatch(name) and not SECRET.search(name)
    }


def outside_source(found: OutsideSource) -> dict[str, Any]:
    """A resource the stage read from outside the store: a file or directory by its bytes, a hub's by its commit."""
    resource: dict[str, Any] = {
        "name": found.field,
        "uri": found.name,
        "annotations": {"kind": found.kind} | found.terms.model_dump(exclude_none=True),
    }
    if found.kind == "package":
        return resource | {"uri": f"pkg:pypi/{found.digest.replace('==', '@')}"}
    if found.kind == "hub":
        return resource | {"annotations": resource["annotations"] | {"commit": found.digest}}
    return resource | {"digest": {"sha256": found.digest}}


@cache
def package_digest() -> str:
    """One digest over X-ray's own files."""
    files = sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*") if p.suffix in (".py", ".html", ".md"))
    return digest([[p.relative_to(ROOT).as_posix(), file_sha256(p)] for p in files])


@cache
def _packages() -> dict[str, str]:
    return dict(sorted((d.metadata["Name"].lower(), d.version) for d in importlib.metadata.distributions()))


def _git(*arguments: str) -> bytes:
    """What git prints; nothing where there is no git, no repository, or it takes too long."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, timeout=GIT_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


@cache
def _gpus() -> list[str]:
    # Asking the driver's files does not open a CUDA context in this process.
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text().splitlines()
        found += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return found
