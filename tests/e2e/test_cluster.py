"""A cluster of three nodes on this machine: models are spread over it, a node is lost in mid-stage, another joins."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, XRAY, environment
from tests.e2e.ray_nodes import MAY_MOUNT, Cluster
from tests.waiting import wait_until
from xray_runtime.cluster.pool.nodes import PLACEMENT

pytestmark = pytest.mark.long

LONG = 1200.0
OVERRIDES = (
    "runtime.cpus_per_workhorse=1",
    "runtime.snapshot_every=1",
    "generator.engine=transformers",
    "sft.steps=4",
    "sft.engine={num_workhorses: 4, pipeline_parallel: 2}",
    "preferences.num_pairs=16",
    "reward.epochs=1",
    "reward.batch_size=8",
    "ppo.stages=[{iterations: 8, prompts_per_iteration: 8, minibatch_size: 4, max_new_tokens: 8, engine: "
    "{num_workhorses: 2, zero_stage: 1}}]",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    try:
        found.begin()
        for name in ("a", "b"):
            found.join(name)
        yield found
    finally:
        found.end()


def snapshots(output: Path) -> list[Path]:
    return list(output.glob("snapshots/ppo-1-*/step-" + "[0-9]" * 10))


def until(condition: Callable[[], Any], why: str) -> None:
    wait_until(condition, seconds=LONG, why=why)


@pytest.mark.timeout(3600)
def test_a_node_is_lost_and_another_joins(cluster: Cluster, tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "run.log"

    @contextlib.contextmanager
    def running(output: Path = output) -> Iterator[subprocess.Popen[bytes]]:
        overrides = [part for override in OVERRIDES for part in ("--set", override)]
        command = [XRAY, "run", "configs/tiny.yaml", "--output", str(output), *overrides]
        with log.open("ab") as file:
            run = subprocess.Popen(command, cwd=ROOT, env=environment() | cluster.variables, stdout=file, stderr=file)
        try:
            yield run
        finally:
            run.kill()

    def stages(output: Path = output) -> dict[str, Any]:
        content = json.loads((output / "lifecycle.json").read_text())
        return {stage["name"]: stage for stage in content["stages"]}

    def places(output: Path = output, stage: str = "ppo-1") -> list[dict[str, list[str]]]:
        """Of each attempt at the stage: role → node of each rank."""
        lines = (output / "logs" / stage / PLACEMENT).read_text().splitlines()
        models = [json.loads(line)["models"] for line in lines]
        return [{role: [rank["node"] for rank in ranks] for role, ranks in found.items()} for found in models]

    with running() as run:
        assert run.wait(LONG) == 0, log.read_text()
    calm = stages()
    [spread] = places()
    assert {node for nodes in spread.values() for node in nodes} == {"head", "a", "b"}
    assert len(spread["policy"]) == 2

    if MAY_MOUNT:
        # Where the nodes share no directory the same comes out: files go to them, and snapshots and models come back.
        alone = cluster.unshared / "run"
        with running(alone) as run:
            until(lambda: snapshots(alone) or run.poll() is not None, "no snapshot")
            for learner in cluster.learners("a") + cluster.learners("b"):
                learner.kill()
            assert run.wait(LONG) == 0, log.read_text()
        assert stages(alone)["ppo-1"]["attempts"] > calm["ppo-1"]["attempts"]
        nodes = {node for stage in ("sft", "ppo-1") for ranks in places(alone, stage)[-1].values() for node in ranks}
        assert nodes == {"head", "a", "b"}
        assert "not on a disk that all nodes share" in (alone / "logs" / "xray.log").read_text()
        assert [s["checkpoint"]["sha256"] for s in stages(alone).values()] == [
            s["checkpoint"]["sha256"] for s in calm.values()
        ]
    else:
        warnings.warn("no mounts here: an output directory that the nodes do not share was not tried", stacklevel=1)

    # The PPO stage once more, from the same parents.
    for name in ("ppo-1", "evaluate"):
        shutil.rmtree(calm[name]["checkpoint"]["uri"])
    with running() as run:
        until(lambda: snapshots(output) or run.poll() is not None, "no snapshot")
        nodes = [node for ranks in places()[-1].values() for node in ranks]
        lost = next(node for node in nodes if node != "head")
        assert cluster.workers(lost)
        cluster.kill(lost)
        cluster.join("c")
        assert run.wait(LONG) == 0, log.read_text()
    stormy = stages()
    assert stormy["sft"]["cached"]
    assert not stormy["ppo-1"]["cached"]
    # One attempt is lost with the node, and the next does not go back to it.
    assert stormy["ppo-1"]["attempts"] == calm["ppo-1"]["attempts"] + 2
    assert [stage["checkpoint"]["sha256"] for stage in stormy.values()] == [
        stage["checkpoint"]["sha256"] for stage in calm.values()
    ]
    after = {node for ranks in places()[-1].values() for node in ranks}
    assert after == {"head", "a", "b", "c"} - {lost}
    # The run's processes end with it, on every node.
    left = sorted(after)
    until(lambda: not any(cluster.workers(name) for name in left), "X-ray's workers go on after it")
