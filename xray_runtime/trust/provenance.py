"""The code, packages, hardware, environment variables and outside sources of a stage's run."""

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

import xray_runtime
from xray_runtime.kernel.confine.confine import confinement
from xray_runtime.kernel.credentials import strip_credentials
from xray_runtime.kernel.evidence.statement import OutsideSource
from xray_runtime.kernel.store.identity import digest, file_sha256

ROOT = Path(xray_runtime.__file__).parents[1]
FOLDERS = {"xray/flows": "flows", "xray/tasks": "tasks", "xray_runtime": "xray_runtime"}
"""Folder of an installed package → its folder in a checkout."""
GIT_SECONDS = 60
NAMED = re.compile(r"^(Name|Version): *(.*?) *$", re.MULTILINE)
"""Lines of a package's metadata."""

RELEVANT = re.compile(
    r"(CUBLAS|CUDA|DEEPSPEED|DS|GLOO|KMP|MALLOC|MKL|NCCL|NVIDIA|OMP|TORCH|VLLM)_\w+|HF_ENDPOINT|HF_HOME|HF_HUB_OFFLINE|"
    r"LD_PRELOAD|MLFLOW_TRACKING_URI|PREFECT_API_URL|PYTHONHASHSEED|PYTHONPATH|RAY_ADDRESS|TOKENIZERS_PARALLELISM|"
    r"XRAY_ALLOWED_(COMMANDS|IMPORTS|PATHS)|XRAY_HOME"
)
"""Variables that can change numbers, and addresses. No others of the servers' many variables: some hold passwords."""
SECRET = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|HEADER|PRIVATE", re.IGNORECASE)


@cache
def code() -> tuple[dict[str, str | None], bytes]:
    """({git commit, digest of uncommitted changes, digest of the package}, the uncommitted changes).

    Outside of a git checkout of X-ray there is no commit; the package's digest is always known.
    """
    commit = _git("rev-parse", "HEAD") if _git("ls-files", "--error-unmatch", "xray_runtime/__init__.py") else b""
    diff = b""
    if commit:
        diff = _git("diff", "--binary", "HEAD", "--", *FOLDERS.values(), "pyproject.toml")
        for path in _git("ls-files", "-z", "--others", "--exclude-standard", "--", *FOLDERS.values()).split(b"\0"):
            # Other files may be private.
            if path.endswith((b".py", b".html", b".md")):
                diff += _git("diff", "--binary", "--no-index", "--", os.devnull, os.fsdecode(path))
    facts = {
        "git_commit": commit.decode().strip() or None,
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
        "package_sha256": package_digest(),
    }
    return facts, diff


def environment() -> dict[str, Any]:
    """Package versions, hardware and the environment variables that can matter, without secrets."""
    return _machine() | {"variables": variables(os.environ)}


@cache
def _machine() -> dict[str, Any]:
    packages: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # Python imports the first of a name; setuptools puts older ones that it brings behind them.
        packages.setdefault(*_name_and_version(distribution))
    # Unlike a call of CUDA, reading the driver's files opens no context in this process.
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "packages": dict(sorted(packages.items())),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": next(iter(_values(Path("/proc/cpuinfo"), "model name")), platform.processor()),
        "cpus": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "sandbox": confinement(),
        "gpus": [model for path in gpus for model in _values(path, "Model:")],
    }


def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    # `metadata` and `version` each parse the whole text, with the package's README: most of a second for all.
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    fields = dict(NAMED.findall(text.partition("\n\n")[0]))
    return fields["Name"].lower(), fields["Version"]


def variables(values: Any) -> dict[str, str]:
    """The variables that can matter: none with a name like a secret's, and addresses without login or query."""
    return {
        name: strip_credentials(value)
        for name, value in sorted(values.items())
        if RELEVANT.fullmatch(name) and not SECRET.search(name)
    }


def outside_source(found: OutsideSource) -> dict[str, Any]:
    """A resource from outside the store: a file or directory by its bytes, a hub name by its commit."""
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
    """One digest over X-ray's own files, equal for a checkout and an installed package."""
    found = list[list[str]]()
    for installed, checkout in FOLDERS.items():
        folder = ROOT / installed if (ROOT / installed).is_dir() else ROOT / checkout
        files = (path for path in folder.rglob("*") if path.suffix in (".py", ".html", ".md"))
        found += [[f"{installed}/{path.relative_to(folder).as_posix()}", file_sha256(path)] for path in files]
    return digest(sorted(found))


def _git(*arguments: str) -> bytes:
    """The output of git; empty without git or a repository, or if it takes too long."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, timeout=GIT_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def _values(path: Path, field: str) -> list[str]:
    """The values of a field in a file of /proc."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith(field)]
