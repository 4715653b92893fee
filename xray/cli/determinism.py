"""`xray run --verify-determinism`: the first steps of every stage twice from nothing, and whether the bytes agree."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from xray.cli.supervisor import supervise
from xray.tasks.workspace import CONFIG
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import resolved_yaml
from xray_runtime.config.preferences import DatasetPreferences, GoldPreferences
from xray_runtime.stages.spec import JUDGED_PAIRS
from xray_runtime.store.manifest import MANIFEST

STEPS = 2
MAX_PAIRS = 64


def shortened(config: LifecycleConfig) -> LifecycleConfig:
    """`config` with two steps or iterations in each training stage, all else alike."""
    data = config.model_dump()
    data["sft"]["steps"] = STEPS
    data["reward"]["epochs"] = 1
    if isinstance(config.preferences, GoldPreferences):
        data["preferences"]["num_pairs"] = min(config.preferences.num_pairs, MAX_PAIRS)
    elif isinstance(config.preferences, DatasetPreferences) and (Path(config.preferences.path) / MANIFEST).is_file():
        # What people judged lies in the store of `directory`; here its bytes are wanted, not its lineage.
        data["preferences"]["path"] = str(Path(config.preferences.path) / JUDGED_PAIRS)
    for stage in data["ppo"]["stages"]:
        stage["iterations"] = STEPS
    # What is fetched is not computed.
    data["runtime"]["storage"] = None
    data["evaluate"]["num_prompts"] = min(config.evaluate.num_prompts, 16)
    return LifecycleConfig.model_validate(data)


def verify_determinism(config: LifecycleConfig, directory: Path, console: Console) -> int:
    """Run the shortened lifecycle twice below `directory`; exit code 0 where every checkpoint has the same bytes."""
    short = shortened(config)
    found: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="determinism-") as root:
        for name in ("first", "second"):
            output = Path(root) / name
            output.mkdir()
            (output / CONFIG).write_text(resolved_yaml(short), encoding="utf-8")
            console.print(f"{name} run of {STEPS} steps a stage", highlight=False)
            code = supervise(
                output, as_json=False, restarts=0, stall_timeout_s=short.runtime.stall_timeout_s, console=console
            )
            if code:
                return code
            content = json.loads((output / "lifecycle.json").read_text())
            found.append({stage["name"]: stage["checkpoint"]["sha256"] for stage in content["stages"]})
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "first", "second", ""):
        table.add_column(column)
    first, second = found
    for stage, sha256 in first.items():
        same = sha256 == second[stage]
        table.add_row(stage, sha256[:12], second[stage][:12], "same bytes" if same else "[red]different[/red]")
    console.print(table)
    return 0 if first == second else 1
