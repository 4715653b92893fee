"""When a run may be taken from the store without Prefect and Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xray.flows import cached
from xray_runtime.methods.lifecycle import LifecycleConfig


@pytest.mark.parametrize(
    ("content", "variables", "config", "looks"),
    [
        ('{"status": "completed"}', {}, {}, True),
        # Killed after its last stage: Prefect shows it at work, and only a run with a server can tell it otherwise.
        ('{"status": "running"}', {}, {}, False),
        ('{"status": "failed"}', {}, {}, False),
        ('{"status": "compl', {}, {}, False),
        ("[]", {}, {}, False),
        (None, {}, {}, False),
        # There it shows on a page, and devices are the cluster's.
        ('{"status": "completed"}', {"PREFECT_API_URL": "http://host:4200/api"}, {}, False),
        ('{"status": "completed"}', {"RAY_ADDRESS": "host:6379"}, {}, False),
        ('{"status": "completed"}', {}, {"runtime": {"parallel": "auto"}}, False),
    ],
)
def test_only_a_run_that_ended_here_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: str | None,
    variables: dict[str, str],
    config: dict[str, Any],
    looks: bool,
) -> None:
    for name in ("PREFECT_API_URL", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if content is not None:
        (tmp_path / "lifecycle.json").write_text(content)
    looked: list[Path] = []

    def stored_stages(graph: Any, output: Path, store: Any) -> list[tuple[str, None]]:
        looked.append(output)
        return [("prepare", None)]

    monkeypatch.setattr(cached, "stored_stages", stored_stages)
    assert cached.take_cached(LifecycleConfig.model_validate(config), tmp_path, None, lambda stage: None) is None
    assert bool(looked) == looks


RECORD = """
import sys
import xray.flows.cached
from xray.tasks.registration import register
from xray.tasks.run_record import RunRecord
from xray.tasks.this_flow import flow_parameters, prefect_tags, trigger_of_run
assert trigger_of_run()[0] is None and trigger_of_run()[1]["kind"] == "command"
assert flow_parameters() == prefect_tags() == {}
print(*sys.modules)
"""


def test_its_record_needs_neither_prefect_nor_ray() -> None:
    shown = subprocess.run([sys.executable, "-c", RECORD], capture_output=True, text=True, check=True)
    assert (
        set(shown.stdout.split()) & {"prefect", "ray", "torch", "transformers", "mlflow", "numpy", "pyarrow"} == set()
    )
