"""The lifecycle flow of `xray run` against the one that is deployed."""

from __future__ import annotations

import inspect
import subprocess
import sys

from tests.e2e.conftest import ROOT

LARGE = ("xray.flows.lifecycle_run", "xray.flows.lifecycle", "xray_runtime.methods.lifecycle", "mlflow", "torch")


def test_each_stage_process_imports_a_small_module() -> None:
    """A stage's process imports the module of its flow."""
    code = f"import sys, xray.flows.own_lifecycle; print([name for name in {LARGE} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_both_flows_have_one_name_and_the_same_parameters() -> None:
    from xray.flows.lifecycle import lifecycle
    from xray.flows.own_lifecycle import own_lifecycle

    assert (own_lifecycle.name, own_lifecycle.flow_run_name) == (lifecycle.name, lifecycle.flow_run_name)
    assert list(inspect.signature(own_lifecycle.fn).parameters) == list(inspect.signature(lifecycle.fn).parameters)
    # Only one of them has a form.
    assert "LifecycleConfig" in str(lifecycle.parameters)
    assert "LifecycleConfig" not in str(own_lifecycle.parameters)
