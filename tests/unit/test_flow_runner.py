"""The task runner of flows that a script calls."""

from __future__ import annotations

import pytest
from prefect.context import refresh_global_settings_context
from prefect.settings import get_current_settings

import xray
from xray.flow_runner import SERVER_START


@pytest.mark.parametrize(("named", "seconds"), [(None, 300), ("45", 45)])
def test_a_flow_waits_for_its_server_on_a_busy_machine(
    named: str | None, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERVER_START, raising=False)
    if named is not None:
        monkeypatch.setenv(SERVER_START, named)
    refresh_global_settings_context()
    xray.task_runner()
    assert get_current_settings().server.ephemeral.startup_timeout_seconds == seconds
    monkeypatch.undo()
    refresh_global_settings_context()
