"""Sources outside of the store in an audit: files that stages read, and the commits of their code."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.kernel.history.audit_check import Finding
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.trust.provenance import ROOT


def check_sources(node: Node) -> Iterator[Finding]:
    """Local files that the stage read, if they still exist; only those that a sound signature names are opened."""
    if node.statement is None:
        return
    for dependency in node.statement.predicate.build.dependencies:
        if dependency.digest is None or not dependency.uri or dependency.uri.startswith("xray:"):
            continue
        path = Path(dependency.uri)
        if path.suffix == ".gguf":
            # Its digest also covers files next to it.
            continue
        if path.is_absolute() and path.is_file() and not path.is_symlink():
            try:
                actual = file_sha256(path)
            except OSError:
                continue
            if actual != dependency.digest.sha256:
                yield Finding(node.name, "source-changed", f"{dependency.name} {dependency.uri}")


def check_commits(commits: set[str | None]) -> Iterator[Finding]:
    """Commits that this repository does not have."""
    for commit in sorted(filter(None, commits)) if (ROOT / ".git").exists() else []:
        if len(commit) not in (40, 64) or set(commit) - set("0123456789abcdef"):
            yield Finding("code", "code-unavailable", "the recorded commit is not a commit's name")
            continue
        command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
        try:
            known = subprocess.run(command, capture_output=True, timeout=20).returncode == 0
        except (OSError, subprocess.SubprocessError):
            return
        if not known:
            yield Finding("code", "code-unavailable", f"commit {commit[:12]}")
