"""What is refused, and what is waited for, on a cluster whose nodes differ, or are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from xray_runtime.cluster.pool import acquisition
from xray_runtime.cluster.pool.acquisition import BusyClusterError, await_nodes
from xray_runtime.cluster.pool.demand import Demand
from xray_runtime.cluster.pool.nodes import check_environment
from xray_runtime.cluster.types import WorkerInfo
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.store.identity import environment_digest

TWO = [Demand("policy", 2, 1.0, 0.0)]
SMALL, LARGE = [{"CPU": 1.0}], [{"CPU": 1.0}, {"CPU": 1.0}]


def test_a_workhorse_with_other_code_is_refused() -> None:
    worker = WorkerInfo("ab12", "node-7", 1, environment_digest())
    check_environment("Workhorse 0 of 'policy'", worker, environment_digest())
    with pytest.raises(ConfigError, match=r"^Workhorse 0 of 'policy' on node-7: X-ray's code or a library there"):
        check_environment("Workhorse 0 of 'policy'", replace(worker, environment_digest="0" * 64), environment_digest())


def test_a_node_in_place_of_a_lost_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [SMALL, SMALL, LARGE]
    monkeypatch.setattr(acquisition, "NODE_SECONDS", 0.0)
    monkeypatch.setattr(acquisition, "num_lost", lambda: 1)
    monkeypatch.setattr(acquisition, "nodes", lambda: seen.pop(0))
    await_nodes("ppo-1", TWO, timeout_s=60)
    assert seen == []


def test_waiting_for_a_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquisition, "NODE_SECONDS", 0.0)
    monkeypatch.setattr(acquisition, "num_lost", lambda: 1)
    monkeypatch.setattr(acquisition, "nodes", lambda: SMALL)
    with pytest.raises(BusyClusterError, match=r"waited 0.01 s .* need 2 CPUs .* the cluster has 1"):
        await_nodes("ppo-1", TWO, timeout_s=0.01)


def test_demand_beyond_the_cluster_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquisition, "num_lost", lambda: 0)
    monkeypatch.setattr(acquisition, "nodes", lambda: SMALL)
    with pytest.raises(ConfigError, match="need 2 CPUs"):
        await_nodes("ppo-1", TWO, timeout_s=1e6)
