"""The studio's metrics as Prometheus reads them, and the alerts over them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.studio.world import post, run_at_work, studio
from xray.flows.cycles import FILE, Cycle, cycle_directory, write_cycle
from xray_runtime.kernel.evidence.view import run_lock
from xray_runtime.kernel.history.reference import find, open_lineage_store
from xray_runtime.live.serving.recording import COUNTERS

DEPLOYMENTS = Path(__file__).parents[3] / "deployments"
Sample = tuple[str, tuple[tuple[str, str], ...]]


@pytest.fixture
def output(fresh: Callable[[], Path]) -> Path:
    return fresh()


def scraped(text: str) -> dict[Sample, float]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def cycle(output: Path, state: str) -> None:
    shas = {"start": "a" * 64, "data": "b" * 64, "feedback": ["c" * 64], "verdicts": None}
    made = Cycle(number=1, first=1, last=2, state=state, **shas)
    write_cycle(output, made)
    os.utime(cycle_directory(output, made) / FILE, (1_800_000_000, 1_800_000_000))


def test_runs_stages_cycles_and_audits_are_counted(output: Path) -> None:
    client = studio(output)
    found = scraped(client.get("/metrics").text)
    assert found[("xray_runs", (("status", "running"),))] == 0
    # Without an audit there is no metric of soundness, and without a cycle none of its state.
    assert not {name for name, _ in found} & {"xray_audit_sound", "xray_cycle_state"}
    post(client, "/audit", hashing="yes")
    assert scraped(client.get("/metrics").text)[("xray_audit_sound", ())] == 1
    run_at_work(output, "ppo", [{}, *({"rollout/tokens_per_s": 100.0 * n} for n in (1, 2))])
    cycle(output, "held")
    with run_lock(output, "live-1"):
        found = scraped(client.get("/metrics").text)
    where = (("run", "live-1"), ("stage", "ppo"))
    assert found[("xray_runs", (("status", "running"),))] == 1
    assert found[("xray_stage_metric", (("metric", "rollout/tokens_per_s"), *where))] == 200
    assert found[("xray_stage_step", where)] == 2
    assert found[("xray_cycle_state", (("state", "held"),))] == 1
    assert found[("xray_cycle_state", (("state", "begun"),))] == 0
    assert found[("xray_cycle_timestamp_seconds", ())] == 1_800_000_000
    node = find("sft", open_lineage_store(output, None))
    (node.directory / "model.safetensors").write_bytes(b"other bytes")
    post(client, "/audit", hashing="yes")
    found = scraped(client.get("/metrics").text)
    assert found[("xray_audit_sound", ())] == 0
    assert found[("xray_audit_broken_findings", ())] >= 1
    assert found[("xray_runs", (("status", "interrupted"),))] == 1


def test_a_tampered_cycle_is_a_metric_beside_all_others(output: Path) -> None:
    cycle(output, "candidate")
    client = studio(output)
    assert scraped(client.get("/metrics").text)[("xray_cycles_sound", ())] == 1
    [path] = (output / "flywheel").glob(f"*/{FILE}")
    path.write_text(path.read_text().replace("candidate", "held"))
    found = scraped(client.get("/metrics").text)
    assert found[("xray_cycles_sound", ())] == 0
    assert ("xray_withdrawals", ()) in found
    assert "xray_cycle_state" not in {name for name, _ in found}


def test_a_scrape_of_an_open_studio_bears_its_token(output: Path) -> None:
    client = studio(output, token="a long token")
    assert client.get("/metrics").status_code == 303
    assert client.get("/metrics", headers={"authorization": "Bearer another"}).status_code == 303
    bearer = {"authorization": "Bearer a long token"}
    assert "xray_runs" in client.get("/metrics", headers=bearer).text
    # It opens nothing else.
    assert client.get("/rollouts", headers=bearer).status_code == 303
    assert client.post("/audit", headers=bearer).status_code == 401


def test_the_alerts_are_over_metrics_that_exist(output: Path) -> None:
    run_at_work(output, "ppo", [{}, *({"rollout/tokens_per_s": 100.0 * n} for n in (1, 2))])
    cycle(output, "begun")
    client = studio(output)
    post(client, "/audit")
    with run_lock(output, "live-1"):
        found = scraped(client.get("/metrics").text)
    names = {name for name, _ in found} | {f"{name}_total" for name in COUNTERS.values()}
    labels = {pair for _, pairs in found for pair in pairs} | {("status", "interrupted")}
    [group] = yaml.safe_load((DEPLOYMENTS / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"]}
    assert {"XrayAuditBroken", "XrayCycleHeld", "XrayCycleStuck"} <= alerts.keys()
    for name, rule in alerts.items():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}, name
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert rule["annotations"]["summary"], name
        expression = rule["expr"]
        assert all(expression.count(left) == expression.count(right) for left, right in ("()", "{}", "[]")), name
        used = set(re.findall(r"\bxray_\w+", expression))
        assert used, name
        assert used <= names, (name, used - names)
        assert set(re.findall(r'(\w+)="(\w+)"', expression)) <= labels, name


def test_prometheus_finds_the_rules_and_the_ports() -> None:
    config = yaml.safe_load((DEPLOYMENTS / "prometheus.yaml").read_text(encoding="utf-8"))
    assert all((DEPLOYMENTS / name).is_file() for name in config["rule_files"])
    assert [job["job_name"] for job in config["scrape_configs"]] == ["xray-studio", "xray-serve", "ray"]
