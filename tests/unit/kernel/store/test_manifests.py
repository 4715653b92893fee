"""The cluster files in deployments/ are as Ray and Kubernetes take them, agree with each other, and hold no secret."""

from __future__ import annotations

import copy
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from xray.deployments.names import POOL
from xray.deployments.presets import VARIABLES

DEPLOYMENTS = Path(__file__).parents[4] / "deployments"
DOCUMENTS = [
    document
    for name in ("kuberay.yaml", "servers.yaml")
    for document in yaml.safe_load_all((DEPLOYMENTS / name).read_text())
]
RAY = yaml.safe_load((DEPLOYMENTS / "ray-cluster.yaml").read_text())
POD = {"securityContext", "volumes", "containers", "terminationGracePeriodSeconds"}
CONTAINER = {
    "name",
    "image",
    "command",
    "args",
    "env",
    "ports",
    "readinessProbe",
    "livenessProbe",
    "resources",
    "securityContext",
    "volumeMounts",
}


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d for d in DOCUMENTS if d["kind"] == kind}


def pods() -> Iterator[dict[str, Any]]:
    for document in DOCUMENTS:
        if document["kind"] == "Deployment":
            yield document["spec"]["template"]["spec"]
        if document["kind"] == "RayCluster":
            for group in [document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]]:
                yield group["template"]["spec"]


def containers() -> Iterator[dict[str, Any]]:
    for pod in pods():
        yield from pod["containers"]


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in container.get("env", [])}


def test_ray_takes_the_cluster_file() -> None:
    prepared = prepare_config(copy.deepcopy(RAY))
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == len(RAY["provider"]["worker_ips"])
    with pytest.raises(jsonschema.ValidationError, match="head_start_commands"):
        validate_config(prepared | {"head_start_commands": []})


def test_every_ray_node_asks_for_the_token() -> None:
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = RAY[key][-1]
        assert "ray start" in start
        assert re.search(r"set -a;.*RAY_AUTH_MODE=token;.*set \+a;", start)
    assert "~/.ray/auth_token" in RAY["file_mounts"]
    for container in containers():
        if container["name"] in ("ray-head", "ray-worker", "worker"):
            found = variables(container)
            assert found["RAY_AUTH_MODE"]["value"] == "token"
            assert found["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "xray", "key": "auth_token"}


def test_nothing_secret_stands_in_a_manifest() -> None:
    for container in containers():
        for name, entry in variables(container).items():
            assert entry.keys() in ({"name", "value"}, {"name", "valueFrom"})
            if re.search("TOKEN|PASS|AUTH_STRING|KEY", name):
                assert "secretKeyRef" in entry["valueFrom"]
    assert not of_kind("Secret")


def test_pods_are_confined_and_limited() -> None:
    claims = of_kind("PersistentVolumeClaim")
    for pod in pods():
        assert pod.keys() <= POD
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 1000
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            assert "emptyDir" in volume or volume["persistentVolumeClaim"]["claimName"] in claims
        for container in pod["containers"]:
            assert container.keys() <= CONTAINER
            assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()


def test_the_nodes_of_the_ray_cluster_are_alike() -> None:
    (cluster,) = of_kind("RayCluster").values()
    spec = cluster["spec"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert spec["rayVersion"] == importlib.metadata.version("ray")
    groups = spec["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["cpu", "gpu"]
    # What the cluster does not have is refused: it must not count on growing.
    assert all(g["minReplicas"] == g["replicas"] == g["maxReplicas"] for g in groups)
    every = [spec["headGroupSpec"], *groups]
    assert all(isinstance(value, str) for group in every for value in group["rayStartParams"].values())
    nodes = [group["template"]["spec"]["containers"][0] for group in every]
    worker = of_kind("Deployment")["xray-worker"]["spec"]["template"]["spec"]["containers"][0]
    assert len({node["image"] for node in [*nodes, worker]}) == 1
    shared = [{m["name"]: m["mountPath"] for m in node["volumeMounts"]}["shared"] for node in [*nodes, worker]]
    assert set(shared) == {"/shared"}
    assert nodes[2]["resources"]["limits"]["nvidia.com/gpu"] >= 1


def test_nodes_with_gpus_may_use_rdma() -> None:
    (cluster,) = of_kind("RayCluster").values()
    cpu, gpu = (group["template"]["spec"]["containers"][0] for group in cluster["spec"]["workerGroupSpecs"])
    assert gpu["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert cpu["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert any(name.startswith("rdma/") for name in gpu["resources"]["limits"])
    found = variables(gpu)
    assert found.keys() == variables(cpu).keys() | {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


def test_addresses_lead_to_services() -> None:
    worker = of_kind("Deployment")["xray-worker"]["spec"]["template"]["spec"]["containers"][0]
    found = {name: entry.get("value") for name, entry in variables(worker).items()}
    assert found.keys() >= set(VARIABLES)
    (cluster,) = of_kind("RayCluster")
    assert found["RAY_ADDRESS"] == f"{cluster}-head-svc:6379"
    assert f"--pool {POOL}" in worker["args"][0]
    servers = of_kind("Deployment")["xray-servers"]["spec"]["template"]
    listening = {port["containerPort"] for c in servers["spec"]["containers"] for port in c["ports"]}
    for name, path in (("PREFECT_API_URL", "/api"), ("MLFLOW_TRACKING_URI", "")):
        host, port = re.fullmatch(rf"http://([a-z-]+):(\d+){path}", found[name]).groups()  # type: ignore[union-attr]
        service = of_kind("Service")[host]["spec"]
        assert [p["port"] for p in service["ports"]] == [int(port)]
        assert service["selector"] == servers["metadata"]["labels"]
        assert int(port) in listening
    allowed = next(arg for c in servers["spec"]["containers"] for arg in c.get("args", []) if "allowed-hosts" in arg)
    assert "xray-mlflow:5000" in allowed


def test_the_image_holds_what_is_installed_and_no_root() -> None:
    text = (DEPLOYMENTS / "Containerfile").read_text()
    root = DEPLOYMENTS.parent
    copied = re.findall(r"^COPY (?:--chown=\S+ )?(?!--from)(.+) \S+$", text, re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert all((root / source).exists() for source in sources)
    assert sources >= {"pyproject.toml", "constraints.txt", "flows", "tasks", "xray_runtime", "deployments", "configs"}
    ignored = (root / ".dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in sources} <= set(ignored)
    last = text.rsplit("\nFROM ", 1)[1]
    assert "USER 1000" in last
    assert 'ENTRYPOINT ["xray"]' in last
