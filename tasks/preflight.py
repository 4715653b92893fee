"""Checks before a run computes: its resources exist, and the machines of a cluster can reach its servers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from xray.tasks.stored_results import stored_stages
from xray_runtime.cluster.pool.demand import Resources, check_call
from xray_runtime.cluster.pool.machine import local_node, this_machine
from xray_runtime.kernel.config.section import Section, sections
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.credentials import strip_credentials
from xray_runtime.kernel.graph.graph import Graph, StageCall
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.network import is_loopback
from xray_runtime.kernel.store.hub import check_on_hub
from xray_runtime.kernel.store.shared import SharedStore, StorageError, open_shared
from xray_runtime.kernel.tracking.mirrors import require_mirror
from xray_runtime.models.quantized import check_plain

SERVERS = {"PREFECT_API_URL": "Prefect server", "MLFLOW_TRACKING_URI": "MLflow server"}


def check_run(graph: Graph, device: str, nodes: Sequence[Resources] | None, output: Path | None = None) -> None:
    """Check the whole graph of a run before it starts: its shared store, its mirror, and each stage (`check_stages`).

    Args:
        output: directory of the run, to check the services of stages that it does not have; None: check none.

    Raises:
        ConfigError: the store cannot be reached, the mirror is not installed, or a stage fails its check.
    """
    if graph.runtime.storage is not None:
        try:
            SharedStore(graph.runtime.storage).check()
        except StorageError as error:
            raise ConfigError(f"runtime.storage: {error}") from None
    require_mirror(graph.runtime.mirror)
    check_stages(graph.calls.values(), device, nodes)
    if output is not None:
        check_services(graph, graph.calls.values(), device, output)


def check_before_start(graph: Graph, output: Path | None = None) -> None:
    """`check_run` before Ray starts: for this machine, unless RAY_ADDRESS names a cluster. Raises ConfigError."""
    machine = this_machine(graph.runtime.device)
    nodes = None if os.environ.get("RAY_ADDRESS") else [local_node(machine)]
    check_run(graph, machine.device, nodes, output)


def check_stages(calls: Iterable[StageCall], device: str, nodes: Sequence[Resources] | None) -> None:
    """Check that the cluster has the stages' resources, hubs the repositories that they name, and that no directory of
    theirs holds a quantized model.

    Args:
        nodes: resources of each node. None: skip the check, because the cluster is not connected yet.

    Raises:
        ConfigError: like `check_call` and `check_on_hub`, or a model is quantized.
    """
    for call in calls:
        if nodes is not None:
            check_call(call, device, nodes)
        for field, value in call.kind.outside_of(call.config).items():
            name = f"{call.name}.{field}"
            check_on_hub(value, name, "model" if field == "model" else "dataset")
            if field == "model":
                try:
                    check_plain(value, name)
                except ValueError as error:
                    raise ConfigError(str(error)) from None


def check_services(graph: Graph, calls: Iterable[StageCall], device: str, output: Path) -> None:
    """Check that the services answer which `calls` of `graph` name, but those of results that `output` has.

    Raises:
        ConfigError: like `Section.check_services`.
    """
    named = [
        (call, path, section)
        for call in calls
        for path, section in sections(call.config, call.name)
        if type(section).check_services is not Section.check_services
    ]
    if not named:
        return
    store = evidence().open_store(output, open_shared(graph.runtime.storage))
    cached = {name for name, stage in stored_stages(graph, output, store) if stage is not None}
    for call, path, section in named:
        if call.name not in cached:
            try:
                section.check_services(call.runtime.model_copy(update={"device": device}))
            except ValueError as error:
                raise ConfigError(f"{path}.{error}") from None


def check_ray_address(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if RAY_ADDRESS uses Ray's client: the driver of a run must be a process of a node."""
    address = environment.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS: {address!r} is not allowed: must be HOST:PORT of a cluster this machine is a node of "
            "(`ray start --address=HOST:PORT --num-cpus=0` joins it without offering CPUs)"
        )


def check_servers(machines: set[str], environment: Mapping[str, str] = os.environ) -> None:
    """Check that stages, which run on any node, can reach Prefect and MLflow.

    Args:
        machines: addresses of the machines of all nodes.

    Raises:
        ConfigError: there are several machines, and only this one can reach a server.
    """
    if len(machines) < 2:
        return
    for name, what in SERVERS.items():
        address = environment.get(name, "")
        host = urlsplit(address).hostname
        if host is None or is_loopback(host):
            raise ConfigError(
                f"{name}: {strip_credentials(address) or 'unset'!r} is not allowed on a cluster of {len(machines)} "
                f"machines: must be the address of a {what} that all of them can reach, as http://HOST:PORT"
            )
