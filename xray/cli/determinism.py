"""`xray run --verify-determinism`: compute the first steps of each stage twice and compare the bytes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from xray.cli.supervisor import supervise
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.lineage.log import LIFECYCLE
from xray_runtime.terminal import print_table


def verify_determinism(job: dict[str, Any], runtime: RuntimeConfig, directory: Path, console: Console) -> int:
    """Run the shortened graph twice below `directory`; returns 0 if every checkpoint has the same bytes, else 1."""
    job = job | {"replace_output": True, "shorten": True}
    if "config" in job:
        # A shared store would supply the second result.
        job["config"] = job["config"] | {"runtime": job["config"]["runtime"] | {"storage": None}}
    digests: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="determinism-") as root:
        for name in ("first", "second"):
            output = Path(root) / name
            output.mkdir()
            console.print(f"{name} run, a step or two of each stage", highlight=False)
            code = supervise(output, restarts=0, stall_timeout_s=runtime.stall_timeout_s, console=console, **job)
            if code:
                return code
            content = json.loads((output / LIFECYCLE).read_text())
            digests.append({stage["name"]: stage["checkpoint"]["sha256"] for stage in content["stages"]})
    first, second = digests
    rows = [
        (stage, sha256[:12], second.get(stage, "")[:12], "same bytes" if sha256 == second.get(stage) else "DIFFERENT")
        for stage, sha256 in first.items()
    ]
    print_table(console, ("stage", "first", "second", ""), rows)
    return 0 if first == second else 1
