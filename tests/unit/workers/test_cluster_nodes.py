"""What is refused, and what is waited for, on a cluster whose nodes differ, or go."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from xray.tasks.spec import StageSpec
from xray.tasks.stage import _check_code
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.planning.demand import Demand
from xray_runtime.stages.identify import code_of
from xray_runtime.stages.kinds import PREPARE
from xray_runtime.store.identity import OTHER_ENVIRONMENT, environment_digest
from xray_runtime.workers import placement
from xray_runtime.workers.nodes import WorkerInfo, check_environment

TWO = [Demand("policy", 2, 1.0, 0.0)]
SMALL, LARGE = [{"CPU": 1.0}], [{"CPU": 1.0}, {"CPU": 1.0}]


def test_a_workhorse_with_other_code_is_refused() -> None:
    here = WorkerInfo("ab12", "node-7", 1, environment_digest())
    check_environment("Workhorse 0 of 'policy'", here, environment_digest())
    with pytest.raises(ConfigError, match=r"^Workhorse 0 of 'policy' on node-7: X-ray's code or a library there"):
        check_environment("Workhorse 0 of 'policy'", replace(here, environment_digest="0" * 64), environment_digest())


def test_a_stage_on_a_node_with_other_code_is_refused() -> None:
    code = code_of(PREPARE)
    spec = StageSpec(
        name="chats",
        kind="prepare",
        module=PREPARE.registered_in,
        config={},
        seed=0,
        runtime=RuntimeConfig(),
        code=code,
    )
    _check_code(spec, PREPARE)
    there = f"^chats on .*: {re.escape(OTHER_ENVIRONMENT)}"
    for other in ({"xray_runtime.seeding": "0" * 64}, {"xray_runtime.only_there": "0" * 64}):
        with pytest.raises(ConfigError, match=rf"{there} \({re.escape(next(iter(other)))}\)$"):
            _check_code(spec.model_copy(update={"code": code | other}), PREPARE)


def test_a_node_in_place_of_a_lost_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [SMALL, SMALL, LARGE]
    monkeypatch.setattr(placement, "NODE_SECONDS", 0.0)
    monkeypatch.setattr(placement, "num_lost", lambda: 1)
    monkeypatch.setattr(placement, "nodes", lambda: seen.pop(0))
    assert placement._nodes_for("ppo-1", TWO, timeout_s=60) == LARGE
    assert seen == []


def test_waiting_for_a_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "NODE_SECONDS", 0.0)
    monkeypatch.setattr(placement, "num_lost", lambda: 1)
    monkeypatch.setattr(placement, "nodes", lambda: SMALL)
    with pytest.raises(placement.BusyClusterError, match=r"waited 0.01 s .* ask for 2 CPUs .* the cluster has 1"):
        placement._nodes_for("ppo-1", TWO, timeout_s=0.01)


def test_what_a_cluster_never_had_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placement, "num_lost", lambda: 0)
    monkeypatch.setattr(placement, "await_answers", lambda: None)
    monkeypatch.setattr(placement, "nodes", lambda: SMALL)
    with (
        pytest.raises(ConfigError, match="ask for 2 CPUs"),
        placement.reserved(TWO, RuntimeConfig(wait_timeout_s=1e6), tmp_path),
    ):
        pass
